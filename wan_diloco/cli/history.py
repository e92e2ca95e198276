"""What a watcher remembers of a run from view to view."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["History"]

_RECENT_S: Final = 60.0
_RECENT_ROUNDS_MIN: Final = 12


class History:
    """Remembers what earlier views were, from which follows what a single one can't tell. Owned by whoever watches."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._states: dict[str, tuple[str, float]] = {}
        self._merged: dict[str, deque[tuple[float, int, int]]] = {}

    def lasting_s(self, name: str, state: str, now_s: float) -> float:
        """How long `name` has been in `state`, which it is in now."""
        old = self._states.get(name)
        if old is None or old[0] != state:
            self._states[name] = (state, now_s)
            return 0.0
        return now_s - old[1]

    def merged_share(self, name: str, merged: int, rounds: int, now_s: float) -> float | None:
        """In how many of the last rounds `name` was, 0 to 1; None while they are too few to say.

        Args:
            name: Of a region.
            merged: In how many rounds of the whole run it was so far.
            rounds: Of the whole run so far.
            now_s: The watcher's clock.
        """
        seen = self._merged.setdefault(name, deque())
        if not seen or seen[-1][2] != rounds:
            seen.append((now_s, merged, rounds))
        # By the newest round and not by now: a run that has ended goes on to show its last minute. The run is another
        # process's; one that was taken up again may know less than before.
        while seen[0][2] > rounds or (len(seen) > 1 and seen[1][0] <= seen[-1][0] - _RECENT_S):
            seen.popleft()
        _, merged_before, rounds_before = seen[0]
        lately = rounds - rounds_before
        return (merged - merged_before) / lately if lately >= _RECENT_ROUNDS_MIN else None
