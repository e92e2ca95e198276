"""A token bucket never lets more through than its rate and burst allow, in any window."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.protocol.pacing import TokenBucket

AMOUNTS = st.lists(st.integers(0, 50_000), min_size=1, max_size=40)
PAUSES = st.lists(st.floats(0, 3), min_size=40, max_size=40)
RATES = st.floats(1.0, 1e6)
BURSTS = st.floats(1.0, 1e5)


def releases(
    bucket: TokenBucket, amounts: list[int], pauses_s: list[float], *, patient: bool, rates: list[float] | None = None
) -> list[tuple[float, int]]:
    """When each amount leaves; patient ones ask only after the one before has left."""
    now_s, found = 100.0, []
    for index, (amount, pause_s) in enumerate(zip(amounts, pauses_s, strict=False)):
        now_s += pause_s
        if rates is not None:
            bucket.set_rate(rates[index], now_s)
        at_s = now_s + bucket.reserve(amount, now_s)
        found.append((at_s, amount))
        now_s = at_s if patient else now_s
    return found


def worst(found: list[tuple[float, int]], rate: float) -> float:
    """The most that any window holds beyond rate times its length."""
    totals = [0, *accumulate(amount for _, amount in found)]
    return max(
        totals[last + 1] - totals[first] - rate * (found[last][0] - found[first][0])
        for first in range(len(found))
        for last in range(first, len(found))
    )


@given(amounts=AMOUNTS, pauses_s=PAUSES, rate=RATES, burst=BURSTS, patient=st.booleans())
def test_no_window_holds_more_than_rate_times_its_length_and_a_burst(
    amounts: list[int], pauses_s: list[float], rate: float, burst: float, *, patient: bool
) -> None:
    found = releases(TokenBucket(rate, burst), amounts, pauses_s, patient=patient)
    assert worst(found, rate) <= max(burst, *amounts) * (1 + 1e-6) + 1e-3


@given(amounts=AMOUNTS, pauses_s=PAUSES, rate=RATES, burst=BURSTS, patient=st.booleans())
def test_amounts_leave_in_the_order_of_asking(
    amounts: list[int], pauses_s: list[float], rate: float, burst: float, *, patient: bool
) -> None:
    found = releases(TokenBucket(rate, burst), amounts, pauses_s, patient=patient)
    for (earlier_s, _), (later_s, _) in pairwise(found):
        assert later_s >= earlier_s - 1e-6


@given(amounts=AMOUNTS, pauses_s=PAUSES, rates=st.lists(RATES, min_size=40, max_size=40), burst=BURSTS)
def test_a_rate_that_changes_never_lets_more_through_than_its_highest_would(
    amounts: list[int], pauses_s: list[float], rates: list[float], burst: float
) -> None:
    found = releases(TokenBucket(rates[0], burst), amounts, pauses_s, patient=True, rates=rates)
    assert worst(found, max(rates)) <= max(burst, *amounts) * (1 + 1e-6) + 1e-3


@given(amounts=AMOUNTS, rate=RATES, burst=BURSTS)
def test_a_busy_link_is_used_fully(amounts: list[int], rate: float, burst: float) -> None:
    found = releases(TokenBucket(rate, burst), amounts, [0.0] * len(amounts), patient=True)
    # The last may leave on credit; what left before it took no longer than the rate needs.
    waited_s = found[-1][0] - 100.0
    assert waited_s <= sum(amounts) / rate * (1 + 1e-6) + 1e-6
