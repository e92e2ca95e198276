"""How long bytes must wait so that a link's cap holds: a token bucket, told the time."""

from __future__ import annotations

__all__ = ["TokenBucket"]


class TokenBucket:
    """Lets `rate` bytes a second through, and up to `burst` at once after a pause.

    Law: released in order, the bytes of any window are at most rate * window + max(burst, largest amount).

    Args:
        rate_bytes_per_s: > 0.
        burst_bytes: > 0; what may leave at once when nothing left for long.
    """

    def __init__(self, rate_bytes_per_s: float, burst_bytes: float) -> None:
        """Start with a full bucket."""
        _check(rate_bytes_per_s > 0 and burst_bytes > 0, "rate and burst are above 0")
        self._rate = rate_bytes_per_s
        self._burst = burst_bytes
        self._level = burst_bytes
        self._updated_s: float | None = None

    @property
    def rate_bytes_per_s(self) -> float:
        """The rate in force."""
        return self._rate

    def set_rate(self, rate_bytes_per_s: float, now_s: float) -> None:
        """Change the rate from now on; debts stay, and waits already told stay too."""
        _check(rate_bytes_per_s > 0, "the rate is above 0")
        self._refill(now_s)
        self._rate = rate_bytes_per_s

    def reserve(self, amount_bytes: int, now_s: float) -> float:
        """Take bytes out, on credit if need be.

        An amount above the burst waits for a full bucket, and leaves a debt that later ones wait for.

        Args:
            amount_bytes: >= 0.
            now_s: Monotonic; an earlier time than before counts as the same.

        Returns:
            Seconds to wait from now before letting them go, >= 0. Waits end in the order of the calls.
        """
        wait_s = self.wait_s(amount_bytes, now_s)
        self._level -= amount_bytes
        return wait_s

    def wait_s(self, amount_bytes: int, now_s: float) -> float:
        """What `reserve` would return, without taking anything."""
        _check(amount_bytes >= 0, "amounts are never negative")
        self._refill(now_s)
        return max(0.0, (min(amount_bytes, self._burst) - self._level) / self._rate)

    def spend(self, amount_bytes: int, now_s: float) -> None:
        """Note bytes that left without asking, so that later ones make room for them."""
        self.reserve(amount_bytes, now_s)

    def _refill(self, now_s: float) -> None:
        if self._updated_s is None:
            self._updated_s = now_s
        elapsed_s = max(0.0, now_s - self._updated_s)
        self._level = min(self._burst, self._level + elapsed_s * self._rate)
        self._updated_s += elapsed_s


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
