"""Updates on their way down, the learner's end; `proto/wan_diloco/v1/bulk.proto` says who says what when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.messages import UpdateHeader
from wan_diloco.transport.interface import Counters
from wan_diloco.transport.lifetime import Lifetime
from wan_diloco.transport.streams import ClientStream
from wan_diloco.transport.window import Receipts
from wan_diloco.wire.convert import DownloadItem, UpdatePart, decode_download, encode_progress
from wan_diloco.wire.frames import Assembler, Buffers

__all__ = ["UpdateReader"]


@dataclass(frozen=True, slots=True, eq=False)
class _Incoming:
    header: UpdateHeader
    segments: list[Assembler]

    @property
    def complete(self) -> bool:
        return all(segment.complete for segment in self.segments)


class UpdateReader:
    """Puts updates together from what comes over one download call or several.

    Owner: one event loop.

    Args:
        counters: Of the connection.
        payload_bytes_max: Of one segment.
        heard: Told the size of each message.
    """

    def __init__(self, counters: Counters, payload_bytes_max: int, heard: Callable[[int], None]) -> None:
        """Nothing was announced yet."""
        self._counters = counters
        self._payload_bytes_max = payload_bytes_max
        self._heard = heard
        self._announced = self._given = 0
        self._incoming: dict[int, _Incoming] = {}
        self._news = asyncio.Event()
        # Of the wait for the first call's next word; a stripe may end it by what it brings.
        self._waiting: Lifetime | None = None

    async def updates(self, stream: ClientStream) -> AsyncIterator[tuple[UpdateHeader, list[Buffers]]]:
        """What came whole, in the order announced; ends when the syncer ends the call.

        Args:
            stream: The first call, which announces.

        Raises:
            TransportError: It broke, or carried garbage: there is no finding one's place in it again.
        """
        receipts = _receipts(stream)
        while True:
            while (whole := self._whole()) is not None:
                yield whole
            self._waiting = waiting = Lifetime()
            try:
                with waiting.bound():
                    data = await stream.read()
            except TransportError:
                if waiting.reason is None:
                    raise
                continue
            finally:
                self._waiting = None
            if data is None:
                return
            item = self._decoded(data)
            if item.update is not None:
                self._announce(item.update)
            if item.part is not None:
                await self._take(stream, item.part, receipts)

    async def stripe(self, stream: ClientStream) -> None:
        """Take what another call carries, until the syncer ends it.

        Raises:
            TransportError: It broke, or carried garbage.
        """
        receipts = _receipts(stream)
        while (data := await stream.read()) is not None:
            item = self._decoded(data)
            if item.update is not None or item.part is None:
                raise TransportError("the syncer announced an update on the wrong call")
            while item.part.update > self._announced:
                self._news.clear()
                await self._news.wait()
            await self._take(stream, item.part, receipts)
            # The syncer keeps what a stripe may have lost, and doesn't go far beyond it.
            await receipts.flush()
            if self._waiting is not None and self._is_whole(self._given + 1):
                self._waiting.end("an update is whole")

    def _decoded(self, data: bytes) -> DownloadItem:
        self._count(len(data))
        try:
            return decode_download(data)
        except DecodeError as problem:
            raise _broken(problem) from problem

    def _count(self, message_bytes: int) -> None:
        self._counters.downlink_bytes += message_bytes
        self._heard(message_bytes)

    def _announce(self, header: UpdateHeader) -> None:
        for segment in header.segments:
            if segment.codes_bytes + segment.scales_bytes > self._payload_bytes_max:
                raise _broken(DecodeError("wrong_length", f"a segment of {segment.codes_bytes} codes"))
        self._announced += 1
        assemblers = [Assembler(segment.codes_bytes, segment.scales_bytes) for segment in header.segments]
        self._incoming[self._announced] = _Incoming(header, assemblers)
        self._news.set()

    def _is_whole(self, number: int) -> bool:
        incoming = self._incoming.get(number)
        return incoming is not None and incoming.complete

    def _whole(self) -> tuple[UpdateHeader, list[Buffers]] | None:
        if not self._is_whole(self._given + 1):
            return None
        self._given += 1
        incoming = self._incoming.pop(self._given)
        return incoming.header, [segment.result() for segment in incoming.segments]

    async def _take(self, stream: ClientStream, part: UpdatePart, receipts: Receipts) -> None:
        await receipts.set_window(part.window_bytes)
        for _ in range(part.messages):
            message = await stream.read()
            if message is None:
                raise TransportError("the syncer ended an update before its end")
            self._count(len(message))
            # What came twice, since a stripe broke, may be of an update that is whole and gone.
            if part.update > self._given:
                self._put(part, message)
            await receipts.took(len(message))

    def _put(self, part: UpdatePart, message: bytes) -> None:
        try:
            incoming = self._incoming.get(part.update)
            if incoming is None or part.segment >= len(incoming.segments):
                raise DecodeError("garbage", f"a part of segment {part.segment} of update {part.update}")
            incoming.segments[part.segment].add(message)
        except DecodeError as problem:
            raise _broken(problem) from problem


def _broken(problem: DecodeError) -> TransportError:
    return TransportError(f"the syncer sent a broken update: {problem}")


def _receipts(stream: ClientStream) -> Receipts:
    return Receipts(0, lambda received_bytes: stream.write(encode_progress(received_bytes)))
