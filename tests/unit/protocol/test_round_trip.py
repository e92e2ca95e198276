"""A round trip measured by numbers that come back, whatever is lost, late or replaced on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.desk import Desk, E, W, messages
from tests.support.protocol import EAST, WEST, report
from wan_diloco.protocol.messages import Pace, Report
from wan_diloco.protocol.round_trip import RoundTrip
from wan_diloco.units import LocalStep


def test_the_shortest_of_the_last_few_counts() -> None:
    round_trip = RoundTrip()
    now_s = 0.0
    for took_s in (0.3, 0.1, 0.9):
        number = round_trip.ask(now_s)
        assert number
        round_trip.answered(number, now_s + took_s)
        now_s += 1.0
    assert round_trip.rtt_s == pytest.approx(0.1)
    for _ in range(8):
        round_trip.took(0.4)
    assert round_trip.rtt_s == pytest.approx(0.4), "the line has become another"


def test_one_number_is_under_way_at_a_time_and_a_lost_one_is_given_up() -> None:
    round_trip = RoundTrip()
    first = round_trip.ask(0.0)
    assert round_trip.ask(1.9) == 0
    second = round_trip.ask(2.0)
    assert second == first + 1
    round_trip.answered(first, 2.1)
    assert round_trip.rtt_s == 0.0, "an answer to what was given up says nothing"
    round_trip.answered(second, 2.5)
    assert round_trip.rtt_s == pytest.approx(0.5)
    round_trip.answered(second, 9.0)
    round_trip.answered(0, 9.0)
    assert round_trip.rtt_s == pytest.approx(0.5)


def test_numbers_keep_a_distance() -> None:
    round_trip = RoundTrip()
    round_trip.answered(round_trip.ask(0.0), 0.01)
    assert round_trip.ask(0.4) == 0
    assert round_trip.ask(0.5)


def test_a_far_end_that_takes_long_isnt_given_up() -> None:
    round_trip = RoundTrip()
    round_trip.took(3.0)
    number = round_trip.ask(0.0)
    assert round_trip.ask(11.9) == 0
    round_trip.answered(number, 11.95)
    assert round_trip.rtt_s == 3.0


def test_small_changes_arent_told() -> None:
    round_trip = RoundTrip()
    assert round_trip.news() is None
    round_trip.took(0.1)
    assert round_trip.news() == 0.1
    round_trip.took(0.09)
    assert round_trip.news() is None
    round_trip.took(0.05)
    assert round_trip.news() == 0.05
    round_trip.lost()
    assert round_trip.news() is None
    round_trip.took(0.05)
    assert round_trip.news() == 0.05, "a new connection must be told"


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.floats(0, 5)), max_size=50))
def test_it_never_measures_less_than_the_line_takes(trips: list[tuple[float, bool, float]]) -> None:
    """Whatever is dropped, and however long answers wait beside travelling for a second."""
    round_trip, now_s = RoundTrip(), 0.0
    for pause_s, is_lost, waits_s in trips:
        now_s += pause_s
        number = round_trip.ask(now_s)
        if not is_lost:
            now_s += 1.0 + waits_s
            round_trip.answered(number, now_s)
            round_trip.answered(number, now_s)
        assert round_trip.rtt_s == 0.0 or round_trip.rtt_s >= 1.0 - 1e-9


def asking(step: int, echo: int) -> Report:
    plain = report(step)
    return Report(
        local_step=LocalStep(step),
        tokens=plain.tokens,
        step_time_s=plain.step_time_s,
        loss=plain.loss,
        learning_rate=plain.learning_rate,
        fragments=plain.fragments,
        echo=echo,
    )


def test_the_syncer_says_a_number_back_at_once_or_never() -> None:
    desk = Desk()
    desk.joins(E, EAST)
    assert messages(desk.says(E, asking(0, 7))) == [], "there is no pace before the start"
    desk.joins(W, WEST)
    paces = [each for each in messages(desk.says(E, asking(0, 8)), E) if isinstance(each, Pace)]
    assert [pace.echo for pace in paces] == [8], "though nothing else has changed"
    paces = [each for each in messages(desk.says(E, asking(1, 0))) if isinstance(each, Pace)]
    assert {pace.echo for pace in paces} <= {0}
