"""Learners that nobody listed, in whole runs: as many as there are, and what becomes of their data."""

from __future__ import annotations

from tests.simulation.test_situations import begin, ends_well
from wan_diloco.errors import EXIT_OK, EXIT_TEMPORARY
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import LearnerAdmitted, LeaseEnded
from wan_diloco.simulation.machines import LinkProfile, MachineWorld, WorldSettings
from wan_diloco.units import LearnerId

U0, U1 = LearnerId("u0"), LearnerId("u1")
FAST = LinkProfile()


def joining(number: int, *, spare: int | None = None, total_steps: int = 60, listed: int = 2) -> WorldSettings:
    return WorldSettings(
        links=(FAST,) * listed,
        unlisted=(FAST,) * number,
        unlisted_max=number,
        num_spare_shards=number if spare is None else spare,
        total_steps=total_steps,
        lease_s=2.0,
    )


def comes(world: MachineWorld, learner_id: LearnerId) -> None:
    world.join(learner_id, world.settings.link(learner_id))


def pace(steps_s: list[tuple[float, int]], since_s: float, until_s: float) -> float:
    """Steps a second, from the first boundary within to the last."""
    within = [(at_s, step) for at_s, step in steps_s if since_s <= at_s <= until_s]
    (first_s, first), (last_s, last) = within[0], within[-1]
    return (last - first) / (last_s - first_s)


def test_two_learners_become_sixteen_and_the_first_two_are_as_fast_as_before() -> None:
    world, _ = begin(joining(14))
    for index, learner_id in enumerate(world.settings.joiners):
        world.agenda.at(12.0 + index, lambda name=learner_id: comes(world, name))  # type: ignore[misc] # bound now
    world.run(until_s=40.0)
    live = [member for member in world.syncer.context.membership.live() if member.session is not None]
    assert len(live) == 16
    shards = {lease.shard for lease in world.syncer.state.leases.values()}
    assert shards == set(range(16)), "each reads data of its own"
    for learner_id in world.settings.learners:
        steps_s = world.nodes[learner_id].steps_s
        assert pace(steps_s, 26.0, 40.0) >= 0.97 * pace(steps_s, 2.0, 12.0)
    ends_well(world)
    status = status_of(world.syncer, world.now_s)
    assert status.repeated_units == 0
    assert set(status.rejected) <= {"late"}, "who is asked again because others join may answer the first time in time"
    merged = {learner.learner_id: learner.merged_fresh for learner in status.learners}
    assert len(merged) == 16
    assert min(merged.values()) > 0, "everybody's work is in it"


def test_who_hangs_loses_its_data_to_a_joiner_and_wakes_as_a_new_life_of_the_same_process() -> None:
    world, witness = begin(joining(2, spare=1))
    comes(world, U0)
    world.run(until_s=10.0)
    hanging = world.nodes[U0]
    assert hanging.machine.incarnation == 1
    hanging.freeze(12.0)
    world.run(until_s=14.0)
    comes(world, U1)
    world.run(until_s=18.0)
    assert [record.learner_id for record in witness.records(LeaseEnded) if isinstance(record, LeaseEnded)] == [U0]
    assert world.nodes[U1].shard == 2
    world.agenda.at(20.0, world.nodes[U1].leave)
    world.run(until_s=40.0)
    assert world.nodes[U0] is hanging, "it is the same process"
    assert (hanging.machine.incarnation, hanging.exit_code, hanging.shard) == (2, None, 2)
    assert all(resync > 0 for resync in hanging.resyncs), "every fragment came anew"
    ends_well(world)
    assert world.invariants.leases.ended == 2
    status = status_of(world.syncer, world.now_s)
    assert status.repeated_units == 0
    assert status.discarded_tokens["lease_ended"] > 0
    of_new_life = [life for life in world.invariants.covered if life[:2] == (U0, 2)]
    assert of_new_life, "work of its new life was merged"


def test_a_joiner_goes_on_where_the_committed_units_of_the_one_before_it_end() -> None:
    world, witness = begin(joining(2, spare=1))
    comes(world, U0)
    world.run(until_s=20.0)
    world.kill(world.nodes[U0])
    world.run(until_s=24.0)
    committed = world.invariants.leases.committed[world.syncer.state.leases[U0].shard]
    assert committed > 0
    comes(world, U1)
    world.run(until_s=30.0)
    node = world.nodes[U1]
    assert node.read[0] == (2, committed)
    ends_well(world)
    admitted = [record for record in witness.records(LearnerAdmitted) if isinstance(record, LearnerAdmitted)]
    assert [record.shard for record in admitted if record.learner_id in (U0, U1)] == [2, 2]


def test_who_finds_all_data_lent_is_started_again_until_some_are_free() -> None:
    world, _ = begin(joining(2, spare=1, total_steps=80))
    comes(world, U0)
    world.run(until_s=5.0)
    comes(world, U1)
    world.run(until_s=20.0)
    codes = [node.exit_code for node in world.everybody if node.learner_id == U1 and node.exit_code is not None]
    assert len(codes) > 1
    assert set(codes) == {EXIT_TEMPORARY}
    assert world.syncer.state.rejected[RefusalReason.NO_SHARD] == len(codes)
    world.nodes[U0].leave()
    world.run(until_s=30.0)
    assert world.nodes[U1].shard == 2
    ends_well(world)
    assert world.nodes[U1].exit_code == EXIT_OK


def test_a_syncer_that_restarts_takes_no_data_from_who_comes_back_in_time() -> None:
    world, witness = begin(joining(2, spare=1))
    comes(world, U0)
    world.run(until_s=10.0)
    world.disk.snapshot(world.syncer.state)
    world.restart_syncer(0.5)
    world.run(until_s=10.6)
    comes(world, U1)
    world.run(until_s=14.0)
    assert not witness.records(LeaseEnded)
    assert world.nodes[U0].machine.incarnation == 1
    assert world.nodes[U0].runs
    world.run(until_s=2000.0)
    assert world.ended
    assert world.nodes[U0].exit_code == EXIT_OK


def test_joiners_that_another_disk_knows_nothing_of_train_on_as_other_lives_with_whatever_is_free() -> None:
    world, witness = begin(joining(2))
    world.run(until_s=5.0)
    world.disk.snapshot(world.syncer.state)
    world.disk.ship()
    comes(world, U0)
    world.run(until_s=7.0)
    comes(world, U1)
    world.run(until_s=14.0)
    nodes = [world.nodes[U0], world.nodes[U1]]
    assert [node.shard for node in nodes] == [2, 3]
    nodes[0].freeze(8.0)
    assert world.node.lose_disk(0.5)
    assert U0 not in world.disk.restore().incarnations
    world.run(until_s=35.0)
    assert world.syncer.state.epoch == 1
    assert [world.nodes[U0], world.nodes[U1]] == nodes, "they are the same processes"
    assert [node.machine.incarnation for node in nodes] == [2, 2]
    assert [node.shard for node in nodes] == [3, 2], "who came first has what was read least"
    ends_well(world)
    status = status_of(world.syncer, world.now_s)
    assert status.repeated_units == status.balance == 0
    merged = {learner.learner_id: learner.merged_fresh for learner in status.learners}
    assert min(merged[U0], merged[U1]) > 0
    assert not witness.records(LeaseEnded)
