"""How long bytes must wait so that a link's cap holds: a token bucket, told the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

__all__ = ["DOWNLINK_SHARE", "TICK_S", "UPLINK_SHARE", "Cap", "TokenBucket", "even_rate"]

# Of the tau-step window: over how much of it an upload, and an update, may be spread. Grace has .1, the merge .05.
UPLINK_SHARE = 0.5
DOWNLINK_SHARE = 0.35

TICK_S = 1e-9
"""Waits below this are none: a timer could not tell them from the arithmetic's error."""

# What may leave at once after a pause: so much of the link's time, but in any case a few packets.
_BURST_S = 0.005
_BURST_BYTES_MIN = 16 * 1024
# Of the burst, kept for control. Control doesn't wait; as long as this is left to it, the cap holds all the same.
_RESERVE_SHARE = 1 / 16
# The most of a burst that one message may take. The rest is what a timer may be late by without a busy link losing
# time: 3.4 ms, which is what an event loop needs on a machine that also trains. Very small messages would be mostly
# headers.
_MESSAGE_SHARE = 1 / 4
_MESSAGE_BYTES_MIN = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """What a link lets through.

    Attributes:
        rate_bytes_per_s: > 0.
        burst_bytes: > 0; what may leave at once when nothing left for long.
        reserve_bytes: Of the burst, what bulk leaves for control; below the burst.
    """

    rate_bytes_per_s: float
    burst_bytes: float
    reserve_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a link that never lets anything through."""
        _check(self.rate_bytes_per_s > 0 and self.burst_bytes > 0, "rate and burst are above 0")
        _check(0 <= self.reserve_bytes < self.burst_bytes, "the reserve is a part of the burst")

    @classmethod
    def of(cls, rate_bytes_per_s: float) -> Self:
        """The cap of a link of which only the rate is given."""
        burst_bytes = max(float(_BURST_BYTES_MIN), _BURST_S * rate_bytes_per_s)
        return cls(
            rate_bytes_per_s=rate_bytes_per_s, burst_bytes=burst_bytes, reserve_bytes=_RESERVE_SHARE * burst_bytes
        )

    @property
    def message_bytes_max(self) -> int:
        """The most that should leave in one go: a burst is for several, so that a late timer costs nothing."""
        return int(min(self.burst_bytes, max(_MESSAGE_BYTES_MIN, _MESSAGE_SHARE * self.burst_bytes)))


class TokenBucket:
    """Lets a cap's rate through, and up to its burst at once after a pause.

    Law: the bytes of any window are at most rate * window + burst, where the rate is the one of each moment, the burst
    the largest in force, and no amount above it. (A larger one leaves on credit, and counts in the burst's place.)
    What control takes without waiting is among them, as long as control by itself keeps within rate * window + reserve.

    Args:
        cap: To begin with.
    """

    def __init__(self, cap: Cap) -> None:
        """Start with a full bucket."""
        self._cap = cap
        self._level = cap.burst_bytes
        self._updated_s: float | None = None

    @property
    def cap(self) -> Cap:
        """The cap in force."""
        return self._cap

    def set_cap(self, cap: Cap, now_s: float) -> None:
        """Change the cap from now on; debts stay."""
        self._refill(now_s)
        self._cap = cap
        self._level = min(self._level, cap.burst_bytes)

    def wait_s(self, amount_bytes: int, now_s: float) -> float:
        """How long bulk has to wait before `take`.

        An amount above the burst waits for a full bucket, and leaves a debt that later ones wait for.

        Args:
            amount_bytes: >= 0.
            now_s: Monotonic; an earlier time than before counts as the same.

        Returns:
            Seconds from now, >= 0, if nothing else is taken meanwhile.
        """
        _check(amount_bytes >= 0, "amounts are never negative")
        self._refill(now_s)
        needed_bytes = min(amount_bytes + self._cap.reserve_bytes, self._cap.burst_bytes)
        return max(0.0, (needed_bytes - self._level) / self._cap.rate_bytes_per_s)

    def take(self, amount_bytes: int, now_s: float) -> None:
        """Note bytes that leave now, whether they have waited or not: later ones make room for them."""
        _check(amount_bytes >= 0, "amounts are never negative")
        self._refill(now_s)
        self._level -= amount_bytes

    def _refill(self, now_s: float) -> None:
        if self._updated_s is None:
            self._updated_s = now_s
        elapsed_s = max(0.0, now_s - self._updated_s)
        self._level = min(self._cap.burst_bytes, self._level + elapsed_s * self._cap.rate_bytes_per_s)
        self._updated_s += elapsed_s


def even_rate(queued: Iterable[tuple[int, float]], since_s: float) -> float:
    """The slowest steady rate at which things that leave one after the other are all in time.

    Args:
        queued: (bytes, when they are due), in the order in which they leave.
        since_s: When the first of them begins to leave.

    Returns:
        Bytes per second; infinite when one is due already.
    """
    rate, ahead_bytes = 0.0, 0
    for amount_bytes, due_s in queued:
        ahead_bytes += amount_bytes
        if due_s <= since_s:
            return float("inf")
        rate = max(rate, ahead_bytes / (due_s - since_s))
    return rate


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
