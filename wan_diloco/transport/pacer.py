"""Makes transfers wait so that a link's cap holds and the oldest is done first.

"Written" never means that bytes have left: so bytes are paced before they are written.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Final

from wan_diloco.protocol.pacing import TokenBucket

__all__ = ["Pacer", "Transfer", "chunk_bytes_for", "wire_cost"]

# Ethernet, IPv4 and TCP with timestamps around each 1448 bytes; a cap is about the line, not about us.
_SEGMENT_BYTES: Final = 1448
_SEGMENT_COST: Final = 66
# HTTP/2 and gRPC around each message.
_MESSAGE_COST: Final = 14
# What may leave at once after a pause: 10 ms of the line, but a few packets in any case.
_BURST_S: Final = 0.01
_BURST_BYTES_MIN: Final = 16 * 1024
# A message leaves in one go: it should take no more than this of the line's time.
_MESSAGE_S: Final = 0.05
_TICK_S: Final = 1e-9


def wire_cost(message_bytes: int) -> int:
    """Bytes that a message takes on the line, about."""
    framed = message_bytes + _MESSAGE_COST
    return framed + _SEGMENT_COST * -(-framed // _SEGMENT_BYTES)


def chunk_bytes_for(rate_bytes_per_s: float | None, chunk_bytes: int) -> int:
    """The chunk size to pack with for a link: the one wished for, or less if that would come in jerks.

    Args:
        rate_bytes_per_s: The link's cap; None for none.
        chunk_bytes: Wished for.
    """
    if rate_bytes_per_s is None:
        return chunk_bytes
    return min(chunk_bytes, max(_BURST_BYTES_MIN, int(rate_bytes_per_s * _MESSAGE_S)))


class Pacer:
    """Guards one link for all transfers over it; outlives connections, so that a cap does too.

    Owner: one event loop.

    Args:
        rate_bytes_per_s: Of the line, > 0; None lets everything through.
    """

    def __init__(self, rate_bytes_per_s: float | None = None) -> None:
        """Nothing has left yet."""
        self._bucket: TokenBucket | None = None
        self._transfers = 0
        # Who waits: (age of the transfer, order of asking, cost, wake-up call).
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._asked = 0
        self._timer: asyncio.TimerHandle | None = None
        if rate_bytes_per_s is not None:
            self._bucket = _bucket(rate_bytes_per_s)

    def set_rate(self, rate_bytes_per_s: float | None) -> None:
        """Change the cap from now on."""
        if rate_bytes_per_s is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = _bucket(rate_bytes_per_s)
        else:
            self._bucket.set_rate(rate_bytes_per_s, _now_s())
        self._serve()

    def spend(self, message_bytes: int) -> None:
        """Note a message that goes past the pacer (control does), so that bulk makes room for it."""
        if self._bucket is not None:
            self._bucket.spend(wire_cost(message_bytes), _now_s())

    def transfer(self, total_bytes: int = 0, spread_s: float = 0.0) -> Transfer:
        """Begin a transfer; ones begun earlier go first.

        Args:
            total_bytes: Of all its messages; needed only to spread them.
            spread_s: Over how long to spread them.
        """
        self._transfers += 1
        return Transfer(self, self._transfers, total_bytes, spread_s)

    async def let_through(self, age: int, message_bytes: int) -> None:
        """Wait until a message of a transfer of that age may be written; used by `Transfer`."""
        if self._bucket is None:
            return
        self._asked += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (age, self._asked, wire_cost(message_bytes), turn))
        self._serve()
        await turn

    def _serve(self) -> None:
        """Let go whoever may; it is decided who only when the bytes are there, so that the oldest can't miss it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, _, cost, turn = self._waiting[0]
            if self._bucket is not None and not turn.done():
                wait_s = self._bucket.wait_s(cost, _now_s())
                # Less than a clock's tick would only make the timer fire again and again.
                if wait_s > _TICK_S:
                    self._timer = asyncio.get_running_loop().call_later(wait_s, self._serve)
                    return
                self._bucket.reserve(cost, _now_s())
            heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)


class Transfer:
    """One transfer's share of a pacer; made by `Pacer.transfer`."""

    def __init__(self, pacer: Pacer, age: int, total_bytes: int, spread_s: float) -> None:
        """Begin now."""
        self._pacer = pacer
        self._age = age
        self._total_bytes = total_bytes
        self._spread_s = spread_s
        self._began_s = _now_s()
        self._sent_bytes = 0

    async def wait(self, message_bytes: int) -> None:
        """Wait until the next message may be written; cancelling it is safe."""
        if self._spread_s > 0 and self._total_bytes > 0:
            due_s = self._began_s + self._spread_s * min(1.0, self._sent_bytes / self._total_bytes)
            await asyncio.sleep(max(0.0, due_s - _now_s()))
        self._sent_bytes += message_bytes
        await self._pacer.let_through(self._age, message_bytes)


def _bucket(rate_bytes_per_s: float) -> TokenBucket:
    return TokenBucket(rate_bytes_per_s, max(_BURST_BYTES_MIN, rate_bytes_per_s * _BURST_S))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
