"""The table of transitions knows all that the protocol can say, and counts only what it knows."""

from __future__ import annotations

import pytest

from wan_diloco.protocol.events import CloseSession, LearnerConnected, LearnerDisconnected, SendToLearner, SessionId
from wan_diloco.protocol.messages import Stop
from wan_diloco.simulation import transition_table
from wan_diloco.simulation.transitions import Transitions, missing_from_table, table
from wan_diloco.units import GlobalStep

STOP = SendToLearner(session=SessionId(1), message=Stop(reason="", global_step=GlobalStep(0)))


def test_every_event_effect_and_reason_of_the_protocol_is_in_the_table() -> None:
    assert missing_from_table() == set()


@pytest.mark.parametrize("event", ["Report", "TimerFired", "UploadStored"])
def test_an_event_that_the_table_lacks_is_missed(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(transition_table.SYNCER, event)
    assert f"syncer: {event}" in missing_from_table()


def test_what_is_said_to_be_unreachable_is_not_counted() -> None:
    assert table().isdisjoint(transition_table.UNREACHABLE)
    assert all(transition_table.UNREACHABLE.values()), "each has its reason"


def test_what_is_seen_counts_once_and_what_the_table_lacks_is_told() -> None:
    transitions = Transitions()
    for _ in range(2):
        transitions.note("syncer", LearnerConnected(session=SessionId(1)), [])
    transitions.note("syncer", LearnerDisconnected(session=SessionId(1), reason=""), [STOP])
    seen, undeclared = transitions.result()
    assert seen == {"syncer: LearnerConnected -> nothing"}
    assert undeclared == {"syncer: LearnerDisconnected -> say Stop"}


def test_a_session_that_is_ended_for_a_reason_of_its_own_is_told() -> None:
    transitions = Transitions()
    for reason in ("refused: the layout differs", "for no reason"):
        transitions.note(
            "syncer", LearnerConnected(session=SessionId(1)), [CloseSession(session=SessionId(1), reason=reason)]
        )
    seen, undeclared = transitions.result()
    assert "closed: refused" in seen
    assert "closed: for no reason" in undeclared
