"""Figures that only reports and refusals tell come back after a crash, nearly as they were."""

from __future__ import annotations

from tests.support.desk import Desk, E, W, only, records
from tests.support.protocol import BATCH_TOKENS, EAST, WEST, fresh_state, hello, report
from wan_diloco.protocol.events import CallsRefused, Record, SessionId, TimerFired
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.protocol.serial import dumps, loads
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import ProgressNoted, TapeRecord
from wan_diloco.units import LearnerId


def replayed(desk: Desk) -> SyncerState:
    """What a process finds that comes after a crash: the tape, and no snapshot."""
    state = fresh_state()
    for effect in desk.effects:
        if isinstance(effect, Record):
            state.apply(loads(TapeRecord, dumps(effect.record)))  # type: ignore[arg-type] # a union is no type
    return state


def test_tokens_and_refusals_do_not_fall_over_a_crash() -> None:
    desk = Desk()
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    desk.says(SessionId(7), hello(LearnerId("nobody")))
    desk.tell(CallsRefused(reason=RefusalReason.GARBAGE, number=41))
    desk.tell(CallsRefused(reason=RefusalReason.GARBAGE, number=1))
    desk.says(E, report(3), after_s=2.0)
    before = status_of(desk.machine, desk.now_s)
    assert before.rejected == {"unknown_learner": 1, "garbage": 42}
    after = status_of(Desk(state=replayed(desk)).machine, 0.0)
    assert after.rejected == before.rejected
    assert after.trained_tokens == before.trained_tokens == 3 * BATCH_TOKENS
    assert after.balance == 0


def test_notes_are_few_wait_for_nothing_and_say_only_what_is_new() -> None:
    desk = Desk()
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    for step in range(1, 101):
        desk.says(E, report(step), after_s=0.05)
    notes = [
        effect for effect in desk.effects if isinstance(effect, Record) and isinstance(effect.record, ProgressNoted)
    ]
    assert 4 <= len(notes) <= 7
    assert not any(effect.durable for effect in notes)
    desk.tell(TimerFired(), after_s=2.0)
    effects = desk.tell(TimerFired(), after_s=2.0)
    assert not [record for record in records(effects) if isinstance(record, ProgressNoted)]
    assert only(ProgressNoted, records(desk.says(E, report(101))))
