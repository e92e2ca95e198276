"""The receiving end of uploads; `proto/wan_diloco/v1/bulk.proto` says who says what when."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Final

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.link_plan import CHANNELS_MAX, WINDOW_BYTES_MAX
from wan_diloco.protocol.messages import ContributionHeader, RefusalReason
from wan_diloco.transport.interface import Counters, Session, SyncerHandler, UploadSink
from wan_diloco.transport.lifetime import Lifetime
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.streams import END_MARK, WINDOW_KEY, ServerStream
from wan_diloco.transport.window import Receipts
from wan_diloco.units import RoundId
from wan_diloco.wire.convert import (
    AnswerKind,
    UploadAnswer,
    decode_contribution,
    encode_answer,
)

__all__ = ["Partials", "Uploads", "discard_upload", "receive_stripe", "receive_upload", "refusal_of"]

# Of a number of bytes in a call's metadata; Python refuses to read some thousands of digits.
_DIGITS_MAX: Final = 18


@dataclass(slots=True)
class _Partial:
    """An upload as far as it came.

    Attributes:
        sink: Has its bytes.
        wire_bytes: What crossed the wire for it so far.
        bad_chunks: How often it had to be asked again.
        lifetime: Of the call that feeds it now; those that carry a part of it end with that.
        stripes: How many those are.
        problem: What one of them brought that can't be mended.
    """

    sink: UploadSink
    wire_bytes: int = 0
    bad_chunks: int = 0
    lifetime: Lifetime = field(default_factory=Lifetime)
    stripes: int = 0
    problem: DecodeError | None = None


# Those of one session that are under way.
Uploads = dict[ContributionHeader, _Partial]


class Partials:
    """Broken uploads, kept for a while so that they can go on where they stopped.

    Owner: one event loop. Bounded by number per learner and by stored bytes in all; the oldest goes first.
    """

    def __init__(self, limits: ServerLimits) -> None:
        """Keep nothing yet."""
        self._limits = limits
        self._kept: OrderedDict[ContributionHeader, _Partial] = OrderedDict()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def take(self, header: ContributionHeader, fresh: UploadSink) -> _Partial:
        """The kept one of exactly this contribution, or one that begins in a fresh sink; the caller owns it."""
        kept = self._kept.pop(_identity(header), None)
        if kept is None or not kept.sink.resume():
            return _Partial(fresh)
        return _Partial(kept.sink, kept.wire_bytes, kept.bad_chunks)

    def keep(self, header: ContributionHeader, partial: _Partial) -> None:
        """Keep it for the next try."""
        partial.sink.rest()
        identity = _identity(header)
        # A second stream with the same contribution may have been cut off before.
        self._let_go(identity)
        self._kept[identity] = partial
        same = [kept for kept in self._kept if kept.key.learner_id == header.key.learner_id]
        for oldest in same[: -self._limits.partials_max]:
            self._let_go(oldest)
        while sum(kept.sink.stored_bytes for kept in self._kept.values()) > self._limits.partial_bytes_max:
            self._let_go(next(iter(self._kept)))

    def _let_go(self, identity: ContributionHeader) -> None:
        partial = self._kept.pop(identity, None)
        if partial is not None:
            partial.sink.abandon()


def _identity(header: ContributionHeader) -> ContributionHeader:
    """The same snapshot may be asked for by several pulls: its bytes don't depend on them."""
    return replace(header, round_id=RoundId(0), attempt=0)


async def receive_upload(
    stream: ServerStream,
    session: Session,
    handler: SyncerHandler,
    partials: Partials,
    limits: ServerLimits,
    uploads: Uploads,
) -> None:
    """Serve the first call of an upload, and tell the handler how it went.

    Raises:
        TransportError: The stream broke; what came is kept.
        DecodeError: The first message is no header.
    """
    receipts = _receipts(stream)
    first = await stream.read()
    if first is None:
        return
    session.counters.uplink_bytes += len(first)
    header = decode_contribution(first)
    sink = await handler.upload_offered(session, header)
    if sink is None:
        await _refuse(stream, session.counters, receipts)
        return
    if header.codes_bytes + header.scales_bytes > limits.payload_bytes_max:
        sink.abandon()
        handler.upload_failed(session, header, RefusalReason.WRONG_LENGTH, "more than this syncer takes")
        await _refuse(stream, session.counters, receipts)
        return
    partial = partials.take(header, sink)
    partial.wire_bytes += len(first)
    uploads[_identity(header)] = partial
    try:
        if receipts.window_bytes:
            await _say_progress(stream, 0)
        await _fill(stream, session.counters, partial, limits, receipts)
    except DecodeError as problem:
        partial.sink.abandon()
        handler.upload_failed(session, header, refusal_of(problem), problem.detail)
        await _refuse(stream, session.counters, receipts)
    except BaseException:
        partials.keep(header, partial)
        raise
    else:
        partial.sink.complete(session, header, partial.wire_bytes)
        await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.DONE)))
    finally:
        partial.lifetime.end("the upload's first call is over")
        if uploads.get(_identity(header)) is partial:
            del uploads[_identity(header)]


