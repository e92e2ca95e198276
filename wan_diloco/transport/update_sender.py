"""Updates on their way down, the syncer's end; `proto/wan_diloco/v1/bulk.proto` says who says what when."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.messages import UpdateHeader
from wan_diloco.protocol.pacing import even_rate
from wan_diloco.transport.beside import beside
from wan_diloco.transport.interface import Counters, Frames
from wan_diloco.transport.pacer import Pacer, Transfer
from wan_diloco.transport.streams import ServerStream
from wan_diloco.transport.window import SendWindow, WindowPlan
from wan_diloco.wire.convert import DownloadItem, UpdatePart, decode_progress, encode_download

__all__ = ["UpdateQueue"]

# What is announced at once tells the far end how much comes; and others may take the rest.
_PARTS_A_WINDOW: Final = 4
# Updates of which a stripe still carries something, while the first call is ahead of it: each is memory at the far end.
_OPEN_MAX: Final = 2


@dataclass(slots=True, eq=False)
class _Job:
    """An update.

    Attributes:
        number: Of those of this session, from 1; 0 as long as it isn't announced.
        segments: The messages of each.
        left: Messages that nobody has taken.
        left_bytes: Of those that haven't been written.
        due_s: When its last byte should have left.
        carriers: Calls that write a part of it now.
        striped: Messages that are with a stripe and aren't acknowledged.
        done: When its last byte was handed to the network.
    """

    header: UpdateHeader
    segments: Sequence[Frames]
    left: deque[_Piece]
    left_bytes: int
    due_s: float
    transfer: Transfer
    done: asyncio.Future[None]
    number: int = 0
    carriers: int = 0
    striped: int = 0

    def message(self, piece: _Piece) -> bytes:
        return self.segments[piece.segment][piece.index]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A message: the n-th of a segment. It is made, or taken, only when it is written."""

    segment: int
    index: int


@dataclass(slots=True, eq=False)
class _Lane:
    """One download call.

    Attributes:
        taken: Of what it carries now: what hasn't been written.
    """

    stream: ServerStream
    is_first: bool
    window: SendWindow[tuple[_Job, _Piece]]
    taken: deque[tuple[_Job, _Piece]] = field(default_factory=deque)


