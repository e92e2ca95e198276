"""Laws of the rhythm and of the step that it follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.protocol.schedule import Schedule, global_step_of
from wan_diloco.units import FragmentId

SCHEDULES = st.builds(Schedule, num_fragments=st.integers(1, 40), period_steps=st.integers(1, 40))
STEPS = st.integers(0, 300)


@given(SCHEDULES, STEPS)
def test_each_fragment_is_due_once_a_period(schedule: Schedule, start: int) -> None:
    due = [fragment for _, fragment in schedule.due_between(start, start + schedule.period_steps)]
    assert sorted(due) == list(range(schedule.num_fragments))


@given(SCHEDULES)
def test_offsets_are_spread_evenly_over_a_period(schedule: Schedule) -> None:
    count, period = schedule.num_fragments, schedule.period_steps
    offsets = [schedule.offset(FragmentId(fragment)) for fragment in range(count)]
    assert offsets == [fragment * period // count for fragment in range(count)]
    assert max(offsets.count(offset) for offset in offsets) == schedule.fragments_a_step_max


@given(SCHEDULES, STEPS)
def test_rounds_due_are_those_that_were_due(schedule: Schedule, step: int) -> None:
    due = schedule.due_between(0, step)
    for index in range(schedule.num_fragments):
        times = [at for at, fragment in due if fragment == index]
        assert schedule.rounds_due(FragmentId(index), step) == len(times)
        assert schedule.last_due_step(FragmentId(index), step) == max(times, default=0)


@given(SCHEDULES, STEPS)
def test_the_next_due_step_is_the_first_with_anything_due(schedule: Schedule, after: int) -> None:
    following = schedule.next_due_step(after)
    assert schedule.due_between(after, following)[0][0] == following
    assert schedule.due_at(following)
    assert not schedule.due_between(after, following - 1)


@given(SCHEDULES)
def test_nothing_is_due_before_the_first_step(schedule: Schedule) -> None:
    assert schedule.due_at(0) == ()


@pytest.mark.parametrize(("fragments", "period"), [(0, 1), (1, 0)])
def test_a_rhythm_that_never_beats_is_refused(fragments: int, period: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Schedule(num_fragments=fragments, period_steps=period)


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(1, 6))
def test_the_global_step_is_reached_by_just_enough_learners(progress: list[int], quorum: int) -> None:
    step = global_step_of(progress, quorum)
    if len(progress) < quorum:
        assert step is None
        return
    assert step is not None
    assert sum(other >= step for other in progress) >= quorum
    assert sum(other > step for other in progress) < quorum
