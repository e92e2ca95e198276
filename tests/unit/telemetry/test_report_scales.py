"""Ticks, words for numbers, and thinning."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.telemetry.report.markup import join, script_json, tag
from wan_diloco.telemetry.report.scales import Unit, bucket_means, last_of_buckets, spell, ticks

UNITS: list[Unit] = ["time", "tokens", "bytes", "number", "percent", "count"]


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.0, "time", "0"),
        (0.0804, "time", "80.4 ms"),
        (2.5, "time", "2.5 s"),
        (59.999, "time", "60 s"),
        (150.0, "time", "2 min 30 s"),
        (3600.0, "time", "1 h"),
        (11100.0, "time", "3 h 05 min"),
        (90000.0, "time", "1 d 01 h"),
        (10251184259.0, "tokens", "10.3 G"),
        (999_600.0, "tokens", "1 M"),
        (15.0, "count", "15"),
        (0.0, "bytes", "0 B"),
        (1_500_000.0, "bytes", "1.5 MB"),
        (0.125, "percent", "12.5 %"),
        (1.53124, "number", "1.531"),
        (math.nan, "number", "-"),
        (math.inf, "time", "-"),
    ],
)
def test_values_are_spelled_for_people(value: float, unit: Unit, words: str) -> None:
    assert spell(value, unit) == words


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e9), unit=st.sampled_from(UNITS), count=st.integers(2, 12))
def test_ticks_are_few_inside_and_evenly_apart(low: float, span: float, unit: Unit, count: int) -> None:
    high = low + span
    marks = ticks(low, high, unit, count)
    assert len(marks) <= count + 1
    assert all(low - span * 1e-6 <= mark <= high + span * 1e-6 for mark in marks)
    gaps = [after - before for before, after in itertools.pairwise(marks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-3) for gap in gaps)


def test_an_axis_without_extent_has_one_tick() -> None:
    assert ticks(3.0, 3.0, "number") == [3.0]
    assert ticks(math.nan, 1.0, "number") == []


@given(xs=st.lists(st.floats(0, 1e6), min_size=1, max_size=200).map(sorted), buckets=st.integers(1, 50), data=st.data())
def test_means_of_stretches_stay_within_the_points(xs: list[float], buckets: int, data: st.DataObject) -> None:
    points = [(x, data.draw(st.floats(-10, 10) | st.just(math.nan))) for x in xs]
    fewer = bucket_means(points, buckets)
    assert len(fewer) <= max(buckets, 1)
    assert [x for x, _ in fewer] == sorted(x for x, _ in fewer)
    finite = [y for _, y in points if math.isfinite(y)]
    for _, y in fewer:
        assert math.isnan(y) or min(finite) - 1e-9 <= y <= max(finite) + 1e-9


@given(increments=st.lists(st.integers(0, 10**9), min_size=1, max_size=200), buckets=st.integers(1, 50))
def test_thinned_totals_keep_their_ends_and_never_fall(increments: list[int], buckets: int) -> None:
    total = 0
    points = []
    for index, increment in enumerate(increments):
        total += increment
        points.append((float(index), float(total)))
    fewer = last_of_buckets(points, buckets)
    assert len(fewer) <= buckets + 1
    assert (fewer[0], fewer[-1]) == (points[0], points[-1])
    assert [y for _, y in fewer] == sorted(y for _, y in fewer)


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("p", "<b>", tag("b", "x & y"), [1, 2.25], None, class_='a"b') == (
        '<p class="a&quot;b">&lt;b&gt;<b>x &amp; y</b>12.2</p>'
    )
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert tag("i", hidden=True, title=None, aria_label=False) == '<i hidden=""></i>'
    assert join("<", tag("b")) == "&lt;<b></b>"


def test_data_can_not_end_its_script_element() -> None:
    text = script_json("data", {"x": "</script>&", "y": [math.nan, 1.5]})
    assert text.count("</script>") == 1
    assert '"y":[null,1.5]' in text
