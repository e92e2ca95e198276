"""Examples of the token bucket, of even rates, and what they refuse."""

from __future__ import annotations

import math

import pytest

from wan_diloco.protocol.pacing import Cap, TokenBucket, even_rate


def bucket(rate: float = 100.0, burst: float = 50.0, reserve: float = 0.0) -> TokenBucket:
    return TokenBucket(Cap(rate_bytes_per_s=rate, burst_bytes=burst, reserve_bytes=reserve))


def test_a_burst_leaves_at_once_and_the_rest_at_the_rate() -> None:
    full = bucket()
    assert full.wait_s(50, 7.0) == 0.0
    full.take(50, 7.0)
    assert full.wait_s(50, 7.0) == pytest.approx(0.5)
    full.take(50, 7.5)
    assert full.wait_s(10, 7.5) == pytest.approx(0.1)
    assert full.wait_s(10, 8.0) == 0.0


def test_an_amount_above_the_burst_leaves_on_credit() -> None:
    full = bucket()
    assert full.wait_s(250, 0.0) == 0.0
    full.take(250, 0.0)
    assert full.wait_s(10, 0.0) == pytest.approx(2.1)


def test_a_new_cap_counts_from_now_on_and_takes_no_debt_away() -> None:
    full = bucket(burst=100.0)
    full.take(300, 0.0)
    full.set_cap(Cap(rate_bytes_per_s=1000.0, burst_bytes=100.0), 1.0)
    assert full.cap.rate_bytes_per_s == 1000.0
    assert full.wait_s(100, 1.0) == pytest.approx(0.2)


def test_a_smaller_burst_takes_what_was_saved_up_away() -> None:
    full = bucket(burst=1000.0)
    full.set_cap(Cap(rate_bytes_per_s=100.0, burst_bytes=20.0), 0.0)
    full.take(20, 0.0)
    assert full.wait_s(10, 0.0) == pytest.approx(0.1)


def test_control_takes_from_the_reserve_without_waiting_and_bulk_makes_room() -> None:
    full = bucket(reserve=10.0)
    assert full.wait_s(40, 0.0) == 0.0
    full.take(40, 0.0)
    full.take(10, 0.0)  # control
    assert full.wait_s(30, 0.0) == pytest.approx(0.4)


def test_time_that_goes_back_gives_nothing() -> None:
    full = bucket()
    full.take(50, 10.0)
    assert full.wait_s(50, 5.0) == pytest.approx(0.5)
    assert full.wait_s(50, 10.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_rates_and_bursts_are_positive(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        bucket(rate, burst)


@pytest.mark.parametrize("reserve", [-1.0, 1.0])
def test_a_reserve_is_a_part_of_the_burst(reserve: float) -> None:
    with pytest.raises(ValueError, match="part of the burst"):
        bucket(1.0, 1.0, reserve)


def test_amounts_are_checked() -> None:
    full = bucket()
    for use in (full.wait_s, full.take):
        with pytest.raises(ValueError, match="negative"):
            use(-1, 0.0)


def test_a_burst_is_five_milliseconds_of_the_link_or_a_few_packets() -> None:
    assert Cap.of(1e9 / 8).burst_bytes == 625_000
    assert Cap.of(1.0).burst_bytes == 16 * 1024


def test_what_is_due_later_sets_the_pace_only_when_it_needs_more() -> None:
    assert even_rate([(100, 1.0)], 0.0) == 100.0
    assert even_rate([(100, 1.0), (100, 4.0)], 0.0) == 100.0
    assert even_rate([(100, 1.0), (100, 1.0)], 0.0) == 200.0
    assert math.isinf(even_rate([(100, 1.0), (1, 0.5)], 0.5))
    assert even_rate([], 0.0) == 0.0
