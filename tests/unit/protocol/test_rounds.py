"""What an open round remembers of itself."""

from __future__ import annotations

from tests.support.protocol import contribution
from wan_diloco.protocol.messages import DeclineReason
from wan_diloco.protocol.rounds import REMEMBERED_ATTEMPTS, OpenRound
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LearnerId, RoundId

EAST = LearnerId("us-east")


def test_a_round_that_stays_open_for_days_remembers_its_last_attempts_only() -> None:
    round_ = OpenRound(round_id=RoundId(1), fragment_id=FragmentId(0), due_step=GlobalStep(4), opened_s=0.0)
    for number in range(1, 1000):
        round_.ask({EAST: Incarnation(1)}, float(number), patience_s=1.0, window_s=1.0, extra_s={EAST: 0.25})
        if number % 2:
            round_.decline(EAST, DeclineReason.BUSY)
    assert len(round_.attempts) == REMEMBERED_ATTEMPTS
    assert len(round_.unmeasured) <= REMEMBERED_ATTEMPTS
    assert round_.response_s(EAST, 998, 1000.25) == 2.0, "what the grant made of it doesn't count"
    assert round_.response_s(EAST, 999, 1000.0) is None, "it stood in its own queue"
    assert round_.response_s(EAST, 998 - REMEMBERED_ATTEMPTS, 1000.0) is None, "an answer that old says nothing"


def test_who_has_no_tokens_is_believed_until_it_answers_again() -> None:
    """Rounds are asked at different times: their answers need never all be there in one instant."""
    round_ = OpenRound(round_id=RoundId(1), fragment_id=FragmentId(0), due_step=GlobalStep(4), opened_s=0.0)
    words = {"patience_s": 1.0, "window_s": 1.0, "extra_s": {}}
    round_.ask({EAST: Incarnation(1)}, 0.0, **words)
    round_.decline(EAST, DeclineReason.NO_TOKENS)
    assert round_.is_barren(1)
    round_.ask({EAST: Incarnation(1)}, 1.0, **words)
    assert round_.is_barren(1), "it has not answered yet"
    round_.decline(EAST, DeclineReason.BUSY)
    assert not round_.is_barren(1)
    round_.ask({EAST: Incarnation(1)}, 2.0, **words)
    assert not round_.is_barren(1)
    round_.decline(EAST, DeclineReason.NO_TOKENS)
    round_.ask({EAST: Incarnation(1)}, 3.0, **words)
    round_.contributes(EAST)
    assert not round_.is_barren(1), "a contribution is an answer too"


def test_who_gave_something_good_is_not_judged_by_what_it_gave_before() -> None:
    round_ = OpenRound(round_id=RoundId(1), fragment_id=FragmentId(0), due_step=GlobalStep(4), opened_s=0.0)
    bad = contribution(EAST, 0, 2, round_id=1)
    for number in range(3):
        assert not round_.is_barren(1)
        round_.ask({EAST: Incarnation(1)}, float(number), patience_s=1.0, window_s=1.0, extra_s={})
        round_.refuse(bad)
        assert not round_.is_barren(1), "other refusals say nothing of its numbers"
        round_.contributes(EAST)
        round_.refuse(bad, finite=False)
    assert round_.is_barren(1)
    round_.taken(EAST)
    assert not round_.is_barren(1)
