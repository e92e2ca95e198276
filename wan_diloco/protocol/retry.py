"""When to try again: exponential backoff with jitter, as a pure function of the attempt."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Backoff between attempts.

    The largest delay is what a learner may stay away after its syncer is back, so it is seconds, not the two
    minutes that gRPC would take by itself. Jitter keeps eight learners from knocking in one instant.

    Attributes:
        initial_s: Before the second attempt.
        max_s: No delay is longer.
        factor: Growth from attempt to attempt.
        jitter: Share of a delay that is random, 0..1.
    """

    initial_s: float = 0.1
    max_s: float = 5.0
    factor: float = 2.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        """Refuse delays that don't grow or never pass."""
        if not (0 < self.initial_s <= self.max_s and self.factor >= 1 and 0 <= self.jitter <= 1):
            raise ValueError("backoff needs 0 < initial <= max, factor >= 1 and jitter within 0..1")

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """How long to wait after that many failures in a row; 0 after none."""
        if failures <= 0:
            return 0.0
        # The exponent is bounded: an hour of refused connections must not overflow a float.
        full_s = min(self.max_s, self.initial_s * self.factor ** min(failures - 1, 64))
        return full_s * (1 - self.jitter * rng.random())