async def receive_stripe(stream: ServerStream, session: Session, limits: ServerLimits, uploads: Uploads) -> None:
    """Serve a call that carries a part of an upload under way.

    Raises:
        TransportError: The stream broke, the upload is over, or there is none.
        DecodeError: The first message is no header.
    """
    receipts = _receipts(stream)
    first = await stream.read()
    if first is None:
        return
    session.counters.uplink_bytes += len(first)
    partial = uploads.get(_identity(decode_contribution(first)))
    if partial is None or partial.stripes >= CHANNELS_MAX - 1:
        raise TransportError("no upload that this could be a part of")
    partial.wire_bytes += len(first)
    partial.stripes += 1
    try:
        with partial.lifetime.bound():
            await _say_progress(stream, 0)
            await _take(stream, session.counters, partial, limits, receipts)
            await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.DONE)))
    except DecodeError as problem:
        # The first call tells, when it comes to its end.
        partial.problem = problem
        raise TransportError(f"a part that can't be used: {problem}") from problem
    finally:
        partial.stripes -= 1


async def discard_upload(stream: ServerStream, counters: Counters, receipts: Receipts | None = None) -> None:
    """Read what a sender has begun up to its mark: a call that ends while it still writes loses the last answer.

    Raises:
        TransportError: The call broke before.
    """
    receipts = receipts or _receipts(stream)
    while (message := await _next_message(stream, counters)) != END_MARK:
        await receipts.took(len(message))


def _receipts(stream: ServerStream) -> Receipts:
    """As the sender wishes; none if it says nothing of the kind."""
    wish = stream.metadata.get(WINDOW_KEY, "")
    is_number = wish.isascii() and wish.isdecimal() and len(wish) <= _DIGITS_MAX
    window_bytes = min(WINDOW_BYTES_MAX, int(wish)) if is_number else 0
    return Receipts(window_bytes, lambda received_bytes: _say_progress(stream, received_bytes))


async def _say_progress(stream: ServerStream, received_bytes: int) -> None:
    await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.PROGRESS, received_bytes=received_bytes)))


async def _refuse(stream: ServerStream, counters: Counters, receipts: Receipts) -> None:
    await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.REFUSED)))
    await discard_upload(stream, counters, receipts)


async def _fill(
    stream: ServerStream, counters: Counters, partial: _Partial, limits: ServerLimits, receipts: Receipts
) -> None:
    """Take what comes unasked, then ask for what is missing until nothing is."""
    await _take(stream, counters, partial, limits, receipts)
    while (gap := partial.sink.gap)[0] < gap[1]:
        await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.SEND, start=gap[0], end=gap[1])))
        await _take(stream, counters, partial, limits, receipts)
        if partial.sink.gap == gap:
            _note_bad(partial, limits, f"bytes {gap[0]} to {gap[1]} don't come")


async def _take(
    stream: ServerStream, counters: Counters, partial: _Partial, limits: ServerLimits, receipts: Receipts
) -> None:
    """Store messages up to the mark of their end."""
    while (message := await _next_message(stream, counters)) != END_MARK:
        partial.wire_bytes += len(message)
        try:
            await partial.sink.put(message)
        except DecodeError as problem:
            # Anything but a bad checksum would come out the same again.
            if problem.reason != "bad_checksum":
                raise
            _note_bad(partial, limits, problem.detail)
        await receipts.took(len(message))
    if partial.problem is not None:
        raise partial.problem


async def _next_message(stream: ServerStream, counters: Counters) -> bytes:
    message = await stream.read()
    if message is None:
        raise TransportError("an upload ended before its end")
    counters.uplink_bytes += len(message)
    return message


def _note_bad(partial: _Partial, limits: ServerLimits, detail: str) -> None:
    partial.bad_chunks += 1
    if partial.bad_chunks > limits.bad_chunks_max:
        raise DecodeError("bad_checksum", f"asked again {limits.bad_chunks_max} times; {detail}")


def refusal_of(problem: DecodeError) -> RefusalReason:
    """Why what can't be decoded is refused."""
    match problem.reason:
        case "bad_checksum":
            return RefusalReason.BAD_CHECKSUM
        case "wrong_length":
            return RefusalReason.WRONG_LENGTH
        case _:
            return RefusalReason.GARBAGE
