"""What links, disks and clocks do to a simulated run, each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wan_diloco.protocol.events import LearnerDisconnected, LearnerSaid, SyncerEvent
from wan_diloco.protocol.messages import Report
from wan_diloco.simulation.faults import Fault, FaultKind, befall
from wan_diloco.simulation.machines import LinkProfile, MachineWorld, Said, WorldSettings
from wan_diloco.units import LearnerId

M0 = LearnerId("m0")
SETTINGS = WorldSettings(links=(LinkProfile(), LinkProfile()), total_steps=30)


def fault(kind: FaultKind, lasts_s: float, amount: int = 0) -> Fault:
    return Fault(at_s=0.0, kind=kind, learner_id=M0, lasts_s=lasts_s, amount=amount)


def world_at(time_s: float, settings: WorldSettings = SETTINGS) -> MachineWorld:
    world = MachineWorld(settings, seed=1)
    world.run(until_s=time_s)
    return world


def heard(world: MachineWorld, during_s: float) -> list[SyncerEvent]:
    """What the syncer hears of the first learner from now on."""
    events: list[SyncerEvent] = []
    session = world.nodes[M0].session

    def watch(said: Said) -> None:
        if isinstance(said, LearnerSaid | LearnerDisconnected) and said.session == session:
            events.append(said)

    world.watch = watch
    world.run(until_s=world.now_s + during_s)
    return events


def test_what_a_short_partition_holds_up_comes_afterwards_in_its_order() -> None:
    world = world_at(5.0)
    assert befall(world, fault(FaultKind.ONE_WAY_UP, 3.0))
    assert heard(world, 2.9) == []
    steps = [
        event.message.local_step
        for event in heard(world, 0.3)
        if isinstance(event, LearnerSaid) and isinstance(event.message, Report)
    ]
    assert len(steps) >= 3
    assert steps == sorted(steps)


def test_one_way_is_one_way() -> None:
    world = world_at(5.0)
    assert befall(world, fault(FaultKind.ONE_WAY_DOWN, 3.0))
    assert heard(world, 2.9) != []


def test_both_ends_give_a_long_partition_up_and_find_each_other_again() -> None:
    world = world_at(5.0)
    first = world.nodes[M0].session
    assert befall(world, fault(FaultKind.ONE_WAY_DOWN, 20.0))
    assert any(isinstance(event, LearnerDisconnected) for event in heard(world, 14.0))
    world.run(until_s=60.0)
    assert first not in world.sessions
    assert world.ended


def test_a_full_disk_takes_no_work_until_there_is_room_and_training_goes_on() -> None:
    world = world_at(5.0)
    taken = len(world.invariants.stored_hi)
    assert befall(world, fault(FaultKind.FULL_DISK, 6.0))
    world.run(until_s=10.0)
    assert len(world.invariants.stored_hi) == taken
    assert world.nodes[M0].local_step >= 9
    world.run(until_s=15.0)
    assert len(world.invariants.stored_hi) > taken
    world.run(until_s=200.0)
    assert world.ended


@pytest.mark.parametrize("amount", [0, 20])
def test_a_wall_clock_that_is_set_changes_nothing(amount: int) -> None:
    """Neither while processes run nor when the next ones begin."""
    ends = []
    for steps in (amount, 10):
        world = world_at(5.0)
        assert befall(world, fault(FaultKind.CLOCK, 1.0, steps))
        world.restart_syncer(1.0)
        world.run(until_s=300.0)
        assert world.ended
        ends.append((world.now_s, world.syncer.state.digests))
    assert ends[0][1] == ends[1][1]


def test_who_comes_late_is_waited_for_only_so_long_and_takes_part() -> None:
    world = world_at(6.0, replace(SETTINGS, late=(M0,), start_timeout_s=3.0))
    assert world.syncer.state.started
    assert befall(world, fault(FaultKind.JOIN_LATE, 0.0))
    world.run(until_s=200.0)
    assert world.ended
    assert world.invariants.fresh_in[M0]
