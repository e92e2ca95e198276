"""How long a word and its answer take, measured as the run goes, by numbers that a far end says back."""

from __future__ import annotations

from collections import deque

__all__ = ["RoundTrip"]

# Between two numbers; a handful of bytes.
_ASK_EVERY_S = 0.5
# A number may go down with a message that a newer one replaced. After this, or four round trips, another is sent.
_LOST_S = 2.0
_LOST_ROUND_TRIPS = 4
# What waits on its way takes longer, never less long: so the shortest of the last few is the line's own. Few enough to
# notice within seconds that the line has become another.
_SAMPLES = 8
# What depends on it (windows, deadlines) needn't follow every millisecond.
_WORTH_TELLING = 0.2


class RoundTrip:
    """The round trip of one connection after the other, told the time.

    Law: `rtt_s` is never less than the shortest round trip that was measured since `lost`.
    """

    def __init__(self) -> None:
        """Nothing is measured."""
        self._number = 0
        self._asked_s: float | None = None
        self._next_s = 0.0
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._told_s: float | None = None

    @property
    def rtt_s(self) -> float:
        """A round trip; 0 as long as none was measured."""
        return min(self._samples, default=0.0)

    def ask(self, now_s: float) -> int:
        """The number to say now, which the far end says back at once; 0 when none is due."""
        if self._asked_s is not None:
            lost_s = max(_LOST_S, _LOST_ROUND_TRIPS * self.rtt_s)
            if now_s < self._asked_s + lost_s:
                return 0
        elif now_s < self._next_s:
            return 0
        self._number += 1
        self._asked_s = now_s
        return self._number

    def answered(self, number: int, now_s: float) -> None:
        """The far end said a number; an old one, or 0, means nothing."""
        if self._asked_s is None or number != self._number:
            return
        self._next_s = self._asked_s + _ASK_EVERY_S
        self.took(now_s - self._asked_s)
        self._asked_s = None

    def took(self, duration_s: float) -> None:
        """Something was answered after that time."""
        self._samples.append(max(0.0, duration_s))

    def lost(self) -> None:
        """The connection ended; the next may take another way."""
        self._samples.clear()
        self._asked_s = self._told_s = None

    def news(self) -> float | None:
        """The round trip, if it is worth telling those who go by it; None if what they know will do."""
        if not self._samples:
            return None
        if self._told_s is not None and abs(self.rtt_s - self._told_s) <= _WORTH_TELLING * self._told_s:
            return None
        self._told_s = self.rtt_s
        return self.rtt_s
