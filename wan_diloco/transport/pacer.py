"""Makes transfers wait so that caps hold, of a link and of all links together, and so that each gets its share.

"Written" never means that bytes have left: so bytes are paced before they are written. Who is next, and when, is
decided in `protocol.sharing`; this waits until then.
"""

from __future__ import annotations

import asyncio
from typing import Final

from wan_diloco.protocol.pacing import Cap
from wan_diloco.protocol.sharing import Flow, SharedLink, Trunk

__all__ = ["CHUNK_BYTES_MIN", "Pacer", "Total", "Transfer", "acknowledging_cost", "chunk_bytes_for", "wire_cost"]

# Ethernet, IPv4 and TCP with timestamps around each 1448 bytes; a cap is about the line, not about us.
_SEGMENT_BYTES: Final = 1448
_SEGMENT_COST: Final = 66
# HTTP/2 puts 9 bytes before each 16 KiB, and gRPC 5 before each message.
_HTTP2_FRAME_BYTES: Final = 16 * 1024
_HTTP2_FRAME_COST: Final = 9
_MESSAGE_COST: Final = 5
# TCP acknowledges every second segment, with no payload.
_SEGMENTS_ACKNOWLEDGED: Final = 2
# Two frame headers of ours, and what else is in a message beside a chunk.
_CHUNK_OVERHEAD_BYTES: Final = 64
# Below this a message is mostly headers.
CHUNK_BYTES_MIN: Final = 4 * 1024
# Event loops round timers to milliseconds, some downwards: a shorter one would only fire again and again.
_TIMER_S_MIN: Final = 0.001

_Turn = asyncio.Future[None]


