"""How fast a learner may send: no faster than its own uplink, nor than the syncer grants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.transport.pacer import chunk_bytes_for

if TYPE_CHECKING:
    from wan_diloco.transport.pacer import Pacer

__all__ = ["UplinkRate"]


class UplinkRate:
    """The smaller of two caps; both can change at any time.

    Owner: the uplink's event loop.

    Args:
        pacer: What obeys it.
        own_bytes_per_s: Of the region's uplink, on the line; None for no cap.
    """

    def __init__(self, pacer: Pacer, own_bytes_per_s: float | None = None) -> None:
        """Nothing is granted yet, and nothing was asked for."""
        self._pacer = pacer
        self._own = own_bytes_per_s
        self._granted: float | None = None
        self._obey()

    def set_own(self, rate_bytes_per_s: float) -> None:
        """The operator changed the region's cap."""
        self._own = rate_bytes_per_s
        self._obey()

    def set_granted(self, rate_bytes_per_s: float | None) -> None:
        """The syncer grants something else; None for no cap of its own."""
        self._granted = rate_bytes_per_s
        self._obey()

    def chunk_bytes(self, wished_bytes: int) -> int:
        """The chunk size to pack with now."""
        return chunk_bytes_for(self._pacer.rate_bytes_per_s, wished_bytes)

    def _obey(self) -> None:
        self._pacer.set_rate(min((rate for rate in (self._own, self._granted) if rate is not None), default=None))
