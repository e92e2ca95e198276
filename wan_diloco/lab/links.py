"""How a wide-area link is at a moment: what it lets through, how fast, how late and how whole.

Values only. A link is seen from its region: up is towards the syncer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["GOOD", "Direction", "LinkCounts", "LinkState", "LinkWay", "Passage"]


class Passage(StrEnum):
    """What becomes of bytes in one direction.

    `HELD`: none gets through, and all are kept, as when packets are lost and TCP sends them again later.
    `LOST`: they vanish and nobody is told, as behind a box that has forgotten the connection. What came of it can't go
    on: its connections are reset when the direction is open again.
    """

    OPEN = "open"
    HELD = "held"
    LOST = "lost"


class LinkWay(StrEnum):
    """Which of a link's directions is meant."""

    BOTH = "both"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One direction of a link.

    Attributes:
        passage: What becomes of bytes.
        rate_bytes_per_s: Of all connections together; None for no limit.
        delay_s: Between a byte's leaving and its arrival.
        flips_per_byte: How likely a byte arrives with one bit turned over, 0 to 1.
    """

    passage: Passage = Passage.OPEN
    rate_bytes_per_s: float | None = None
    delay_s: float = 0.0
    flips_per_byte: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no link can be."""
        if self.rate_bytes_per_s is not None and not (0 < self.rate_bytes_per_s < math.inf):
            raise ValueError(f"a rate is above zero: {self.rate_bytes_per_s}")
        if not 0 <= self.delay_s < math.inf:
            raise ValueError(f"a delay is not negative: {self.delay_s}")
        if not 0 <= self.flips_per_byte <= 1:
            raise ValueError(f"a probability is 0 to 1: {self.flips_per_byte}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """Both directions.

    Attributes:
        up, down: From the region to the syncer, and back.
        cut: Connections are reset, and none is let in.
    """

    up: Direction = Direction()
    down: Direction = Direction()
    cut: bool = False

    @property
    def severed(self) -> bool:
        """Whether nothing that needs an answer can come of it."""
        return self.cut or self.up.passage is not Passage.OPEN or self.down.passage is not Passage.OPEN

    def having(
        self,
        way: LinkWay = LinkWay.BOTH,
        *,
        passage: Passage | None = None,
        rate_bytes_per_s: float | None = None,
        delay_s: float | None = None,
        flips_per_byte: float | None = None,
    ) -> LinkState:
        """The same, changed in the given ways; what is None stays as it is."""

        def changed(old: Direction, here: LinkWay) -> Direction:
            if way not in (LinkWay.BOTH, here):
                return old
            return replace(
                old,
                passage=old.passage if passage is None else passage,
                rate_bytes_per_s=old.rate_bytes_per_s if rate_bytes_per_s is None else rate_bytes_per_s,
                delay_s=old.delay_s if delay_s is None else delay_s,
                flips_per_byte=old.flips_per_byte if flips_per_byte is None else flips_per_byte,
            )

        return replace(self, up=changed(self.up, LinkWay.UP), down=changed(self.down, LinkWay.DOWN))


GOOD = LinkState()
"""A link that does nothing to what goes over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounts:
    """What went over a link since it began.

    Attributes:
        up_bytes, down_bytes: That arrived.
        lost_bytes: That vanished, both directions together.
        flipped_bits: That arrived turned over.
        opened, open: Connections so far, and now.
    """

    up_bytes: int = 0
    down_bytes: int = 0
    lost_bytes: int = 0
    flipped_bits: int = 0
    opened: int = 0
    open: int = 0
