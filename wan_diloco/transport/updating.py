"""Updates on their way down, both ends of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.messages import UpdateHeader
from wan_diloco.protocol.pacing import even_rate
from wan_diloco.transport.interface import Counters, Frames
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.streams import ClientStream, ServerStream
from wan_diloco.wire.convert import decode_update, encode_update
from wan_diloco.wire.frames import Assembler, Buffers

__all__ = ["UpdateQueue", "read_updates"]


@dataclass(slots=True)
class _Job:
    messages: Sequence[bytes]
    left_bytes: int
    due_s: float
    done: asyncio.Future[None]


class UpdateQueue:
    """Updates of one session, sent one after the other by whoever serves its download call.

    They leave in an even stream: as slowly as all that are queued allow, each in time.

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
        # The last message: its size, when it left, and when its update is due.
        self._last_bytes = 0
        self._last_s = self._last_due_s = 0.0

    async def send(self, header: UpdateHeader, segments: Sequence[Frames], spread_s: float) -> None:
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
        loop = asyncio.get_running_loop()
        job = _Job(messages, sum(map(len, messages)), loop.time() + spread_s, loop.create_future())
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
                await self._write(stream, job)
            except BaseException:
                self._fail(job)
                raise
            if not job.done.done():
                job.done.set_result(None)

    async def _write(self, stream: ServerStream, job: _Job) -> None:
        transfer = self._pacer.transfer()
        for message in job.messages:
            await self._spread(job)
            await transfer.wait(len(message))
            self._last_bytes, self._last_s = len(message), asyncio.get_running_loop().time()
            self._last_due_s = job.due_s
            job.left_bytes -= len(message)
            self._counters.downlink_bytes += len(message)
            await stream.write(message)

    async def _spread(self, job: _Job) -> None:
        """Wait for as long as the last message should have the link for itself; less when others come to wait."""
        while self._ended is None:
            queued = ((other.left_bytes, other.due_s) for other in (job, *self._jobs))
            rate = even_rate(chain(((self._last_bytes, self._last_due_s),), queued), self._last_s)
            left_s = self._last_s + self._last_bytes / rate - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._wake.wait()

    def _fail(self, job: _Job) -> None:
        if not job.done.done():
            job.done.set_exception(TransportError(self._ended or "the download stream broke"))


async def read_updates(
    stream: ClientStream, counters: Counters, payload_bytes_max: int, heard: Callable[[int], None]
) -> AsyncIterator[tuple[UpdateHeader, list[Buffers]]]:
    """What comes down, update by update; ends when the syncer ends the call.

    Args:
        stream: The download call.
        counters: Of the connection.
        payload_bytes_max: Of one segment.
        heard: Told the size of each message.

    Raises:
        TransportError: The stream broke, or carried garbage: there is no finding one's place in it again.
    """
    while (first := await stream.read()) is not None:
        counters.downlink_bytes += len(first)
        heard(len(first))
        try:
            header = decode_update(first)
            segments = []
            for segment in header.segments:
                if segment.codes_bytes + segment.scales_bytes > payload_bytes_max:
                    raise DecodeError("wrong_length", f"a segment of {segment.codes_bytes} codes")
                segments.append(await _read_segment(stream, counters, segment.codes_bytes, segment.scales_bytes, heard))
        except DecodeError as problem:
            raise TransportError(f"the syncer sent a broken update: {problem}") from problem
        yield header, segments


async def _read_segment(
    stream: ClientStream, counters: Counters, codes_bytes: int, scales_bytes: int, heard: Callable[[int], None]
) -> Buffers:
    assembler = Assembler(codes_bytes, scales_bytes)
    while not assembler.complete:
        message = await stream.read()
        if message is None:
            raise TransportError("the syncer ended an update before its end")
        counters.downlink_bytes += len(message)
        heard(len(message))
        assembler.add(message)
    return assembler.result()