def wire_cost(message_bytes: int) -> int:
    """Bytes that a message takes on the line, about."""
    framed = message_bytes + _MESSAGE_COST + _HTTP2_FRAME_COST * -(-(message_bytes + 1) // _HTTP2_FRAME_BYTES)
    return framed + _SEGMENT_COST * -(-framed // _SEGMENT_BYTES)


def acknowledging_cost(message_bytes: int) -> int:
    """Bytes that acknowledging a message takes on the line back, about."""
    return _SEGMENT_COST * -(-message_bytes // (_SEGMENTS_ACKNOWLEDGED * _SEGMENT_BYTES))


def chunk_bytes_for(rate_bytes_per_s: float | None, chunk_bytes: int) -> int:
    """The chunk size to pack with: the one wished for, or less, so that no message takes more than a part of a burst.

    Args:
        rate_bytes_per_s: The smallest cap on the way; None for none.
        chunk_bytes: Wished for.
    """
    if rate_bytes_per_s is None:
        return chunk_bytes
    line_bytes = Cap.of(rate_bytes_per_s).message_bytes_max
    framed_bytes = line_bytes * _SEGMENT_BYTES // (_SEGMENT_BYTES + _SEGMENT_COST) - _SEGMENT_COST
    frames_cost = _HTTP2_FRAME_COST * (1 + framed_bytes // _HTTP2_FRAME_BYTES)
    return min(chunk_bytes, max(CHUNK_BYTES_MIN, framed_bytes - frames_cost - _CHUNK_OVERHEAD_BYTES))


class Total:
    """A cap over several pacers; one pacer by itself has a total without a cap.

    Owner: one event loop.

    Args:
        rate_bytes_per_s: Of all together, on the line, > 0; None for no cap.
    """

    def __init__(self, rate_bytes_per_s: float | None = None) -> None:
        """Nothing has left yet."""
        self._trunk: Trunk[_Turn] = Trunk(_cap(rate_bytes_per_s))
        self._timer: asyncio.TimerHandle | None = None

    @property
    def rate_bytes_per_s(self) -> float | None:
        """The cap in force."""
        return None if self._trunk.cap is None else self._trunk.cap.rate_bytes_per_s

    def set_rate(self, rate_bytes_per_s: float | None) -> None:
        """Change the cap from now on."""
        self._trunk.set_cap(_cap(rate_bytes_per_s), _now_s())
        self._serve()

    def set_link_rate(self, link: SharedLink[_Turn], rate_bytes_per_s: float | None) -> None:
        """Change the cap of one link; used by `Pacer`."""
        self._trunk.set_link_cap(link, _cap(rate_bytes_per_s), _now_s())
        self._serve()

    def spend(self, link: SharedLink[_Turn], line_bytes: int) -> None:
        """Note bytes that go past everybody; used by `Pacer`."""
        self._trunk.spend(link, line_bytes, _now_s())

    async def let_through(self, link: SharedLink[_Turn], flow: Flow[_Turn], line_bytes: int) -> None:
        """Wait until a message may leave; used by `Transfer`. Cancelling it is safe."""
        if link.bucket is None and self._trunk.cap is None:
            return
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._trunk.ask(link, flow, line_bytes, turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            self._trunk.withdraw(link, flow, turn)
            self._serve()
            raise

    def _serve(self) -> None:
        """Let go whoever may; it is decided who only when the bytes are there, so that who is first can't miss it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for turn in self._trunk.release(_now_s()):
            if not turn.done():
                turn.set_result(None)
        wait_s = self._trunk.wait_s(_now_s())
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(_TIMER_S_MIN, wait_s), self._serve)


class Pacer:
    """Guards one peer's link for all transfers over it; outlives connections, so that a cap does too.

    Owner: one event loop.

    Args:
        rate_bytes_per_s: Of the line, > 0; None lets everything through.
        total: What the link has to share with others, if anything.
    """

    def __init__(self, rate_bytes_per_s: float | None = None, total: Total | None = None) -> None:
        """Nothing has left yet."""
        self._total = total or Total()
        self._link: SharedLink[_Turn] = SharedLink(None)
        self._transfers = 0
        self._rate_bytes_per_s: float | None = None
        if rate_bytes_per_s is not None:
            self.set_rate(rate_bytes_per_s)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """The smallest cap that is in force here; None for none."""
        rates = [rate for rate in (self._rate_bytes_per_s, self._total.rate_bytes_per_s) if rate is not None]
        return min(rates, default=None)

    def set_rate(self, rate_bytes_per_s: float | None) -> None:
        """Change the cap from now on."""
        if rate_bytes_per_s != self._rate_bytes_per_s:
            self._rate_bytes_per_s = rate_bytes_per_s
            self._total.set_link_rate(self._link, rate_bytes_per_s)

    def spend(self, message_bytes: int) -> None:
        """Note a message that goes past the pacer (control does), so that bulk makes room for it."""
        self._total.spend(self._link, wire_cost(message_bytes))

    def acknowledge(self, message_bytes: int) -> None:
        """Note what goes out because a message of bulk came in."""
        self._total.spend(self._link, acknowledging_cost(message_bytes))

    def transfer(self, total_bytes: int = 0, spread_s: float = 0.0) -> Transfer:
        """Begin a transfer.

        Args:
            total_bytes: Of all its messages; needed only to spread them.
            spread_s: Over how long to spread them; at its end they are due.
        """
        self._transfers += 1
        flow: Flow[_Turn] = Flow(_now_s() + spread_s, self._transfers)
        return Transfer(self._total, self._link, flow, total_bytes, spread_s)


class Transfer:
    """One transfer's share of a pacer; made by `Pacer.transfer`."""

    def __init__(
        self, total: Total, link: SharedLink[_Turn], flow: Flow[_Turn], total_bytes: int, spread_s: float
    ) -> None:
        """Begin now."""
        self._total = total
        self._link = link
        self._flow = flow
        self._total_bytes = total_bytes
        self._spread_s = spread_s
        self._began_s = _now_s()
        self._sent_bytes = 0

    async def wait(self, message_bytes: int) -> None:
        """Wait until the next message may be written; cancelling it is safe."""
        position_bytes = self._sent_bytes
        self._sent_bytes += message_bytes
        if self._spread_s > 0 and self._total_bytes > 0:
            due_s = self._began_s + self._spread_s * min(1.0, position_bytes / self._total_bytes)
            if due_s > _now_s():
                await asyncio.sleep(due_s - _now_s())
        await self._total.let_through(self._link, self._flow, wire_cost(message_bytes))


def _cap(rate_bytes_per_s: float | None) -> Cap | None:
    return None if rate_bytes_per_s is None else Cap.of(rate_bytes_per_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
