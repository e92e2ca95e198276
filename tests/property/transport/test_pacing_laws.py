"""A token bucket never lets more through than its cap allows, in any window."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.protocol.pacing import Cap, TokenBucket, even_rate

AMOUNTS = st.lists(st.integers(0, 50_000), min_size=1, max_size=40)
PAUSES = st.lists(st.floats(0, 3), min_size=40, max_size=40)
RATES = st.floats(1.0, 1e6)
BURSTS = st.floats(1.0, 1e5)


def cap(rate: float, burst: float, reserve_share: float = 0.0) -> Cap:
    return Cap(rate_bytes_per_s=rate, burst_bytes=burst, reserve_bytes=reserve_share * burst)


def releases(
    bucket: TokenBucket, amounts: list[int], pauses_s: list[float], caps: list[Cap] | None = None
) -> list[tuple[float, int]]:
    """When each amount leaves, asked for after the one before has left."""
    now_s, found = 100.0, []
    for index, (amount, pause_s) in enumerate(zip(amounts, pauses_s, strict=False)):
        now_s += pause_s
        if caps is not None:
            bucket.set_cap(caps[index], now_s)
        now_s += bucket.wait_s(amount, now_s)
        bucket.take(amount, now_s)
        found.append((now_s, amount))
    return found


def worst(found: list[tuple[float, int]], rate: float) -> float:
    """The most that any window holds beyond rate times its length."""
    totals = [0, *accumulate(amount for _, amount in found)]
    return max(
        totals[last + 1] - totals[first] - rate * (found[last][0] - found[first][0])
        for first in range(len(found))
        for last in range(first, len(found))
    )


@given(amounts=AMOUNTS, pauses_s=PAUSES, rate=RATES, burst=BURSTS, reserve=st.floats(0, 0.9))
def test_no_window_holds_more_than_rate_times_its_length_and_a_burst(
    amounts: list[int], pauses_s: list[float], rate: float, burst: float, reserve: float
) -> None:
    found = releases(TokenBucket(cap(rate, burst, reserve)), amounts, pauses_s)
    assert worst(found, rate) <= max(burst, *amounts) * (1 + 1e-6) + 1e-3


@given(
    amounts=AMOUNTS,
    pauses_s=PAUSES,
    rates=st.lists(RATES, min_size=40, max_size=40),
    bursts=st.lists(BURSTS, min_size=40, max_size=40),
)
def test_a_cap_that_changes_never_lets_more_through_than_its_highest_would(
    amounts: list[int], pauses_s: list[float], rates: list[float], bursts: list[float]
) -> None:
    caps = [cap(rate, burst) for rate, burst in zip(rates, bursts, strict=True)]
    # As the sizes of messages follow the caps.
    amounts = [min(amount, int(min(bursts))) for amount in amounts]
    found = releases(TokenBucket(caps[0]), amounts, pauses_s, caps)
    assert worst(found, max(rates)) <= max(bursts) * (1 + 1e-6) + 1e-3


@given(amounts=AMOUNTS, rate=RATES, burst=BURSTS)
def test_a_busy_link_is_used_fully(amounts: list[int], rate: float, burst: float) -> None:
    found = releases(TokenBucket(cap(rate, burst)), amounts, [0.0] * len(amounts))
    # The last may leave on credit; what left before it took no longer than the rate needs.
    waited_s = found[-1][0] - 100.0
    assert waited_s <= sum(amounts) / rate * (1 + 1e-6) + 1e-6


@given(
    amounts=st.lists(st.integers(1, 1000), min_size=1, max_size=100),
    control=st.lists(st.integers(0, 30), min_size=100, max_size=100),
)
def test_with_a_reserve_control_costs_the_cap_nothing(amounts: list[int], control: list[int]) -> None:
    # Control by itself keeps within a tenth of the rate and the reserve; bulk is always there.
    bucket, now_s, found = TokenBucket(cap(1000.0, 4000.0, 0.1)), 0.0, []
    for amount, word in zip(amounts, control, strict=False):
        for _ in range(10):
            found.append((now_s, word))
            bucket.take(word, now_s)
        now_s += bucket.wait_s(amount, now_s)
        bucket.take(amount, now_s)
        found.append((now_s, amount))
        now_s += 0.3
    assert worst(found, 1000.0) <= 4000.0 + 1e-3


@given(
    queued=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.01, 100.0)), min_size=1, max_size=30),
)
def test_an_even_rate_is_the_slowest_that_is_in_time(queued: list[tuple[int, float]]) -> None:
    rate = even_rate(queued, 0.0)
    late_s = [
        ahead / rate - due_s for ahead, (_, due_s) in zip(accumulate(size for size, _ in queued), queued, strict=True)
    ]
    assert max(late_s) <= 1e-6
    assert max(late_s) >= -1e-6
