"""What a watcher remembers of a run from view to view."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

__all__ = ["History"]

_RECENT_S: Final = 60.0
_RECENT_ROUNDS_MIN: Final = 12
# Shorter absences of a process that lives on are a broken connection's, and not worth a word.
_ABSENT_MIN_S: Final = 5.0


class _Seen(NamedTuple):
    at_s: float
    merged: int
    rounds: int


class History:
    """Remembers what earlier views were, from which follows what a single one can't tell. Owned by whoever watches."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._states: dict[str, tuple[str, float]] = {}
        self._merged: dict[str, deque[_Seen]] = {}
        # Of each that was there once: its restarts when it was there last, and since when it isn't.
        self._there: dict[str, tuple[int, float | None]] = {}

    def lasting_s(self, name: str, state: str, now_s: float) -> float:
        """How long `name` has been in `state`, which it is in now."""
        old = self._states.get(name)
        if old is None or old[0] != state:
            self._states[name] = (state, now_s)
            return 0.0
        return now_s - old[1]

    def absence_s(self, name: str, restarts: int, now_s: float, *, there: bool) -> float | None:
        """For how long `name` wasn't there, when it is back with this view and that is worth a word; else None.

        Args:
            name: Of a region.
            restarts: Of its process so far.
            now_s: The watcher's clock.
            there: Whether it is there now; not to be asked while nobody can tell.
        """
        known, since_s = self._there.get(name, (restarts, None))
        if not there:
            if name in self._there:
                self._there[name] = (known, now_s if since_s is None else since_s)
            return None
        self._there[name] = (restarts, None)
        if since_s is None or (restarts == known and now_s - since_s < _ABSENT_MIN_S):
            return None
        return now_s - since_s

    def merged_share(self, name: str, merged: int, rounds: int, now_s: float) -> float | None:
        """In how many of the last rounds `name` was, 0 to 1; None while they are too few to say.

        Args:
            name: Of a region.
            merged: In how many rounds of the whole run it was so far.
            rounds: Of the whole run so far.
            now_s: The watcher's clock.
        """
        seen = self._merged.setdefault(name, deque())
        if not seen or seen[-1].rounds != rounds:
            seen.append(_Seen(now_s, merged, rounds))
        # By the newest round and not by now: a run that has ended goes on to show its last minute. The run is another
        # process's; one that was taken up again may know less than before.
        while seen[0].rounds > rounds or (len(seen) > 1 and seen[1].at_s <= seen[-1].at_s - _RECENT_S):
            seen.popleft()
        lately = rounds - seen[0].rounds
        return (merged - seen[0].merged) / lately if lately >= _RECENT_ROUNDS_MIN else None
