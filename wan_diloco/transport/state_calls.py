"""A state, given or taken by a learner over one call; `proto/wan_diloco/v1/bulk.proto` says who says what when.

One call each way: on a link that is long and fat it goes at one connection's rate, which is fair to what is urgent.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, Protocol

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.transport.beside import beside
from wan_diloco.transport.pacer import chunk_bytes_for
from wan_diloco.transport.streams import END_MARK
from wan_diloco.transport.window import Receipts, SendWindow, WindowPlan
from wan_diloco.wire.convert import StateCall, decode_progress, decode_state_call, encode_progress, encode_state_call
from wan_diloco.wire.frames import CHUNK_BYTES_DEFAULT, encode_frame, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from wan_diloco.transport.interface import Counters
    from wan_diloco.transport.pacer import Pacer
    from wan_diloco.transport.streams import ClientStream
    from wan_diloco.units import TransferId

__all__ = ["StateSink", "give_state", "take_state"]

# Acknowledged message by message: they are long, and the donor's window is not known here.
_EVERY_MESSAGE: Final = 1


class StateSink(Protocol):
    """Where a state's bytes go that come in order."""

    @property
    def size_bytes(self) -> int:
        """Of the whole row."""
        ...

    @property
    def received_bytes(self) -> int:
        """How much of it is there."""
        ...

    def put(self, raw: NDArray[np.uint8]) -> None:
        """Keep what comes next; it is checked, and no longer than what is missing."""
        ...


async def give_state(
    stream: ClientStream,
    transfer: TransferId,
    row: NDArray[np.uint8],
    *,
    pacer: Pacer,
    counters: Counters,
    rtt_s: float,
) -> None:
    """Send a row of bytes to whoever takes it, behind everything else that the uplink carries.

    Args:
        stream: The call; to be ended by the caller.
        transfer: What the syncer knows it by.
        row: It mustn't change meanwhile.
        pacer: Of the uplink.
        counters: Of the connection.
        rtt_s: To the syncer and back; 0 if nobody knows.

    Raises:
        TransportError: The call broke, or the taker makes no progress.
    """
    await stream.write(encode_state_call(StateCall(transfer=transfer)))
    call = await _answered(stream)
    if call.start > row.size:
        raise TransportError(f"the taker has {call.start} of {row.size} bytes")
    wished = min(call.chunk_bytes or CHUNK_BYTES_DEFAULT, CHUNK_BYTES_DEFAULT)
    chunk_bytes = chunk_bytes_for(pacer.rate_bytes_per_s, wished)
    window: SendWindow[int] = SendWindow(WindowPlan.of(pacer.rate_bytes_per_s, rtt_s + call.rtt_s, chunk_bytes))
    # Never due: what has a deadline goes first.
    turn = pacer.transfer(spread_s=math.inf)
    unwanted, over = asyncio.Event(), asyncio.Event()

    async def listen() -> None:
        while (data := await stream.read()) is not None:
            if data == END_MARK:
                unwanted.set()
                window.answered()
            else:
                window.acknowledged(_progress(data))
        window.answered()
        over.set()

    is_whole = True
    async with beside(listen(), window.watch()):
        for offset in range(call.start, row.size, chunk_bytes):
            message, _ = encode_frame(0, offset, row[offset : offset + chunk_bytes], zstd=False)
            await window.room(len(message))
            await turn.wait(len(message))
            if unwanted.is_set():
                is_whole = False
                break
            window.wrote(offset, len(message))
            counters.uplink_bytes += len(message)
            await stream.write(message)
        window.ended()
        # Also when nobody wants more: a call that the syncer ended while this end still wrote would never be over.
        await stream.write(END_MARK)
        await over.wait()
    if not is_whole:
        raise TransportError("nobody takes this state any more")


async def take_state(
    stream: ClientStream, call: StateCall, sink: StateSink, *, counters: Counters, heard: Callable[[int], None]
) -> None:
    """Take what a donor gives, from where the sink stands up to its end.

    Args:
        stream: The call; to be ended by the caller.
        call: What is wanted.
        sink: Where to; what was put into it stays, however this ends.
        counters: Of the connection.
        heard: Told the size of each message.

    Raises:
        TransportError: The call broke, or brought something that isn't what comes next.
    """
    await stream.write(encode_state_call(call))
    receipts = Receipts(_EVERY_MESSAGE, lambda received_bytes: stream.write(encode_progress(received_bytes)))
    while (message := await stream.read()) is not None:
        counters.downlink_bytes += len(message)
        heard(len(message))
        if message == END_MARK:
            break
        try:
            for piece in unpack(message, sink.size_bytes, 0):
                if piece.start != sink.received_bytes:
                    raise DecodeError("garbage", f"byte {piece.start} where {sink.received_bytes} is next")
                sink.put(piece.raw)
        except DecodeError as problem:
            raise TransportError(f"a state's chunk can't be used: {problem}") from problem
        await receipts.took(len(message))
    # The syncer ends the call only now: one that ended while this end still wrote would never be over, for gRPC.
    await stream.write(END_MARK)
    while await stream.read() is not None:
        pass
    if sink.received_bytes != sink.size_bytes:
        raise TransportError(f"{sink.received_bytes} of {sink.size_bytes} bytes of a state came")


async def _answered(stream: ClientStream) -> StateCall:
    data = await stream.read()
    if not data:
        # The call ended, or what came first is the mark of the end: whoever was to take it left meanwhile.
        raise TransportError("nobody takes this state")
    try:
        return decode_state_call(data)
    except DecodeError as problem:
        raise TransportError(f"a taker that makes no sense: {problem}") from problem


def _progress(data: bytes) -> int:
    try:
        return decode_progress(data)
    except DecodeError as problem:
        raise TransportError(f"a state was acknowledged with garbage: {problem}") from problem
