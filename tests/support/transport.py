"""Two worlds that transports are tested in, a handler that remembers, and things to send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    ContributionHeader,
    ContributionKey,
    Hello,
    LearnerMessage,
    MergedNote,
    RefusalReason,
    SegmentKind,
    UpdateHeader,
    UpdateSegment,
)
from wan_diloco.transport.interface import Session
from wan_diloco.units import Epoch, FragmentId, Incarnation, LearnerId, LocalStep, RoundId, TransferId, Version
from wan_diloco.wire.frames import Assembler, Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Found = TypeVar("_Found")

EAST = LearnerId("us-east")


def hello(learner: str = "us-east") -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run="a-run",
        learner_id=LearnerId(learner),
        incarnation=Incarnation(0),
        layout=("embed f32 256,64", "head f32 64,256"),
        settings=(("model.dim", "64"),),
        initial_digests=("abc", "def"),
        local_step=LocalStep(0),
        tokens=0,
    )


def contribution(codes_bytes: int = 3350, scales_bytes: int = 106, *, step_hi: int = 124) -> ContributionHeader:
    return ContributionHeader(
        key=ContributionKey(
            learner_id=EAST, incarnation=Incarnation(3), fragment_id=FragmentId(7), step_lo=LocalStep(100)
        ),
        round_id=RoundId(812),
        attempt=1,
        base=Version(Epoch(0), 33),
        step_hi=LocalStep(step_hi),
        tokens_lo=102_400,
        tokens_hi=126_976,
        unit_hi=124,
        codec="int4",
        codes_bytes=codes_bytes,
        scales_bytes=scales_bytes,
    )


def segment(frm: int, to: int, codes_bytes: int, scales_bytes: int) -> UpdateSegment:
    return UpdateSegment(
        kind=SegmentKind.DIFFERENCE,
        from_version=Version(Epoch(0), frm),
        to_version=Version(Epoch(0), to),
        digest="0123abcd",
        codec="int4",
        codes_bytes=codes_bytes,
        scales_bytes=scales_bytes,
        merged=(MergedNote(learner_id=EAST, incarnation=Incarnation(1), step_lo=LocalStep(1), step_hi=LocalStep(5)),),
    )


def update(*sizes: tuple[int, int], fragment_id: int = 7) -> UpdateHeader:
    return UpdateHeader(
        fragment_id=FragmentId(fragment_id),
        resync=0,
        segments=tuple(segment(index, index + 1, *size) for index, size in enumerate(sizes)),
    )


def random_bytes(size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def random_buffers(codes_bytes: int, scales_bytes: int, seed: int = 0) -> Buffers:
    """Codes that zstd can't shrink, scales that it can."""
    scales = random_bytes(scales_bytes, seed + 1) & 15
    return Buffers(codes=random_bytes(codes_bytes, seed), scales=scales)


def same(ours: Buffers, theirs: Buffers) -> bool:
    return np.array_equal(ours.codes, theirs.codes) and np.array_equal(ours.scales, theirs.scales)


class AssemblingSink:
    """An `UploadSink` that holds everything in memory; whoever derives from it has `complete`."""

    kept = True
    """Whether it is there when another stream comes."""

    def __init__(self, header: ContributionHeader) -> None:
        self._header = header

    @cached_property
    def assembler(self) -> Assembler:
        """Made when the first bytes come: whoever claims too much never gets there."""
        return Assembler(self._header.codes_bytes, self._header.scales_bytes)

    @property
    def gap(self) -> tuple[int, int]:
        return self.assembler.gap

    @property
    def stored_bytes(self) -> int:
        return self.assembler.stored_bytes

    async def put(self, message: bytes) -> None:
        self.assembler.add(message)

    def rest(self) -> None:
        pass

    def resume(self) -> bool:
        return self.kept

    def abandon(self) -> None:
        pass


class RecordingSink(AssemblingSink):
    """Tells a handler of what becomes of it."""

    def __init__(self, handler: RecordingHandler, header: ContributionHeader) -> None:
        super().__init__(header)
        self._handler = handler

    def rest(self) -> None:
        self._handler.rested += 1
        self._handler.changed.set()

    def complete(self, session: Session, header: ContributionHeader, wire_bytes: int) -> None:
        assert session in self._handler.sessions
        self._handler.complete.append((header, self.assembler.result(), wire_bytes))
        self._handler.changed.set()

    def abandon(self) -> None:
        self._handler.sinks.remove(self)


@dataclass
class RecordingHandler:
    """A `SyncerHandler` that writes down what it is told, and lets tests wait for it."""

    accept: bool = True
    sessions: list[Session] = field(default_factory=list)
    heard: list[LearnerMessage] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    offered: list[ContributionHeader] = field(default_factory=list)
    complete: list[tuple[ContributionHeader, Buffers, int]] = field(default_factory=list)
    sinks: list[RecordingSink] = field(default_factory=list)
    rested: int = 0
    failed: list[tuple[RefusalReason, str]] = field(default_factory=list)
    refusals: list[tuple[RefusalReason, str]] = field(default_factory=list)
    on_said: Callable[[Session, LearnerMessage], None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    relays: dict[tuple[TransferId, bool], Session] = field(default_factory=dict)

    def connected(self, session: Session) -> None:
        self.sessions.append(session)
        self.changed.set()

    def said(self, session: Session, message: LearnerMessage) -> None:
        self.heard.append(message)
        if self.on_said is not None:
            self.on_said(session, message)
        self.changed.set()

    def disconnected(self, session: Session, reason: str) -> None:
        assert session in self.sessions
        self.ended.append(reason)
        self.changed.set()

    def may_relay(self, session: Session, transfer: TransferId, *, giving: bool) -> bool:
        return self.relays.get((transfer, giving)) is session

    async def upload_offered(self, session: Session, header: ContributionHeader) -> RecordingSink | None:
        assert session in self.sessions
        self.offered.append(header)
        self.changed.set()
        if not self.accept:
            return None
        self.sinks.append(RecordingSink(self, header))
        return self.sinks[-1]

    def upload_failed(self, session: Session, header: ContributionHeader, reason: RefusalReason, detail: str) -> None:
        assert session in self.sessions
        assert header in self.offered
        self.failed.append((reason, detail))
        self.changed.set()

    def refused(self, peer: str, reason: RefusalReason, detail: str) -> None:
        assert peer
        self.refusals.append((reason, detail))
        self.changed.set()

    def status(self) -> dict[str, object]:
        return {"heard": len(self.heard)}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something that was told makes this true."""
        while not holds():
            self.changed.clear()
            await self.changed.wait()


async def within(awaited: Awaitable[_Found], timeout_s: float = 30.0) -> _Found:
    """A bound against hanging; it fails the test, it never decides one."""
    return await asyncio.wait_for(awaited, timeout_s)


async def poll(holds: Callable[[], bool]) -> None:
    """Wait until something becomes true that nobody tells of."""
    while not holds():  # noqa: ASYNC110 - counters have no events
        await asyncio.sleep(0.002)