class UpdateQueue:
    """Updates of one session, sent one after the other by those who serve its download calls.

    They leave in an even stream: as slowly as all that are queued allow, each in time.

    Owner: one event loop.

    Args:
        pacer: Of the session's downlink.
        counters: Of the session.
        length_max: How many may wait.
    """

    def __init__(self, pacer: Pacer, counters: Counters, length_max: int) -> None:
        """Nothing waits."""
        self.rtt_s = 0.0
        self._pacer = pacer
        self._counters = counters
        self._length_max = length_max
        # Those of which something is left to be taken or written; the first one is announced, or will be next.
        self._jobs: deque[_Job] = deque()
        self._striped: set[_Job] = set()
        self._announced = 0
        self._lanes = 0
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
        pieces = deque(
            _Piece(segment, index) for segment, frames in enumerate(segments) for index in range(len(frames))
        )
        loop = asyncio.get_running_loop()
        size = sum(len(message) for frames in segments for message in frames)
        job = _Job(header, segments, pieces, size, loop.time() + spread_s, self._pacer.transfer(), loop.create_future())
        self._jobs.append(job)
        self._wake.set()
        await job.done

    def end(self, reason: str) -> None:
        """Send no more; whoever waits is told. Idempotent."""
        if self._ended is None:
            self._ended = reason
        while self._jobs:
            job = self._jobs.popleft()
            if not job.done.done():
                job.done.set_exception(TransportError(self._ended))
        self._wake.set()

    async def serve(self, stream: ServerStream, *, is_first: bool) -> None:
        """Write what is queued, until `end`.

        Args:
            stream: The call.
            is_first: Whether it announces updates; the others carry parts of what is announced.

        Raises:
            TransportError: The stream broke, or the far end takes nothing; of a stripe, others carry what it had.
        """
        lane = _Lane(stream, is_first, SendWindow(WindowPlan.of(None, 0.0, 1)))
        self._lanes += 1
        try:
            async with beside(self._listen(lane), lane.window.watch()):
                await self._feed(lane)
        finally:
            self._lanes -= 1
            self._give_back(lane)

    async def _listen(self, lane: _Lane) -> None:
        """Hear how far the far end has come."""
        while (data := await lane.stream.read()) is not None:
            try:
                arrived = lane.window.acknowledged(decode_progress(data))
            except DecodeError as problem:
                raise TransportError(f"the learner acknowledged an update with garbage: {problem}") from problem
            if not lane.is_first:
                self._arrived(job for job, _ in arrived)
        raise TransportError("the learner ended a download call")

    async def _feed(self, lane: _Lane) -> None:
        while self._ended is None:
            job = self._next(lane)
            if job is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            job.carriers += 1
            try:
                await self._carry(lane, job)
            finally:
                job.carriers -= 1
            self._finish(job)

    def _next(self, lane: _Lane) -> _Job | None:
        """The update of which a lane should carry a part now."""
        for job in tuple(self._jobs):
            if not job.number and job.done.cancelled():
                self._jobs.remove(job)
            elif not job.number:
                # Nobody goes beyond one that the far end hasn't heard of.
                return job if lane.is_first and len(self._striped) < _OPEN_MAX else None
            elif job.left:
                return job
        return None

    async def _carry(self, lane: _Lane, job: _Job) -> None:
        """Write as much as one lane should take at a time, behind a word of what it is."""
        item, plan = self._take(lane, job)
        data = encode_download(item)
        await self._let_through(job, len(data))
        # From now on both ends go by it.
        lane.window.plan = plan
        await lane.stream.write(data)
        while lane.taken and self._ended is None:
            _, piece = lane.taken[0]
            message = job.message(piece)
            size = len(message)
            await lane.window.room(size)
            await self._let_through(job, size)
            lane.taken.popleft()
            lane.window.wrote((job, piece), size)
            job.left_bytes -= size
            await lane.stream.write(message)
        if not lane.is_first:
            lane.window.flushed()

    def _take(self, lane: _Lane, job: _Job) -> tuple[DownloadItem, WindowPlan]:
        header = None if job.number else job.header
        if not job.number:
            self._announced += 1
            job.number = self._announced
            self._wake.set()
        if not job.left:
            return DownloadItem(update=header), lane.window.plan
        segment, size = job.left[0].segment, len(job.message(job.left[0]))
        plan = WindowPlan.of(self._pacer.rate_bytes_per_s, self.rtt_s, size, self._lanes)
        number_max = max(1, plan.limit_bytes // (_PARTS_A_WINDOW * size))
        while job.left and job.left[0].segment == segment and len(lane.taken) < number_max:
            lane.taken.append((job, job.left.popleft()))
        if not lane.is_first:
            job.striped += len(lane.taken)
            self._striped.add(job)
        part = UpdatePart(update=job.number, segment=segment, messages=len(lane.taken), window_bytes=plan.limit_bytes)
        return DownloadItem(update=header, part=part), plan

    def _finish(self, job: _Job) -> None:
        if job.left or job.carriers or job not in self._jobs:
            return
        self._jobs.remove(job)
        if not job.done.done():
            job.done.set_result(None)

    def _arrived(self, jobs: Iterable[_Job]) -> None:
        """Messages of these are no longer with a stripe."""
        for job in jobs:
            job.striped -= 1
            if not job.striped:
                self._striped.discard(job)
                self._wake.set()

    def _give_back(self, lane: _Lane) -> None:
        """A lane is over: what it had and the far end may lack is for others."""
        lost = [*lane.window.unacknowledged, *lane.taken]
        written = len(lost) - len(lane.taken)
        if lane.is_first or self._ended is not None:
            return
        self._arrived(job for job, _ in lost)
        for index, (job, piece) in reversed(list(enumerate(lost))):
            job.left.appendleft(piece)
            job.left_bytes += len(job.message(piece)) if index < written else 0
            if job not in self._jobs:
                self._jobs.appendleft(job)
        self._wake.set()

    async def _let_through(self, job: _Job, size: int) -> None:
        """Wait until a message of an update may leave."""
        await self._spread(job, size)
        await job.transfer.wait(size)
        self._last_s = asyncio.get_running_loop().time()
        self._counters.downlink_bytes += size

    async def _spread(self, job: _Job, size: int) -> None:
        """Wait for as long as the last message should have the link for itself; less when others come to wait."""
        while self._ended is None:
            now_s = asyncio.get_running_loop().time()
            queued = ((other.left_bytes, other.due_s) for other in self._jobs)
            rate = even_rate(chain(((self._last_bytes, self._last_due_s),), queued), self._last_s)
            left_s = self._last_s + self._last_bytes / rate - now_s
            if left_s <= 0:
                # Claimed at once: several lanes may wait for the same moment.
                self._last_bytes, self._last_s, self._last_due_s = size, now_s, job.due_s
                return
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
