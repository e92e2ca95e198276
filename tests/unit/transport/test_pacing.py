"""Examples of the token bucket, and what it refuses."""

from __future__ import annotations

import pytest

from wan_diloco.protocol.pacing import TokenBucket


def test_a_burst_leaves_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.reserve(50, 7.0) == 0.0
    assert bucket.reserve(50, 7.0) == pytest.approx(0.5)
    assert bucket.reserve(10, 7.0) == pytest.approx(0.6)
    assert bucket.reserve(10, 8.0) == 0.0


def test_an_amount_above_the_burst_leaves_on_credit() -> None:
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.reserve(250, 0.0) == 0.0
    assert bucket.reserve(10, 0.0) == pytest.approx(2.1)


def test_a_new_rate_counts_from_now_on() -> None:
    bucket = TokenBucket(100.0, 100.0)
    assert bucket.reserve(300, 0.0) == 0.0
    bucket.set_rate(1000.0, 1.0)
    assert bucket.rate_bytes_per_s == 1000.0
    assert bucket.reserve(100, 1.0) == pytest.approx(0.2)


def test_what_left_without_asking_is_made_room_for() -> None:
    bucket = TokenBucket(100.0, 50.0)
    bucket.spend(60, 0.0)
    assert bucket.reserve(10, 0.0) == pytest.approx(0.2)


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(100.0, 50.0)
    bucket.reserve(50, 10.0)
    assert bucket.reserve(50, 5.0) == pytest.approx(0.5)
    assert bucket.reserve(50, 10.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_rates_and_bursts_are_positive(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(rate, burst)


def test_amounts_and_new_rates_are_checked() -> None:
    bucket = TokenBucket(1.0, 1.0)
    with pytest.raises(ValueError, match="negative"):
        bucket.reserve(-1, 0.0)
    with pytest.raises(ValueError, match="above 0"):
        bucket.set_rate(0.0, 0.0)
