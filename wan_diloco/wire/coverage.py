"""Which parts of a payload are there already."""

from __future__ import annotations

from bisect import bisect_right

from wan_diloco.errors import DecodeError

__all__ = ["Coverage"]

# Chunks come in order over each connection, and as far apart as what is on its way; more islands than this, twice what
# the widest window holds, aren't honest.
_ISLANDS_MAX = 1024


class Coverage:
    """Bookkeeping of byte intervals; no bytes.

    Args:
        total: Bytes in all, >= 0; may be beyond 32 bits.
    """

    def __init__(self, total: int) -> None:
        """Nothing is there yet."""
        self._total = total
        # Sorted, disjoint, never touching: islands [start, end).
        self._islands: list[tuple[int, int]] = []

    @property
    def complete(self) -> bool:
        """Whether everything is there."""
        return self.gap() == (self._total, self._total)

    @property
    def covered(self) -> int:
        """How many bytes are there."""
        return sum(end - start for start, end in self._islands)

    def gap(self) -> tuple[int, int]:
        """The first missing part [start, end); (total, total) when there is none."""
        start = self._islands[0][1] if self._islands and self._islands[0][0] == 0 else 0
        later = [island for island in self._islands if island[0] >= start]
        return (start, later[0][0] if later else self._total)

    def has(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is there."""
        at = bisect_right(self._islands, (start, self._total + 1))
        return at > 0 and end <= self._islands[at - 1][1]

    def add(self, start: int, end: int) -> bool:
        """Note that [start, end) is there.

        Returns:
            False if all of it was there before.

        Raises:
            DecodeError: It lies outside, overlaps in part, or makes too many islands.
        """
        if not 0 <= start < end <= self._total:
            raise DecodeError("wrong_length", f"bytes {start} to {end} of {self._total}")
        at = bisect_right(self._islands, (start, self._total + 1))
        before = self._islands[at - 1] if at else None
        after = self._islands[at] if at < len(self._islands) else None
        if self.has(start, end):
            return False
        if (before is not None and start < before[1]) or (after is not None and end > after[0]):
            raise DecodeError("garbage", "chunks overlap")
        low = at - 1 if before is not None and before[1] == start else at
        high = at + 1 if after is not None and after[0] == end else at
        merged = (self._islands[low][0] if low < at else start, self._islands[at][1] if high > at else end)
        self._islands[low:high] = [merged]
        if len(self._islands) > _ISLANDS_MAX:
            raise DecodeError("garbage", "chunks lie scattered")
        return True
