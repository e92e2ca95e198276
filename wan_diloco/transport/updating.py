"""Updates on their way down, both ends of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.messages import UpdateHeader
from wan_diloco.transport.interface import Counters, Frames
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.streams import ClientStream, ServerStream
from wan_diloco.wire.convert import decode_update, encode_update
from wan_diloco.wire.frames import Assembler, Buffers

__all__ = ["UpdateQueue", "read_updates"]


@dataclass(frozen=True, slots=True)
class _Job:
    messages: Sequence[bytes]
    done: asyncio.Future[None]


class UpdateQueue:
    """Updates of one session, sent one after the other by whoever serves its download call.

    Owner: one event loop.

    Args:
        pacer: Of the session's downlink.
        counters: Of the session.
        length_max: How many may wait.
    """

    def __init__(self, pacer: Pacer, counters: Counters, length_max: int) -> None:
        """Nothing waits."""
        self._pacer = pacer
        self._counters = counters
        self._length_max = length_max
        self._jobs: deque[_Job] = deque()
        self._wake = asyncio.Event()
        self._ended: str | None = None

    async def send(self, header: UpdateHeader, segments: Sequence[Frames]) -> None:
        """Queue an update and wait until its last byte was handed to the network.

        Raises:
            TransportError: The session ended before, or too many wait.
        """
        if len(segments) != len(header.segments):
            raise AssertionError("an update has frames for each of its segments")
        if self._ended is not None:
            raise TransportError(self._ended)
        if len(self._jobs) >= self._length_max:
            raise TransportError(f"{self._length_max} updates of one session wait already")
        messages = [encode_update(header), *chain.from_iterable(segments)]
        job = _Job(messages, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._wake.set()
        await job.done

    def end(self, reason: str) -> None:
        """Send no more; whoever waits is told. Idempotent."""
        if self._ended is None:
            self._ended = reason
        while self._jobs:
            self._fail(self._jobs.popleft())
        self._wake.set()

    async def serve(self, stream: ServerStream) -> None:
        """Write what is queued, until `end`.

        Raises:
            TransportError: The stream broke.
        """
        while self._ended is None:
            if not self._jobs:
                self._wake.clear()
                await self._wake.wait()
                continue
            job = self._jobs.popleft()
            if job.done.cancelled():
                continue
            try:
                await self._write(stream, job.messages)
            except BaseException:
                self._fail(job)
                raise
            if not job.done.done():
                job.done.set_result(None)

    async def _write(self, stream: ServerStream, messages: Sequence[bytes]) -> None:
        transfer = self._pacer.transfer()
        for message in messages:
            await transfer.wait(len(message))
            self._counters.downlink_bytes += len(message)
            await stream.write(message)

    def _fail(self, job: _Job) -> None:
        if not job.done.done():
            job.done.set_exception(TransportError(self._ended or "the download stream broke"))


async def read_updates(
    stream: ClientStream, counters: Counters, payload_bytes_max: int
) -> AsyncIterator[tuple[UpdateHeader, list[Buffers]]]:
    """What comes down, update by update; ends when the syncer ends the call.

    Raises:
        TransportError: The stream broke, or carried garbage: there is no finding one's place in it again.
    """
    while (first := await stream.read()) is not None:
        counters.downlink_bytes += len(first)
        try:
            header = decode_update(first)
            segments = []
            for segment in header.segments:
                if segment.codes_bytes + segment.scales_bytes > payload_bytes_max:
                    raise DecodeError("wrong_length", f"a segment of {segment.codes_bytes} codes")
                segments.append(await _read_segment(stream, counters, segment.codes_bytes, segment.scales_bytes))
        except DecodeError as problem:
            raise TransportError(f"the syncer sent a broken update: {problem}") from problem
        yield header, segments


async def _read_segment(stream: ClientStream, counters: Counters, codes_bytes: int, scales_bytes: int) -> Buffers:
    assembler = Assembler(codes_bytes, scales_bytes)
    while not assembler.complete:
        message = await stream.read()
        if message is None:
            raise TransportError("the syncer ended an update before its end")
        counters.downlink_bytes += len(message)
        assembler.add(message)
    return assembler.result()
