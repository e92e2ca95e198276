"""The border between human forms and base units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.errors import UnitError
from wan_diloco.units import (
    Epoch,
    Version,
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_count,
    parse_duration,
    parse_rate,
    parse_size,
)

RATES = {"bit": 1 / 8, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
SIZES = {"B": 1, "kB": 1000, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}

numbers = st.integers(0, 9999)


@given(numbers, st.sampled_from(sorted(RATES)))
def test_a_rate_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_rate(f"{number}{unit}") == number * RATES[unit]


@given(numbers, st.sampled_from(sorted(DURATIONS)))
def test_a_duration_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_duration(f"{number} {unit}") == pytest.approx(number * DURATIONS[unit], rel=1e-15)


@given(numbers, st.sampled_from(sorted(SIZES)))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * SIZES[unit]


@given(numbers, st.sampled_from(sorted(COUNTS)))
def test_a_count_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_count(f"{number}{unit}") == number * COUNTS[unit]


@pytest.mark.parametrize(
    ("text", "count"),
    [("1e6", 10**6), ("1.5M", 1_500_000), ("0.5k", 500), (" 7 ", 7), ("9007199254740993", 2**53 + 1), ("2.01k", 2010)],
)
def test_counts_may_have_fractions_of_a_unit(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "400", "400mbps", "400 Mbit", "mbit", "-1mbit", "1,5mbit", "nanmbit", "400mbit/s"]
)
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UnitError, match="400mbit") as refusal:
        parse_rate(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("text", ["", "5", "5 sec", "80MS", "-1s", "inf s", "1s1s"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UnitError, match="80ms"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "5", "2gib", "2Gib", "-1B"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UnitError, match="2GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    "text", ["", "1.5", "0.0001k", "10m", "ten", "-5", "1e99", "1e-99", "1e999", "0e99999999999999999999"]
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_count(text)


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_rate, "1e99gbit"), (parse_duration, "1e19d"), (parse_size, "1e40TiB")]
)
def test_what_no_number_can_hold_is_refused(parse, text: str) -> None:
    with pytest.raises(UnitError, match="too large"):
        parse(text)


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_rate, parse_duration, parse_size, parse_count):
        try:
            value = parse(text)
        except UnitError:
            continue
        assert value >= 0


@given(st.floats(1.0, 1e15))
def test_a_formatted_size_reads_back_to_within_its_three_digits(size_bytes: float) -> None:
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006, abs=0.5)


@given(st.floats(1e-6, 1e9))
def test_a_formatted_duration_reads_back_to_within_its_three_digits(duration_s: float) -> None:
    assert parse_duration(format_duration(duration_s)) == pytest.approx(duration_s, rel=0.006)


@given(st.integers(0, 2**53))
def test_a_formatted_count_reads_back_to_within_its_three_digits(count: int) -> None:
    assert parse_count(format_count(count)) == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_rate(50e6), "400Mbit/s"),
        (format_rate(0.0), "0bit/s"),
        (format_rate(1e15), "8000000Gbit/s"),
        (format_size(1.5 * 2**20), "1.5MiB"),
        (format_size(1000), "1000B"),
        (format_duration(0.08), "80ms"),
        (format_duration(0.9999), "1s"),
        (format_duration(0.0), "0us"),
        (format_count(9_830_000), "9.83M"),
        (format_count(999_600), "1M"),
        (format_count(-5e6), "-5M"),
    ],
)
def test_formats_are_short_and_never_in_scientific_notation(text: str, expected: str) -> None:
    assert text == expected


def test_versions_are_ordered_by_epoch_then_count() -> None:
    old, new, reborn = Version(Epoch(0), 7), Version(Epoch(0), 7).next(), Version(Epoch(1), 0)
    assert old < new < reborn
    assert str(new) == "0.8"


@pytest.mark.parametrize(("epoch", "count"), [(-1, 0), (0, -1)])
def test_a_negative_version_is_refused(epoch: int, count: int) -> None:
    with pytest.raises(ValueError, match="never negative"):
        Version(Epoch(epoch), count)
