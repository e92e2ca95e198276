"""One row of inner moments that training process and uplink both see: pinned for a joiner, or fetched from a donor.

It takes no memory before something is put into it, nor after `release`. Only one of the two writes it at a time: the
trainer when it is asked to pin, the uplink while it fetches; whoever fetches has nothing that could be pinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["StateArea"]

_PIECE_ELEMENTS = 2**18


class StateArea:
    """The row, and how much of a fetched one is there; implements `transport.state_calls.StateSink`.

    Owner: the uplink's event loop.

    Args:
        row: uint8, the memory.
        release: Gives its memory back to the system; what was in it is gone.
    """

    def __init__(self, row: NDArray[np.uint8], release: Callable[[], None]) -> None:
        """Nothing is in it."""
        self.row = row
        self._release = release
        self.digest = ""
        self.received_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Of the whole row."""
        return self.row.size

    def begin(self, digest: str) -> None:
        """A row of that digest is to come; a part of the very same one stays."""
        if digest != self.digest:
            self.digest, self.received_bytes = digest, 0

    def put(self, raw: NDArray[np.uint8]) -> None:
        """Keep what comes next."""
        self.row[self.received_bytes : self.received_bytes + raw.size] = raw
        self.received_bytes += raw.size

    def spoilt(self) -> None:
        """What is here isn't what it should be: nothing of it is worth keeping."""
        self.digest, self.received_bytes = "", 0

    def release(self) -> None:
        """Let go of the memory; for whoever called `spoilt` before, and begins nothing until it is done.

        Thread: any; takes a while where there is much.
        """
        self._release()

    def describe(self) -> tuple[str, bool]:
        """Digest of the row, and whether all its numbers, f32, are finite.

        Thread: any; takes about as long as reading the memory once.
        """
        values, digest, finite = self.row.view(np.float32), xxhash.xxh3_128(), True
        for start in range(0, values.size, _PIECE_ELEMENTS):
            # Still in the processor's cache when it is looked at again.
            piece = values[start : start + _PIECE_ELEMENTS]
            digest.update(piece.data)
            finite = finite and bool(np.isfinite(piece).all())
        return digest.hexdigest(), finite
