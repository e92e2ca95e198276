"""Whose moments a new life takes: the rule for its own, who is proven, and which peer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.desk import Desk, E, W, answer, pulled
from tests.support.protocol import EAST, WEST
from wan_diloco.protocol.donors import Candidate, Choice, choose_donor, is_proven, is_recent, keeps_own
from wan_diloco.units import Incarnation, LearnerId

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        learner_id=st.sampled_from("abcdefgh").map(LearnerId),
        serving=st.integers(0, 3),
        failures=st.integers(0, 3),
        holds=st.booleans(),
    ),
    unique_by=lambda candidate: candidate.learner_id,
)


@pytest.mark.parametrize(
    ("own_step", "global_step", "keeps"),
    [
        (None, 0, True),
        (None, 1, False),
        (100, 100, True),
        (100, 124, True),
        (100, 125, False),
        (103, 100, True),
        (200, 100, False),
    ],
)
def test_own_moments_are_kept_when_they_are_of_this_period(own_step: int | None, global_step: int, keeps: bool) -> None:
    assert keeps_own(own_step, global_step, period_steps=24) is keeps


def test_a_pin_is_recent_for_one_period() -> None:
    assert is_recent(124, 100, 24)
    assert not is_recent(125, 100, 24)


@given(candidates=CANDIDATES, joiners_max=st.integers(1, 3))
def test_whoever_is_chosen_has_a_place_and_somebody_is_chosen_when_there_is_one(
    candidates: list[Candidate], joiners_max: int
) -> None:
    choice = choose_donor(candidates, joiners_max)
    free = {candidate.learner_id for candidate in candidates if candidate.serving < joiners_max}
    assert (choice.donor in free) == bool(free)
    assert choice.later == (bool(candidates) and not free)
    assert choice == choose_donor(reversed(candidates), joiners_max), "the order of asking is of no meaning"


@given(joiners=st.integers(1, 12), donors=st.integers(1, 5), joiners_max=st.integers(1, 3))
def test_joiners_spread_and_no_donor_has_more_than_its_share(joiners: int, donors: int, joiners_max: int) -> None:
    serving = {LearnerId(f"d{number}"): 0 for number in range(donors)}
    for _ in range(joiners):
        candidates = [Candidate(learner_id=name, serving=count) for name, count in serving.items()]
        choice = choose_donor(candidates, joiners_max)
        if choice.donor is None:
            assert choice.later
        else:
            serving[choice.donor] += 1
    assert max(serving.values()) <= joiners_max
    assert max(serving.values()) - min(serving.values()) <= 1
    assert sum(serving.values()) == min(joiners, donors * joiners_max)


def test_who_holds_a_part_goes_first_until_it_fails_again() -> None:
    other = Candidate(learner_id=EAST, serving=0)
    holder = Candidate(learner_id=WEST, serving=1, failures=1, holds=True)
    assert choose_donor([other, holder], 2) == Choice(donor=WEST)
    assert choose_donor([other, Candidate(learner_id=WEST, serving=0, failures=2, holds=True)], 2) == Choice(donor=EAST)


def test_a_life_is_proven_by_a_merge_of_its_own_in_this_epoch() -> None:
    desk = Desk()
    for session, learner_id in ((E, EAST), (W, WEST)):
        desk.joins(session, learner_id)
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    desk.stores(W, answer(pull, WEST))
    state = desk.machine.state
    assert not is_proven(state, EAST, Incarnation(1)), "closed is not merged"
    desk.merges(pull.round_id)
    assert is_proven(state, EAST, Incarnation(1))
    assert not is_proven(state, EAST, Incarnation(2)), "another life of it is somebody else"
    state.epoch = state.epoch + 1  # type: ignore[assignment]
    assert not is_proven(state, EAST, Incarnation(1)), "the state went back: that merge may never have been"
