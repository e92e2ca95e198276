"""What is to happen, in the order of its time; at the same time, in the order in which it was arranged."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Agenda"]


class Agenda:
    """Virtual time: it jumps to the next thing that is to happen."""

    def __init__(self) -> None:
        """Nothing is arranged; it is 0 o'clock."""
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something that much later."""
        self.at(self._now_s + delay_s, action)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time; at once if it has passed."""
        self._count += 1
        heapq.heappush(self._entries, (max(time_s, self._now_s), self._count, action))

    def pass_until(self, time_s: float) -> None:
        """Let time pass in which nothing is to happen."""
        assert not self._entries or self._entries[0][0] >= time_s, "something is to happen before"
        self._now_s = max(self._now_s, time_s)

    def step(self, until_s: float) -> bool:
        """Do the next thing, unless it is later than that.

        Returns:
            Whether there was one.
        """
        if not self._entries or self._entries[0][0] > until_s:
            return False
        self._now_s, _, action = heapq.heappop(self._entries)
        action()
        return True
