"""One wrong number of a learner neither ends a run nor takes anybody out of it; honest ones are always believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, answer, messages, only, pulled, records
from tests.support.protocol import BATCH_TOKENS, EAST, WEST, contribution, hello, report, syncer_settings
from wan_diloco.protocol.events import CloseSession, LearnerDisconnected, SessionId, TimerFired
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    ContributionRefused,
    Goodbye,
    Pace,
    Pull,
    RefusalReason,
    Report,
    Welcome,
)
from wan_diloco.protocol.plausibility import claim_steps_max, leap_steps_max
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import RoundClosed
from wan_diloco.units import FragmentId, LocalStep

AGAIN = SessionId(9)
TEN_HOURS = 36_000


@pytest.fixture
def desk() -> Desk:
    """Two learners that must both be in each round, started."""
    desk = Desk(syncer_settings(quorum=2))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    return desk


def alone(total_steps: int = 100) -> Desk:
    """East drives the run."""
    desk = Desk(syncer_settings(total_steps=total_steps))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    desk.says(W, Goodbye(reason="enough"))
    return desk


def step(desk: Desk) -> int:
    return desk.machine.context.membership.global_step


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"step_hi": LocalStep(2 + 10**9)}, RefusalReason.IMPLAUSIBLE),
        ({"step_hi": LocalStep(2 + 10**9), "tokens_hi": 10**11}, RefusalReason.IMPLAUSIBLE),
        ({"unit_hi": 2**60}, RefusalReason.IMPLAUSIBLE),
        ({"tokens_hi": 0}, RefusalReason.IMPLAUSIBLE),
    ],
)
def test_a_contribution_beyond_what_its_sender_can_have_done_is_refused_and_its_fragment_goes_on(
    desk: Desk, wrong: dict[str, int], reason: RefusalReason
) -> None:
    pull = pulled(desk)
    effects = desk.stores(E, replace(answer(pull), **wrong))  # type: ignore[arg-type] # by name
    refused = only(ContributionRefused, messages(effects, E))
    assert isinstance(refused, ContributionRefused)
    assert refused.reason is reason
    assert status_of(desk.machine, 0.0).rejected == {reason: 1}
    assert not desk.machine.state.units
    desk.stores(W, answer(pull, WEST))
    closed = only(RoundClosed, records(desk.stores(E, answer(pull))))
    assert isinstance(closed, RoundClosed)
    assert {entry.header.key.learner_id for entry in closed.entries} == {EAST, WEST}
    assert status_of(desk.machine, 0.0).balance == 0


def test_tokens_between_two_contributions_are_bounded_as_well(desk: Desk) -> None:
    """One whose install no report told of yet says where it began."""
    pull = pulled(desk)
    header = replace(answer(pull), key=contribution(step_lo=1, fragment_id=pull.fragment_id).key)
    desk.stores(E, replace(header, tokens_lo=2**40, tokens_hi=2**40 + BATCH_TOKENS))
    assert status_of(desk.machine, 0.0).rejected == {"too_many_tokens": 1}
    assert desk.machine.state.ledger.trained.tokens == 2 * 2 * BATCH_TOKENS


def test_a_contribution_may_overtake_the_report_of_its_steps(desk: Desk) -> None:
    pull = pulled(desk)
    header: ContributionHeader = answer(pull, step_hi=50)
    effects = desk.stores(E, header)
    assert only(Acknowledged, messages(effects, E))


@pytest.mark.parametrize(
    "wrong",
    [
        report(2**40),
        report(3, tokens=2**40),
        report(3, tokens=0),
        report(3, step_lo=4),
        report(3, tokens_lo=2**40),
    ],
    ids=["steps", "tokens", "tokens backwards", "an install in the future", "its tokens"],
)
def test_a_report_that_can_not_be_true_moves_nothing_and_its_sender_may_come_back(desk: Desk, wrong: Report) -> None:
    pulled(desk)
    trained = desk.machine.state.ledger.trained
    effects = desk.says(E, wrong)
    closed = only(CloseSession, effects)
    assert isinstance(closed, CloseSession)
    assert closed.session == E
    assert step(desk) == 2
    assert desk.machine.state.ledger.trained == trained
    assert sum(status_of(desk.machine, 0.0).rejected.values()) == 1
    desk.tell(LearnerDisconnected(session=E, reason="closed"))
    assert only(Welcome, messages(desk.says(AGAIN, hello(incarnation=1, local_step=3))))
    desk.says(AGAIN, report(3))
    desk.says(W, report(3))
    assert step(desk) == 3


@pytest.mark.parametrize("after_s", [1.0, 36_000.0], ids=["within its lease", "after its lease"])
def test_who_trained_ten_hours_without_contact_is_taken_in_and_moves_nothing(after_s: float) -> None:
    """Also within its lease: after a syncer's absence nobody knows how long it was."""
    desk = alone(10_000)
    pulled_at = 2
    desk.says(E, report(pulled_at))
    desk.tell(LearnerDisconnected(session=E, reason="cut"))
    desk.now_s += after_s
    effects = desk.says(AGAIN, hello(incarnation=1, local_step=TEN_HOURS))
    welcome = only(Welcome, messages(effects))
    assert isinstance(welcome, Welcome)
    assert welcome.anchor == TEN_HOURS - pulled_at
    effects = desk.says(AGAIN, report(TEN_HOURS))
    assert not [effect for effect in effects if isinstance(effect, CloseSession)]
    assert step(desk) == pulled_at
    desk.says(AGAIN, report(TEN_HOURS + 1))
    assert step(desk) == pulled_at + 1
    assert status_of(desk.machine, 0.0).rejected == {}
    assert status_of(desk.machine, 0.0).balance == 0


