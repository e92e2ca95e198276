"""Time, as an argument. `SystemClock` is the only reader of the machine's clocks in the package.

Only monotonic durations decide anything, and none is persisted; wall time is for people.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """What code that measures durations is given."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary origin."""
        ...

    def wall_s(self) -> float:
        """Unix time, for logs, reports and certificates; nothing is decided by it."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary origin."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Unix time."""
        return time.time()


class ManualClock:
    """Moves only when told to: for tests and the simulation.

    Args:
        now_s: Where the monotonic clock starts.
        wall_s: Where the wall clock starts.
    """

    def __init__(self, now_s: float = 0.0, wall_s: float = 1_600_000_000.0) -> None:
        """Start both clocks."""
        self._now_s = now_s
        self._wall_origin_s = wall_s - now_s

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary origin."""
        return self._now_s

    def wall_s(self) -> float:
        """Unix time, advancing with the monotonic clock."""
        return self._wall_origin_s + self._now_s

    def advance(self, duration_s: float) -> None:
        """Let time pass.

        Raises:
            ValueError: The duration is negative.
        """
        if duration_s < 0:
            raise ValueError(f"time doesn't go back: {duration_s}")
        self._now_s += duration_s
