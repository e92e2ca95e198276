"""A state on its way from a donor through the syncer to a joiner: two calls that are joined, nothing that is kept.

`proto/wan_diloco/v1/bulk.proto` says who says what when. Learners can only be assumed to reach the syncer.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import Final

from wan_diloco.errors import TransportError
from wan_diloco.transport.beside import beside
from wan_diloco.transport.interface import SyncerHandler
from wan_diloco.transport.lifetime import Lifetime
from wan_diloco.transport.paced_stream import PacedStream
from wan_diloco.transport.pacer import chunk_bytes_for
from wan_diloco.transport.session import ServerSession
from wan_diloco.transport.streams import END_MARK, ServerStream
from wan_diloco.units import TransferId
from wan_diloco.wire.convert import StateCall, decode_state_call, encode_state_call
from wan_diloco.wire.frames import CHUNK_BYTES_DEFAULT

__all__ = ["Relay"]

# Both ends are told at the same time; what is longer is no connection.
_MEET_S: Final = 30.0


@dataclass(slots=True, eq=False)
class _Meeting:
    """One transfer's two calls.

    Attributes:
        given: By whom, over which call; set once.
        lifetime: Of both calls.
        is_taken: A taker is there.
        is_whole: Everything went through.
    """

    given: asyncio.Future[tuple[ServerSession, ServerStream]]
    lifetime: Lifetime = field(default_factory=Lifetime)
    is_taken: bool = False
    is_whole: bool = False


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
        """Serve a donor's call until its state is through.

        Raises:
            TransportError: No such transfer is this session's, the call broke, or the taker's did.
            DecodeError: It doesn't begin as it should.
        """
        call = await self._admit(stream, session, giving=True)
        meeting = self._meeting(call.transfer)
        if meeting.given.done():
            raise TransportError("this state is given already")
        meeting.given.set_result((session, PacedStream(stream, session)))
        try:
            with meeting.lifetime.bound():
                await asyncio.sleep(_MEET_S)
                while meeting.is_taken:
                    await asyncio.Event().wait()
            raise TransportError("nobody came to take this state")
        except TransportError:
            if not meeting.is_whole:
                raise
        finally:
            self._part(call.transfer, meeting, "the donor is gone")

    async def take(self, stream: ServerStream, session: ServerSession) -> None:
        """Serve a joiner's call: what its donor sends.

        Raises:
            TransportError: No such transfer is this session's, the call broke, or the donor's did.
            DecodeError: It doesn't begin as it should.
        """
        call = await self._admit(stream, session, giving=False)
        meeting = self._meeting(call.transfer)
        if meeting.is_taken:
            raise TransportError("this state is taken already")
        meeting.is_taken = True
        try:
            with meeting.lifetime.bound():
                async with asyncio.timeout(_MEET_S):
                    donor, source = await asyncio.shield(meeting.given)
                await source.write(encode_state_call(_fitted(call, donor, session)))
                async with beside(_acknowledge(stream, source)):
                    await _pass_on(source, donor, stream, session)
            meeting.is_whole = True
        except TimeoutError as problem:
            raise TransportError("the donor didn't come") from problem
        finally:
            self._part(call.transfer, meeting, "the taker is gone")

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
            self._meetings[transfer] = _Meeting(asyncio.get_running_loop().create_future())
        return self._meetings[transfer]

    def _part(self, transfer: TransferId, meeting: _Meeting, reason: str) -> None:
        """One end is through; the other one is, too."""
        if self._meetings.get(transfer) is meeting:
            del self._meetings[transfer]
        meeting.lifetime.end(reason)


def _fitted(call: StateCall, donor: ServerSession, taker: ServerSession) -> StateCall:
    """The same with pieces that suit all caps on the way."""
    chunk_bytes = call.chunk_bytes or CHUNK_BYTES_DEFAULT
    for pacer in (donor.inbound, taker.outbound):
        chunk_bytes = chunk_bytes_for(pacer.rate_bytes_per_s, chunk_bytes)
    return replace(call, chunk_bytes=chunk_bytes)


async def _acknowledge(taker: ServerStream, source: ServerStream) -> None:
    """Tell the donor how far the taker has come."""
    while (progress := await taker.read()) is not None:
        await source.write(progress)
    raise TransportError("the taker ended its call")


async def _pass_on(source: ServerStream, donor: ServerSession, taker: ServerStream, joiner: ServerSession) -> None:
    """Hand messages on, up to the mark; updates to the joiner go first."""
    transfer = joiner.outbound.transfer(spread_s=math.inf)
    while (message := await source.read()) is not None:
        donor.counters.uplink_bytes += len(message)
        await transfer.wait(len(message))
        joiner.counters.downlink_bytes += len(message)
        await taker.write(message)
        if message == END_MARK:
            return
    raise TransportError("the donor ended its call before its end")