def test_a_restarted_syncer_takes_in_who_trained_on_meanwhile() -> None:
    before = alone(10_000)
    before.says(E, report(2))
    again = Desk(before.machine.context.settings, before.machine.state)
    again.says(E, hello(incarnation=1, local_step=TEN_HOURS))
    again.says(E, report(TEN_HOURS))
    pulls = [message for message in messages(again.says(E, report(TEN_HOURS + 2)), E) if isinstance(message, Pull)]
    header = answer(pulls[-1], step_hi=TEN_HOURS + 2)
    assert only(Acknowledged, messages(again.stores(E, header)))
    assert status_of(again.machine, 0.0).rejected == {}
    assert status_of(again.machine, 0.0).balance == 0


def test_a_leap_is_believed_shown_and_not_followed() -> None:
    desk = alone()
    leap = leap_steps_max(100, 4)
    effects = desk.says(E, report(leap + 1))
    assert step(desk) == 0
    assert desk.machine.context.waiting["leap:east"].endswith("at once: it counts from here")
    pace = only(Pace, messages(effects))
    assert isinstance(pace, Pace)
    assert (pace.global_step, pace.anchor) == (0, leap + 1)
    desk.says(E, report(2 * leap + 1))
    assert step(desk) == leap, "what is no leap is followed"
    assert "leap:east" not in desk.machine.context.waiting


def test_a_wrong_hello_does_not_stay() -> None:
    desk = alone()
    desk.says(E, report(2))
    desk.tell(LearnerDisconnected(session=E, reason="cut"))
    desk.says(AGAIN, hello(incarnation=1, local_step=2**40))
    assert step(desk) == 2
    desk.tell(LearnerDisconnected(session=AGAIN, reason="cut"))
    third = SessionId(10)
    desk.says(third, hello(incarnation=1, local_step=3))
    desk.says(third, report(4))
    assert status_of(desk.machine, 0.0).learners[0].local_step == 4
    assert status_of(desk.machine, 0.0).rejected == {}


def test_a_wrong_hello_leaves_no_anchor_that_the_step_could_never_reach(desk: Desk) -> None:
    desk.says(E, report(2))
    desk.says(W, report(2))
    desk.tell(LearnerDisconnected(session=E, reason="cut"))
    desk.says(AGAIN, hello(incarnation=1, local_step=10**12))
    desk.tell(LearnerDisconnected(session=AGAIN, reason="cut"))
    third = SessionId(10)
    desk.says(third, hello(incarnation=1, local_step=3))
    desk.says(third, report(7))
    desk.says(W, report(7))
    assert step(desk) == 2 + 4, "both have taken four steps since"


def test_no_report_makes_a_lease_endless() -> None:
    desk = alone()
    desk.says(E, replace(report(1), step_time_s=1e308))
    desk.tell(LearnerDisconnected(session=E, reason="cut"))
    due_s = desk.machine.deadline_s()
    assert due_s is not None
    assert due_s <= 3600
    desk.tell(TimerFired(), after_s=due_s)
    assert not any(learner.live for learner in status_of(desk.machine, desk.now_s).learners)


def test_a_holding_learner_is_within_what_may_be_claimed() -> None:
    """It trains on without a word up to the run's last step; some words may be under way."""
    for total in (1, 100, 10**6):
        assert claim_steps_max(total) >= 2 * total
        assert leap_steps_max(total, 4) >= 8


def test_a_contribution_in_anothers_name_is_counted(desk: Desk) -> None:
    desk.stores(E, contribution(WEST))
    assert status_of(desk.machine, 0.0).rejected == {"other_learner": 1}


def test_a_contribution_of_another_life_is_counted(desk: Desk) -> None:
    desk.stores(E, contribution(EAST, incarnation=7, fragment_id=FragmentId(0)))
    assert status_of(desk.machine, 0.0).rejected == {"fenced": 1}
