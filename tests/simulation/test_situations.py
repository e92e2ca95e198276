"""What happens to every long run some day, each made to happen, and seen to have happened."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from wan_diloco.errors import EXIT_AUTH, EXIT_OK
from wan_diloco.protocol.events import (
    LearnerDisconnected,
    Record,
    SendToLearner,
    SendUpdate,
    ShowReason,
    SyncerEffect,
    TransferBroken,
    UploadFailed,
    UploadOffered,
)
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    ContributionRefused,
    Pull,
    RefusalReason,
    SegmentKind,
)
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import ContributionJournalled, RoundClosed
from wan_diloco.simulation.machines import LinkProfile, MachineWorld, Said, WorldSettings
from wan_diloco.units import FragmentId, LearnerId

M0, M1, M2 = LearnerId("m0"), LearnerId("m1"), LearnerId("m2")
FAST = LinkProfile()


class Witness:
    """Remembers what passes the syncer, and when."""

    def __init__(self, world: MachineWorld) -> None:
        self.world = world
        self.seen: list[tuple[float, Said]] = []
        self.acts: list[Callable[[Said], None]] = []
        world.watch = self._see

    def _see(self, said: Said) -> None:
        self.seen.append((self.world.now_s, said))
        for act in self.acts:
            act(said)

    def all(self, kind: type) -> list[Said]:
        return [said for _, said in self.seen if isinstance(said, kind)]

    def messages(self, kind: type) -> list[object]:
        return [
            said.message for _, said in self.seen if isinstance(said, SendToLearner) and isinstance(said.message, kind)
        ]

    def records(self, kind: type) -> list[object]:
        return [said.record for _, said in self.seen if isinstance(said, Record) and isinstance(said.record, kind)]

    def closed(self) -> list[RoundClosed]:
        return [record for record in self.records(RoundClosed) if isinstance(record, RoundClosed)]


def begin(settings: WorldSettings, seed: int = 1) -> tuple[MachineWorld, Witness]:
    world = MachineWorld(settings, seed)
    return world, Witness(world)


def first_of(chosen: Callable[[SyncerEffect], bool]) -> Callable[[SyncerEffect], bool]:
    """Lose the first effect that is meant, and nothing else."""
    lost: list[SyncerEffect] = []

    def loses(effect: SyncerEffect) -> bool:
        if lost or not chosen(effect):
            return False
        lost.append(effect)
        return True

    return loses


def ends_well(world: MachineWorld) -> None:
    """Everybody hears of the end, and all who stand hold the same bits."""
    world.run(until_s=2000.0)
    assert world.ended
    assert all(node.exit_code == EXIT_OK for node in world.nodes.values() if node.alive)
    assert status_of(world.syncer, world.now_s).balance == 0


def test_a_lost_install_is_sent_again() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST), total_steps=12))
    world.loses = first_of(lambda effect: isinstance(effect, SendUpdate))
    ends_well(world)
    broken = witness.all(TransferBroken)
    assert len(broken) == 1
    assert isinstance(broken[0], TransferBroken)
    sent = [
        said
        for said in witness.all(SendUpdate)
        if isinstance(said, SendUpdate)
        and said.session == broken[0].session
        and said.header.fragment_id == broken[0].fragment_id
    ]
    assert sent[0].header == sent[1].header, "the same again, at once"
    assert all(node.versions[broken[0].fragment_id].count > 0 for node in world.nodes.values())


def test_who_lacks_everything_is_sent_a_little_at_a_time_and_the_oldest_first() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST), num_fragments=8, period_steps=8, total_steps=40))
    world.run(until_s=20.0)
    world.kill(world.nodes[M0])
    node = world.revive(world.nodes[M0])
    under_way: list[int] = []

    def count(said: Said) -> None:
        if isinstance(said, SendUpdate) and said.session == node.session:
            under_way.append(world.syncer.context.downlink.num_sending(M0))

    witness.acts.append(count)
    world.run(until_s=21.0)
    assert len(under_way) >= 8, "it began with nothing"
    assert max(under_way) == world.settings.schedule.uploads_max(world.settings.overlap_steps, 0)
    assert min(version.count for version in node.versions) > 0
    ends_well(world)


def test_an_install_lost_with_its_connection_comes_after_the_reconnect() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST), total_steps=12))
    node = world.nodes[M0]

    def cut_at_the_first_update(said: Said) -> None:
        if isinstance(said, SendUpdate) and said.session == node.session and not witness.all(LearnerDisconnected):
            world.agenda.after(0.001, lambda: world.cut(node))

    witness.acts.append(cut_at_the_first_update)
    ends_well(world)
    assert witness.all(LearnerDisconnected)
    assert world.syncer.state.incarnations[M0] == 1, "a cut connection is no new life"
    assert all(version.count > 0 for version in node.versions)


def test_a_lost_acknowledgement_is_repeated_and_the_work_merged_once() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST), total_steps=30))
    world.loses = first_of(
        lambda effect: isinstance(effect, SendToLearner) and isinstance(effect.message, Acknowledged)
    )
    ends_well(world)
    lost = witness.messages(Acknowledged)[0]
    assert witness.messages(Acknowledged).count(lost) >= 2, "it was said again"
    assert isinstance(lost, Acknowledged)
    offered = [said.header for said in witness.all(UploadOffered) if isinstance(said, UploadOffered)]
    repeated = [
        header
        for header in offered
        if (header.key.fragment_id, header.key.step_lo, header.step_hi)
        == (lost.fragment_id, lost.step_lo, lost.step_hi)
    ]
    keys = [header.key for header in repeated]
    assert any(keys.count(key) > 1 for key in keys), "it was offered again"
    merged = [entry.header.key for closed in witness.closed() for entry in closed.entries]
    assert len(merged) == len(set(merged))
    assert set(keys) <= set(merged)


def test_who_is_three_times_slower_than_the_run_takes_part_in_nearly_every_round() -> None:
    # A round is due at each step of the run: three of them fall within a step of the slow ones.
    slow = LinkProfile(step_s=3.0)
    world, witness = begin(
        WorldSettings(
            links=(FAST, FAST, slow, slow), num_fragments=12, period_steps=12, overlap_steps=2, total_steps=120
        )
    )
    ends_well(world)
    closed = witness.closed()
    later = closed[len(closed) // 4 :]  # once it knows how slow it is
    for learner_id in (M2, LearnerId("m3")):
        merged = [
            closed
            for closed in later
            if any(entry.staleness == 0 and entry.header.key.learner_id == learner_id for entry in closed.entries)
        ]
        assert len(merged) >= 0.9 * len(later)


def test_a_late_upload_rides_along_in_the_next_round() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST, LinkProfile(upload_s=6.0)), period_steps=8, total_steps=48))
    ends_well(world)
    late = [
        (closed, entry)
        for closed in witness.closed()
        for entry in closed.entries
        if entry.header.key.learner_id == M2 and entry.staleness == 1
    ]
    assert late
    for closed, entry in late:
        assert entry.header.round_id < closed.round_id, "it answered an earlier round"
        fresh = {other.header.key.learner_id for other in closed.entries if other.staleness == 0}
        assert len(fresh - {M2}) >= world.settings.quorum, "it stands for nobody in the quorum"
    totals = world.syncer.state.totals
    assert totals.stale == len(late)


def test_whose_work_comes_when_its_base_is_long_over_is_fresh_again_with_its_next() -> None:
    world, witness = begin(WorldSettings(links=(FAST,) * 3, num_fragments=1, period_steps=4, total_steps=72))
    # The first upload takes more than three periods; those after it find the link as it usually is.
    world.change_link(world.nodes[M0], slower=14.0 / FAST.upload_s, steps_slower=1.0, lasts_s=20.0)
    ends_well(world)
    (refusal,) = witness.messages(ContributionRefused)
    assert isinstance(refusal, ContributionRefused)
    assert refusal.reason in {RefusalReason.STALE_BASE, RefusalReason.LATE}
    (refused_s,) = [
        time_s for time_s, said in witness.seen if isinstance(said, SendToLearner) and said.message == refusal
    ]
    after = [closed for time_s, closed in _closed_at(witness) if time_s > refused_s]
    assert len(after) >= 10
    entries = [[entry for entry in closed.entries if entry.header.key.learner_id == M0] for closed in after]
    assert all([entry.staleness for entry in found] == [0] for found in entries[1:10]), "in each round, and fresh"
    assert not any(said.header.resync for said in witness.all(SendUpdate) if isinstance(said, SendUpdate))


def _closed_at(witness: Witness) -> list[tuple[float, RoundClosed]]:
    return [
        (time_s, said.record)
        for time_s, said in witness.seen
        if isinstance(said, Record) and isinstance(said.record, RoundClosed)
    ]


def test_who_dies_after_its_acknowledgement_has_its_work_merged() -> None:
    world, witness = begin(
        WorldSettings(
            links=(FAST, LinkProfile(upload_s=1.5)), num_fragments=1, period_steps=6, quorum=2, total_steps=12
        )
    )
    victims: list[ContributionHeader] = []

    def kill_after_the_acknowledgement(said: Said) -> None:
        if isinstance(said, SendToLearner) and isinstance(said.message, Acknowledged) and not victims:
            assert world.sessions[said.session] is world.nodes[M0], "the fast one is acknowledged first"
            victims.append(next(iter(world.syncer.state.pool[0].values())).header)
            world.agenda.after(0.03, lambda: world.kill(world.nodes[M0]))

    witness.acts.append(kill_after_the_acknowledgement)
    world.run(until_s=15.0)
    assert not world.nodes[M0].alive
    closed = witness.closed()[0]
    assert victims[0] in [entry.header for entry in closed.entries]
    assert {entry.header.key.learner_id for entry in closed.entries} == {M0, M1}, "and it counts for the quorum"
    assert world.syncer.state.ledger.merged[0].steps == sum(entry.header.steps for entry in closed.entries)
    assert world.syncer.state.participation[M0] == 1
    world.revive(world.nodes[M0])
    ends_well(world)


def test_a_resync_replaces_a_value_at_an_unchanged_version() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST), num_fragments=1, period_steps=8, quorum=2, total_steps=24))
    spoiled: list[ContributionHeader] = []

    def spoils(header: ContributionHeader) -> bool:
        if spoiled or header.key.learner_id != M0:
            return False
        spoiled.append(header)
        return True

    world.spoils = spoils
    ends_well(world)
    assert [said.reason for said in witness.all(UploadFailed) if isinstance(said, UploadFailed)] == [
        RefusalReason.NON_FINITE
    ]
    resyncs = [
        said.header for said in witness.all(SendUpdate) if isinstance(said, SendUpdate) and said.header.resync == 1
    ]
    assert len(resyncs) == 1
    assert resyncs[0].segments[0].kind is SegmentKind.VALUE
    assert resyncs[0].to_version == spoiled[0].base, "the version is the one it had"
    later = [
        record.header
        for record in witness.records(ContributionJournalled)
        if isinstance(record, ContributionJournalled) and record.header.key.learner_id == M0
    ]
    assert later[0].base == spoiled[0].base
    assert later[0].key.step_lo >= spoiled[0].step_hi, "its counters restarted"
    assert spoiled[0].key not in world.invariants.merged


def test_a_round_short_of_quorum_for_minutes_stops_nobody_and_closes_when_somebody_returns() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST, FAST), quorum=3, total_steps=400, lease_s=5.0))
    world.run(until_s=6.0)
    world.kill(world.nodes[M2])
    already = len(witness.closed())
    world.run(until_s=300.0)
    assert len(witness.closed()) == already, "nothing closes without a quorum"
    status = status_of(world.syncer, world.now_s)
    assert "2 of 3 learners are live" in status.waiting["quorum"]
    assert status.rounds_open
    for round_ in status.rounds_open:
        assert round_.attempt >= 3
        assert round_.open_s > 200.0
        assert round_.reason.startswith("2 of 3 learners") or round_.reason.startswith("0 of 3 learners")
        assert f"fragment:{round_.fragment_id}" in status.waiting
    for name in (M0, M1):
        times = [time_s for time_s, _ in world.nodes[name].steps_s]
        assert max(later - earlier for earlier, later in pairwise(times)) <= 1.001
        assert world.nodes[name].local_step > 280
    attempts = [pull.attempt for pull in witness.messages(Pull) if isinstance(pull, Pull)]
    assert max(attempts) <= 15, "it is not asked for every second"
    world.revive(world.nodes[M2])
    returned_s = world.now_s
    world.run(until_s=returned_s + 15.0)
    waited = {round_.round_id for round_ in status.rounds_open}
    assert waited <= {closed.round_id for closed in witness.closed()}
    ends_well(world)


def test_who_wakes_after_its_lease_is_the_same_learner_and_gets_what_it_lacks() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST), total_steps=40, lease_s=4.0))
    node = world.nodes[M0]
    world.run(until_s=10.0)
    node.freeze(15.0)
    world.run(until_s=20.0)
    assert M0 not in {member.learner_id for member in world.syncer.context.membership.live()}
    assert ShowReason(
        topic="member:m0", text="nothing was heard of m0 for a whole lease: rounds go on without it"
    ) in witness.all(ShowReason)
    held = min(node.versions)
    world.run(until_s=30.0)
    assert M0 in {member.learner_id for member in world.syncer.context.membership.live()}
    assert world.syncer.state.incarnations[M0] == 1
    assert min(node.versions) > held
    ends_well(world)


@pytest.mark.parametrize("first_stands", [True, False])
def test_the_same_name_twice_leaves_the_newer_and_ends_the_other(*, first_stands: bool) -> None:
    world, _ = begin(WorldSettings(links=(FAST, FAST), total_steps=30))
    world.run(until_s=5.0)
    older = world.nodes[M0]
    newer = world.join(M0, older.link)
    if first_stands:
        # The newer process has hardly begun when the older one's connection breaks: it is refused all the same.
        world.cut(older)
    ends_well(world)
    assert (older.exit_code, newer.exit_code) == (EXIT_AUTH, EXIT_OK)
    assert world.syncer.state.incarnations[M0] == 2
    assert newer.machine.incarnation == 2


def test_a_cut_that_only_the_learner_notices_is_mended_by_its_new_session() -> None:
    world, witness = begin(WorldSettings(links=(FAST, FAST), total_steps=30))
    world.run(until_s=5.0)
    world.cut(world.nodes[M0], syncer_notices_s=20.0)
    world.run(until_s=8.0)
    assert not witness.all(LearnerDisconnected)
    assert world.nodes[M0].session is not None
    merged = len(world.invariants.fresh_in[M0])
    world.run(until_s=15.0)
    assert len(world.invariants.fresh_in[M0]) > merged
    ends_well(world)
    assert witness.all(LearnerDisconnected), "and the late news of the old session's end changed nothing"


@pytest.mark.parametrize("upload_s", [10.0, 150.0])
def test_a_quorum_slower_than_the_schedule_is_reached_all_the_same(upload_s: float) -> None:
    """Uploads take longer than a period: new attempts must not outrun every answer."""
    world, witness = begin(
        WorldSettings(links=(LinkProfile(upload_s=upload_s),) * 2, num_fragments=2, total_steps=2000)
    )
    world.run(until_s=8 * upload_s + 100)
    assert len(witness.closed()) >= 2
    assert world.nodes[M0].local_step >= world.now_s - 2


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_the_global_step_goes_on_from_where_it_was_when_the_syncer_is_back(overlap_steps: int) -> None:
    links = (FAST, FAST, LinkProfile(step_s=1.5))
    quorum = 3 if overlap_steps == 0 else 2
    world, _ = begin(
        WorldSettings(
            links=links,
            quorum=quorum,
            num_fragments=2,
            period_steps=16,
            overlap_steps=overlap_steps,
            total_steps=32,
            lease_s=60.0,
        )
    )
    world.run(until_s=12.0)
    before = world.syncer.context.membership.global_step
    world.restart_syncer(0.5)
    world.run(until_s=14.0)
    assert world.syncer.state.term == 2
    after = world.syncer.context.membership.global_step
    assert 0 < before <= after <= before + 2, "no round was closed since, and nothing is lost all the same"
    for member in world.syncer.context.membership.live():
        assert world.nodes[member.learner_id].local_step - member.local_step <= 1, "what it reports is heeded"
    ends_well(world)
    if overlap_steps == 0:
        assert [node.local_step for node in world.nodes.values()] == [32, 32, 32], "not a step more than without it"


def test_a_restart_opens_anew_what_was_due_and_not_closed() -> None:
    world, witness = begin(
        WorldSettings(links=(FAST, FAST), num_fragments=8, period_steps=4, overlap_steps=0, quorum=2)
    )

    def crash_between_two_closes(said: Said) -> None:
        if isinstance(said, Record) and isinstance(said.record, RoundClosed) and len(witness.closed()) == 3:
            world.doom_syncer(1, 1.0)

    witness.acts.append(crash_between_two_closes)
    ends_well(world)
    assert world.syncer.state.term == 2
    rounds = [closed.fragment_id for closed in witness.closed()]
    assert {fragment: rounds.count(FragmentId(fragment)) for fragment in range(8)} == dict.fromkeys(range(8), 10)


def test_no_syncer_no_step_beyond_the_last_and_the_end_all_the_same() -> None:
    """The syncer is away for many times what was left of the run."""
    world, _ = begin(WorldSettings(links=(FAST, FAST, LinkProfile(step_s=2.0)), total_steps=40))
    world.run(until_s=32.0)
    world.restart_syncer(100.0)
    world.run(until_s=130.0)
    assert [world.nodes[name].local_step for name in (M0, M1)] == [40, 40]
    assert world.nodes[M2].local_step <= 41, "by its own estimate of the global step"
    ends_well(world)
    assert max(node.local_step for node in world.nodes.values()) <= 48, "a step for a round that lacked work"
    assert min(world.syncer.state.merges) > 0


@pytest.mark.parametrize("quorum", [1, 2, 3])
@pytest.mark.parametrize("merge_s", [3.0, 30.0])
def test_rounds_that_lag_behind_do_not_lengthen_the_training(quorum: int, merge_s: float) -> None:
    """A disk so slow that merges take longer than a period: the run ends late, and not a step later."""
    links = (FAST, LinkProfile(step_s=1.5), LinkProfile(step_s=1.5, upload_s=4.0))
    world, witness = begin(WorldSettings(links=links, quorum=quorum, total_steps=40, merge_s=merge_s))
    ends_well(world)
    state = world.syncer.state
    assert state.global_step == 40
    for node in world.nodes.values():
        assert node.local_step <= 40 * max(1.0, 1.5 if quorum > 1 else 1.0) + len(witness.closed())
    assert min(state.merges) > 0


def test_a_held_learner_is_let_go_when_the_step_turns_out_to_be_behind() -> None:
    """Three make the quorum, and one is gone: the others count on from the last step that was agreed on."""
    world, _ = begin(WorldSettings(links=(FAST, FAST, FAST), quorum=3, total_steps=40, lease_s=5.0))
    world.run(until_s=20.0)
    world.kill(world.nodes[M2])
    world.run(until_s=200.0)
    assert status_of(world.syncer, world.now_s).global_step < 30
    lease_steps = 5
    assert all(world.nodes[name].local_step <= 41 + lease_steps for name in (M0, M1)), "not past the end of the run"
    world.revive(world.nodes[M2])
    ends_well(world)
    assert world.syncer.state.global_step == 40


def test_who_lacks_work_does_not_make_attempts_outrun_the_answers_of_the_others() -> None:
    """One learner's steps have no tokens, and the two that make the quorum need longer than a quick attempt."""
    links = (LinkProfile(delay_s=1.5, upload_s=2.0), FAST, LinkProfile(step_s=2.0, delay_s=1.5, upload_s=4.0))
    world, _ = begin(
        WorldSettings(links=links, num_fragments=6, overlap_steps=3, quorum=2, bound_steps=2.0, total_steps=14)
    )
    world.nodes[M1].go_barren(float("inf"))
    ends_well(world)


def test_rounds_that_lack_finite_losses_end_the_run_though_their_answers_never_meet() -> None:
    links = (LinkProfile(step_s=1.3), LinkProfile(step_s=2.0, delay_s=1.5, upload_s=12.0))
    world, _ = begin(WorldSettings(links=links, num_fragments=5, overlap_steps=3, total_steps=16))
    for node in world.nodes.values():
        node.go_barren(float("inf"))
    ends_well(world)
