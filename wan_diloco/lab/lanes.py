"""One direction of an emulated link, shared by all its connections: its rate, its hold, its noise.

Waiting is for an event or for a time, never by asking again and again; whoever waits is woken when the link changes.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from wan_diloco.lab.links import Direction, Passage

if TYPE_CHECKING:
    import random

__all__ = ["PIECE_BYTES_MAX", "Lane"]

PIECE_BYTES_MAX: Final = 64 * 1024
# So much of a second goes at once: little enough that a slow link isn't a row of lumps.
_PIECE_S: Final = 0.02
_PIECE_BYTES_MIN: Final = 256
# Unused rate is kept for so long.
_BURST_S: Final = 0.02


class Lane:
    """A direction. Owner: the event loop.

    Args:
        rng: Which bits are turned over.
    """

    def __init__(self, rng: random.Random) -> None:
        """Everything passes at once."""
        self.direction = Direction()
        self.carried_bytes = 0
        self.lost_bytes = 0
        self.flipped_bits = 0
        self._rng = rng
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._credit_bytes = 0.0
        self._refilled_s = 0.0
        self._until_flip = math.inf

    def change(self, direction: Direction) -> None:
        """Be so from now on."""
        if direction.rate_bytes_per_s != self.direction.rate_bytes_per_s:
            self._credit_bytes, self._refilled_s = 0.0, asyncio.get_running_loop().time()
        self.direction = direction
        self._until_flip = self._gap()
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def piece_bytes(self) -> int:
        """How much should be read at once."""
        rate = self.direction.rate_bytes_per_s
        if rate is None:
            return PIECE_BYTES_MAX
        return int(min(PIECE_BYTES_MAX, max(_PIECE_BYTES_MIN, rate * _PIECE_S)))

    async def admit(self, size_bytes: int) -> None:
        """Wait until the rate lets so many bytes onto the link; connections take turns."""
        async with self._turn:
            while (wait_s := self._short_s()) > 0:
                await self._until(wait_s)
            if self.direction.rate_bytes_per_s is not None:
                self._credit_bytes -= size_bytes

    async def pass_gate(self, arrives_s: float) -> None:
        """Wait until a piece that arrives at a time of the loop's has arrived, and nothing holds it."""
        while True:
            left_s = arrives_s - asyncio.get_running_loop().time()
            if self.direction.passage is Passage.HELD:
                await self._until(None)
            elif left_s > 0:
                await asyncio.sleep(left_s)
            else:
                return

    def spoil(self, data: bytes) -> bytes:
        """The bytes as they arrive."""
        if self._until_flip >= len(data):
            self._until_flip -= len(data)
            return data
        spoilt = bytearray(data)
        while self._until_flip < len(data):
            place = int(self._until_flip)
            spoilt[place] ^= 1 << self._rng.randrange(8)
            self.flipped_bits += 1
            self._until_flip = place + 1 + self._gap()
        self._until_flip -= len(data)
        return bytes(spoilt)

    def _gap(self) -> float:
        """Whole bytes before the next one that is turned over: geometric."""
        likely = self.direction.flips_per_byte
        if likely <= 0:
            return math.inf
        if likely >= 1:
            return 0.0
        return float(math.floor(math.log(1.0 - self._rng.random()) / math.log1p(-likely)))

    def _short_s(self) -> float:
        """How long until the next piece may go; a piece may overdraw, and the next one waits for it."""
        rate = self.direction.rate_bytes_per_s
        if rate is None:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        self._credit_bytes = min(rate * _BURST_S, self._credit_bytes + rate * (now_s - self._refilled_s))
        self._refilled_s = now_s
        return max(0.0, -self._credit_bytes / rate)

    async def _until(self, timeout_s: float | None) -> None:
        """Until the direction changes, or some time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
