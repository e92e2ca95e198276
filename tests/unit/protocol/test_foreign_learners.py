"""A learner that has taken part in a run comes to a syncer that knows nothing of it: nobody may be ended by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, messages, only
from tests.support.protocol import EAST, TERMS, WEST, hello, syncer_settings
from wan_diloco.protocol.admission import Standing, is_of_another_state
from wan_diloco.protocol.events import CloseSession, LearnerConnected, SessionId, ShowReason, StateMissing, TimerFired
from wan_diloco.protocol.messages import Hello, Welcome
from wan_diloco.protocol.state_json import state_to_json
from wan_diloco.units import Epoch, Incarnation, LearnerId, LocalStep

LIVED = (hello(EAST, incarnation=1, local_step=275), hello(EAST, incarnation=0, local_step=275))


@pytest.mark.parametrize("lived", [*LIVED, hello(EAST, incarnation=3, local_step=275, term=3)])
def test_a_state_that_has_just_begun_gives_way(lived: Hello) -> None:
    desk = Desk(syncer_settings())
    desk.tell(LearnerConnected(session=E))
    state = state_to_json(desk.machine.state)
    assert desk.says(E, lived) == [StateMissing(learner_id=EAST, local_step=LocalStep(275))]
    assert state_to_json(desk.machine.state) == state
    assert desk.says(W, hello(WEST)) == [], "nothing is decided any more"
    assert desk.tell(TimerFired(), after_s=1000.0) == []


@pytest.mark.parametrize("lived", LIVED)
def test_a_run_that_has_started_turns_it_away_and_goes_on(lived: Hello) -> None:
    desk = Desk(replace(syncer_settings(), start_timeout_s=5.0))
    desk.joins(W, WEST)
    desk.tell(TimerFired(), after_s=5.0)
    assert desk.machine.state.started
    for attempt in (1, 2):
        session = SessionId(10 + attempt)
        desk.tell(LearnerConnected(session=session))
        effects = desk.says(session, lived)
        assert not messages(effects, session), "whoever is told that it is refused ends"
        assert only(CloseSession, effects).session == session  # type: ignore[attr-defined]
        assert len([effect for effect in effects if isinstance(effect, ShowReason)]) == (attempt == 1)
        assert EAST not in desk.machine.state.incarnations
    assert desk.machine.state.rejected


@pytest.mark.parametrize(
    ("said_by", "standing"),
    [
        (hello(EAST), Standing()),
        (LIVED[0], Standing(incarnation=Incarnation(2))),
        (LIVED[0], Standing(went_back=True)),
        (replace(LIVED[0], run="another"), Standing()),
        (replace(LIVED[0], learner_id=LearnerId("south")), Standing()),
        (replace(LIVED[0], settings=(("codec", "int8"),)), Standing()),
    ],
)
def test_who_is_new_or_known_or_forgotten_or_a_stranger_isnt_foreign(said_by: Hello, standing: Standing) -> None:
    assert not is_of_another_state(TERMS, said_by, standing)
    assert is_of_another_state(TERMS, LIVED[0], Standing())


def test_a_state_that_may_have_gone_back_takes_in_whom_it_forgot() -> None:
    desk = Desk(replace(syncer_settings(), epoch_min=Epoch(1)))
    desk.tell(LearnerConnected(session=E))
    assert only(Welcome, messages(desk.says(E, replace(LIVED[0], life_id="east's")), E))
