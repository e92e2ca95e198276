"""Time as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.clock import Clock, ManualClock, SystemClock


def test_the_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(now_s=5.0, wall_s=1000.0)
    assert [clock.now_s(), clock.now_s(), clock.wall_s()] == [5.0, 5.0, 1000.0]
    clock.advance(2.5)
    assert [clock.now_s(), clock.wall_s()] == [7.5, 1002.5]


@given(st.lists(st.floats(0.0, 1e6)))
def test_the_manual_clock_never_goes_back(durations_s: list[float]) -> None:
    clock = ManualClock()
    seen_s = [clock.now_s()]
    for duration_s in durations_s:
        clock.advance(duration_s)
        seen_s.append(clock.now_s())
    assert seen_s == sorted(seen_s)
    assert seen_s[-1] == pytest.approx(sum(durations_s))


def test_going_back_is_refused_and_changes_nothing() -> None:
    clock = ManualClock(now_s=3.0)
    with pytest.raises(ValueError, match="doesn't go back"):
        clock.advance(-0.1)
    assert clock.now_s() == 3.0


def test_the_system_clock_runs_forward_and_knows_the_century() -> None:
    clock: Clock = SystemClock()
    first_s = clock.now_s()
    assert clock.now_s() >= first_s
    assert clock.wall_s() > 1_600_000_000
