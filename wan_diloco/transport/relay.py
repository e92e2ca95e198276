"""A state on its way from a donor through the syncer to a joiner: two calls that are joined, nothing that is kept.

`proto/wan_diloco/v1/bulk.proto` says who says what when. Learners can only be assumed to reach the syncer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Final

from wan_diloco.errors import TransportError
from wan_diloco.protocol.deadlines import MEET_S
from wan_diloco.transport.beside import beside
from wan_diloco.transport.interface import SyncerHandler
from wan_diloco.transport.paced_stream import PacedStream
from wan_diloco.transport.pacer import CHUNK_BYTES_MIN, chunk_bytes_for
from wan_diloco.transport.session import ServerSession
from wan_diloco.transport.streams import END_MARK, ServerStream
from wan_diloco.units import TransferId
from wan_diloco.wire.convert import StateCall, decode_state_call, encode_state_call
from wan_diloco.wire.frames import CHUNK_BYTES_DEFAULT

__all__ = ["Relay"]

# Messages that wait here for the joiner's link.
_AHEAD: Final = 2


class _Meeting:
    """One transfer's two calls. Each is read by its own end only, so that no read is ever given up half way.

    Attributes:
        given: By whom, over which call; set once.
        is_taken: A taker is there.
        finished: It is through with it, one way or another.
    """

    def __init__(self) -> None:
        self.given: asyncio.Future[tuple[ServerSession, ServerStream]] = asyncio.get_running_loop().create_future()
        self.is_taken = False
        self.finished = asyncio.Event()
        self._room = asyncio.Semaphore(_AHEAD)
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()

    async def put(self, message: bytes) -> None:
        """Hand a message to the taker when it has room; without a taker any more it is dropped."""
        await self._room.acquire()
        self._messages.put_nowait(message)

    def end(self) -> None:
        """Nothing comes behind what was put."""
        self._messages.put_nowait(END_MARK)

    async def get(self) -> bytes:
        """The next message, or the mark of the end."""
        message = await self._messages.get()
        self._room.release()
        return message

    def finish(self) -> None:
        """The taker is through: nobody waits for room any more."""
        self.finished.set()
        self._room.release()


class Relay:
    """All transfers of state through one syncer.

    Owner: one event loop.

    Args:
        handler: Knows who may give and take what.
    """

    def __init__(self, handler: SyncerHandler) -> None:
        """Nothing is under way."""
        self._handler = handler
        self._meetings: dict[TransferId, _Meeting] = {}

    async def give(self, stream: ServerStream, session: ServerSession) -> None:
        """Serve a donor's call until its state is through, or nobody wants it any more.

        Raises:
            TransportError: No such transfer is this session's, or the call broke.
            DecodeError: It doesn't begin as it should.
        """
        call = await self._admit(stream, session, giving=True)
        meeting = self._meeting(call.transfer)
        if meeting.given.done():
            raise TransportError("this state is given already")
        paced = PacedStream(stream, session)
        meeting.given.set_result((session, paced))
        try:
            while (message := await paced.read()) != END_MARK:
                if message is None:
                    raise TransportError("the donor ended its call before its end")
                session.counters.uplink_bytes += len(message)
                if not meeting.finished.is_set():
                    await meeting.put(message)
            meeting.end()
            await meeting.finished.wait()
        finally:
            meeting.end()
            self._forget(call.transfer, meeting)

    async def take(self, stream: ServerStream, session: ServerSession) -> None:
        """Serve a joiner's call: what its donor sends, and the mark of the end when there is no more.

        Raises:
            TransportError: No such transfer is this session's, or the call broke.
            DecodeError: It doesn't begin as it should.
        """
        call = await self._admit(stream, session, giving=False)
        meeting = self._meeting(call.transfer)
        if meeting.is_taken:
            raise TransportError("this state is taken already")
        meeting.is_taken = True
        source: ServerStream | None = None
        try:
            try:
                async with asyncio.timeout(MEET_S):
                    donor, found = await asyncio.shield(meeting.given)
                    source = found
                    await found.write(encode_state_call(_fitted(call, donor, session)))
            except (TimeoutError, TransportError):
                meeting.end()
            async with beside(_pass_on(meeting, stream, session)):
                await _acknowledge(stream, source)
        finally:
            meeting.finish()
            self._forget(call.transfer, meeting)
            if source is not None:
                await _tell_end(source)

    async def _admit(self, stream: ServerStream, session: ServerSession, *, giving: bool) -> StateCall:
        first = await stream.read()
        if first is None:
            raise TransportError("a call that says nothing")
        call = decode_state_call(first)
        if not self._handler.may_relay(session, call.transfer, giving=giving):
            raise TransportError(f"no transfer {call.transfer} of this session")
        return call

    def _meeting(self, transfer: TransferId) -> _Meeting:
        if transfer not in self._meetings:
            self._meetings[transfer] = _Meeting()
        return self._meetings[transfer]

    def _forget(self, transfer: TransferId, meeting: _Meeting) -> None:
        if self._meetings.get(transfer) is meeting:
            del self._meetings[transfer]


def _fitted(call: StateCall, donor: ServerSession, taker: ServerSession) -> StateCall:
    """The same with pieces that suit all caps on the way."""
    # A taker that asks for less would have the donor send nothing but headers.
    chunk_bytes = max(call.chunk_bytes or CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MIN)
    for pacer in (donor.inbound, taker.outbound):
        chunk_bytes = chunk_bytes_for(pacer.rate_bytes_per_s, chunk_bytes)
    return replace(call, chunk_bytes=chunk_bytes)


async def _acknowledge(taker: ServerStream, source: ServerStream | None) -> None:
    """Tell the donor how far the taker has come, up to the taker's last word."""
    while (progress := await taker.read()) != END_MARK:
        if progress is None:
            raise TransportError("the taker ended its call before its end")
        if source is not None:
            with contextlib.suppress(TransportError):  # the taker is told in its turn that the donor is gone
                await source.write(progress)


async def _tell_end(source: ServerStream) -> None:
    """Nobody takes more: the donor ends its call in its own time."""
    with contextlib.suppress(TransportError):
        await source.write(END_MARK)


async def _pass_on(meeting: _Meeting, taker: ServerStream, joiner: ServerSession) -> None:
    """Hand messages on, up to the mark; updates to the joiner go first."""
    transfer = joiner.outbound.transfer(spread_s=math.inf)
    while (message := await meeting.get()) != END_MARK:
        await transfer.wait(len(message))
        joiner.counters.downlink_bytes += len(message)
        await taker.write(message)
    await taker.write(END_MARK)
