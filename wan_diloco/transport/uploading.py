"""An upload, both ends of it; `proto/wan_diloco/v1/bulk.proto` says who says what when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.messages import ContributionHeader, RefusalReason
from wan_diloco.transport.interface import Counters, Frames, Session, SyncerHandler, UploadSink
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.streams import END_MARK, ClientStream, ServerStream
from wan_diloco.units import RoundId
from wan_diloco.wire.convert import (
    AnswerKind,
    UploadAnswer,
    decode_answer,
    decode_contribution,
    encode_answer,
    encode_contribution,
)
from wan_diloco.wire.frames import spans

__all__ = ["Partials", "discard_upload", "receive_upload", "send_upload"]

# More than any server asks for; a bound against one that asks forever.
_ASKED_MAX = 64


@dataclass(slots=True)
class _Partial:
    """An upload as far as it came.

    Attributes:
        sink: Has its bytes.
        wire_bytes: What crossed the wire for it so far.
        bad_chunks: How often it had to be asked again.
    """

    sink: UploadSink
    wire_bytes: int = 0
    bad_chunks: int = 0


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
        return kept if kept is not None and kept.sink.usable else _Partial(fresh)

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
    stream: ServerStream, session: Session, handler: SyncerHandler, partials: Partials, limits: ServerLimits
) -> None:
    """Serve one upload call, and tell the handler how it went.

    Raises:
        TransportError: The stream broke; what came is kept.
        DecodeError: The first message is no header.
    """
    first = await stream.read()
    if first is None:
        return
    session.counters.uplink_bytes += len(first)
    header = decode_contribution(first)
    sink = await handler.upload_offered(session, header)
    if sink is None:
        await _refuse(stream, session.counters)
        return
    if header.codes_bytes + header.scales_bytes > limits.payload_bytes_max:
        sink.abandon()
        handler.upload_failed(session, header, RefusalReason.WRONG_LENGTH, "more than this syncer takes")
        await _refuse(stream, session.counters)
        return
    partial = partials.take(header, sink)
    partial.wire_bytes += len(first)
    try:
        await _fill(stream, session.counters, partial, limits)
    except DecodeError as problem:
        partial.sink.abandon()
        handler.upload_failed(session, header, _refusal(problem), problem.detail)
        await _refuse(stream, session.counters)
    except BaseException:
        partials.keep(header, partial)
        raise
    else:
        partial.sink.complete(session, header, partial.wire_bytes)
        await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.DONE)))


async def discard_upload(stream: ServerStream, counters: Counters) -> None:
    """Read what a sender has begun up to its mark: a call that ends while it still writes loses the last answer.

    Raises:
        TransportError: The call broke before.
    """
    while await _next_message(stream, counters) != END_MARK:
        pass


async def _refuse(stream: ServerStream, counters: Counters) -> None:
    await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.REFUSED)))
    await discard_upload(stream, counters)


async def _fill(stream: ServerStream, counters: Counters, partial: _Partial, limits: ServerLimits) -> None:
    """Take what comes unasked, then ask for what is missing until nothing is."""
    await _take(stream, counters, partial, limits)
    while (gap := partial.sink.gap)[0] < gap[1]:
        await stream.write(encode_answer(UploadAnswer(kind=AnswerKind.SEND, start=gap[0], end=gap[1])))
        await _take(stream, counters, partial, limits)
        if partial.sink.gap == gap:
            _note_bad(partial, limits, f"bytes {gap[0]} to {gap[1]} don't come")


async def _take(stream: ServerStream, counters: Counters, partial: _Partial, limits: ServerLimits) -> None:
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


def _refusal(problem: DecodeError) -> RefusalReason:
    match problem.reason:
        case "bad_checksum":
            return RefusalReason.BAD_CHECKSUM
        case "wrong_length":
            return RefusalReason.WRONG_LENGTH
        case _:
            return RefusalReason.GARBAGE


async def send_upload(
    stream: ClientStream,
    header: ContributionHeader,
    frames: Frames,
    spread_s: float,
    pacer: Pacer,
    counters: Counters,
    *,
    unasked: bool,
) -> bool:
    """Send a contribution over a call just opened; see `Connection.upload`.

    Returns:
        False if it was refused.

    Raises:
        TransportError: The stream broke, or the syncer answers nonsense.
    """
    carried = spans(frames, header.codes_bytes)
    first = encode_contribution(header)
    counters.uplink_bytes += len(first)
    pacer.spend(len(first))
    await stream.write(first)
    await _send(stream, frames if unasked else (), spread_s, pacer, counters)
    for _ in range(_ASKED_MAX):
        answer = await _answer(stream)
        if answer.kind is not AnswerKind.SEND:
            return answer.kind is AnswerKind.DONE
        wanted = [
            message
            for message, (start, end) in zip(frames, carried, strict=True)
            if start < answer.end and answer.start < end
        ]
        await _send(stream, wanted, spread_s, pacer, counters)
    raise TransportError(f"the syncer asked for the same upload {_ASKED_MAX} times")


async def _send(
    stream: ClientStream, wanted: Sequence[bytes], spread_s: float, pacer: Pacer, counters: Counters
) -> None:
    transfer = pacer.transfer(sum(map(len, wanted)), spread_s)
    for message in wanted:
        await transfer.wait(len(message))
        counters.uplink_bytes += len(message)
        await stream.write(message)
    await stream.write(END_MARK)


async def _answer(stream: ClientStream) -> UploadAnswer:
    data = await stream.read()
    if data is None:
        raise TransportError("the syncer ended an upload without an answer")
    try:
        return decode_answer(data)
    except DecodeError as problem:
        raise TransportError(f"the syncer answered an upload with garbage: {problem}") from problem
