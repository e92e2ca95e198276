"""What went into a machine is enough to know what came out; the tape is enough to know its state."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wan_diloco.protocol.events import SyncerEffect, SyncerEvent
from wan_diloco.protocol.serial import dumps, loads
from wan_diloco.protocol.state_json import state_to_json
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.simulation.machines import LinkProfile, MachineWorld, WorldSettings
from wan_diloco.simulation.trials import FaultKind, play, random_trial

RESTARTS = {FaultKind.RESTART, FaultKind.CRASH}


@settings(max_examples=8)
@given(st.integers(0, 2**32))
@example(1286)  # a Hello that comes twice, the second time in a session that a twin has replaced
def test_recorded_inputs_give_the_very_same_effects(seed: int) -> None:
    trial = random_trial(random.Random(seed))
    trial = replace(trial, faults=tuple(fault for fault in trial.faults if fault.kind not in RESTARTS))
    world = play(trial)
    lines = [(repr(now_s), None if event is None else dumps(event)) for now_s, event in world.inputs]

    machine = SyncerMachine(trial.settings.for_syncer(), trial.settings.fresh_state())
    outputs: list[list[SyncerEffect]] = []
    for now, line in lines:
        if line is None:
            outputs.append(machine.start(float(now)))
            continue
        event: Any = loads(SyncerEvent, line)  # type: ignore[arg-type] # a union is no type
        outputs.append(machine.handle(event, float(now)))
    assert outputs == world.outputs
    assert state_to_json(machine.state) == state_to_json(world.syncer.state)


@pytest.mark.parametrize("at_s", [0.5, 3.3, 7.01, 11.7, 60.0])
@pytest.mark.parametrize("snapshot", [True, False])
def test_snapshot_and_tape_give_the_state_back(at_s: float, *, snapshot: bool) -> None:
    links = (LinkProfile(), LinkProfile(step_s=1.4), LinkProfile(upload_s=3.0))
    world = MachineWorld(WorldSettings(links=links, quorum=2, total_steps=20, drop=0.1, poison=0.1), seed=3)
    if snapshot:
        world.agenda.at(at_s / 2, lambda: world.disk.snapshot(world.syncer.state))
    world.run(until_s=at_s)
    alive, restored = world.syncer.state, world.disk.restore()
    # What reports alone tell comes again with the next reports.
    on_tape = ("versions", "digests", "updates", "pool", "closed", "units", "merges", "participation", "totals")
    on_tape += ("incarnations", "anchors", "started", "ended", "term", "due_steps")
    before, after = state_to_json(alive), state_to_json(restored)
    for name in on_tape:
        assert after[name] == before[name], name
    assert restored.ledger.merged == alive.ledger.merged
    assert restored.ledger.totals(restored.parameters).balance == 0


def test_totals_never_fall_across_restarts() -> None:
    links = (LinkProfile(), LinkProfile(step_s=1.4), LinkProfile(upload_s=3.0))
    world = MachineWorld(WorldSettings(links=links, quorum=2, total_steps=40, drop=0.1), seed=4)
    names = ("rounds", "merged_tokens", "merged_parameters", "upload_bytes", "update_bytes", "published_parameters")
    highest = dict.fromkeys(names, 0.0)
    for turn in range(1, 4):
        world.run(until_s=12.0 * turn)
        world.restart_syncer(0.2)
        world.run(until_s=12.0 * turn + 0.3)
        status = status_of(world.syncer, world.now_s)
        for name in names:
            assert getattr(status, name) >= highest[name], name
            highest[name] = getattr(status, name)
    assert min(highest.values()) > 0
    world.run(until_s=600.0)
    assert world.ended
    assert world.syncer.state.term == 4
