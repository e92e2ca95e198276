"""Reading one segment of a journal: record after record, and what to make of bytes that are none.

Reads only; the journal decides what to cut, and its caller what can be done without. Memory is bounded by
one record's meta part, or by the one payload that was asked for, whatever the bytes claim.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from wan_diloco.errors import JournalError
from wan_diloco.storage.journal_format import (
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    SEGMENT_HEADER_BYTES,
    Buffer,
    RecordHeader,
    checksum,
    decode_record_header,
    segment_header_problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Damage",
    "JournalRef",
    "Record",
    "RecordHead",
    "Tail",
    "damage",
    "find_tail",
    "header_damage",
    "holds_records",
    "read_payload_into",
    "read_record",
    "survey",
]

_PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, order=True)
class JournalRef:
    """Where a record lies; ordered as the records were appended.

    Attributes:
        segment: Number of the segment.
        offset: First byte of the record in the segment.
        length: Bytes of the whole record, header included.
    """

    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record with its payload, checked.

    Attributes:
        kind: The caller's number for the kind of record.
        meta: The small part, as appended.
        payload: The large part, as appended.
    """

    kind: int
    meta: bytes
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHead:
    """A record whose payload was left on the disk.

    Attributes:
        kind: The caller's number for the kind of record.
        meta: The small part, as appended.
        payload_bytes: How long the payload is.
    """

    kind: int
    meta: bytes
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A part of a segment that isn't what was written there.

    Attributes:
        segment: Number of the segment.
        start, end: The part; what comes behind it is to be believed again.
        kind: Of the one record in it; None where not even its header is to be believed.
        problem: What is wrong.
    """

    segment: int
    start: int
    end: int
    kind: int | None
    problem: str

    def error(self) -> JournalError:
        """The error that names the place."""
        return damage(self.segment, self.start, self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """How the last segment ends.

    Attributes:
        end: Of what is to be kept.
        problem: What is wrong behind it; empty where nothing is there.
        damaged: Parts before it that had been flushed and aren't what they were.
    """

    end: int
    problem: str
    damaged: tuple[Damage, ...]


def damage(segment: int, offset: int, problem: str) -> JournalError:
    """The error that names a place in the journal."""
    return JournalError(f"the journal is damaged in segment {segment} at offset {offset}: {problem}")


def header_damage(file: BinaryIO, segment: int) -> Damage | None:
    """What is wrong with a segment's first bytes; they say nothing that its name doesn't."""
    file.seek(0)
    problem = segment_header_problem(file.read(SEGMENT_HEADER_BYTES), segment)
    return Damage(segment=segment, start=0, end=SEGMENT_HEADER_BYTES, kind=None, problem=problem) if problem else None


def holds_records(file: BinaryIO, segment: int, size_bytes: int) -> bool:
    """Whether there is a record of just this segment in the file, whatever its first bytes say."""
    return _next_header(file, segment, SEGMENT_HEADER_BYTES, size_bytes) < size_bytes


def survey(
    file: BinaryIO, segment: int, start: int, size_bytes: int, *, verify_payload: bool
) -> Iterator[tuple[JournalRef, RecordHead] | Damage]:
    """Every record of a segment, in order, and between them what is none.

    A header is believed only at its own place, so that reading goes on behind damage.

    Args:
        file: The segment; may be used otherwise between two items.
        segment: Its number.
        start: Where a record begins.
        size_bytes: Where its last record ends.
        verify_payload: Whether payloads are read for their checksum.
    """
    offset = start
    while offset < size_bytes:
        header = _header_of(file, segment, offset)
        if header is None:
            behind = _next_header(file, segment, offset + 1, size_bytes)
            yield Damage(segment=segment, start=offset, end=behind, kind=None, problem="no record starts there")
            offset = behind
            continue
        end = offset + header.record_bytes
        problem = f"the record needs {header.record_bytes} bytes and is cut off" if end > size_bytes else ""
        meta = b"" if problem else file.read(header.meta_bytes)
        problem = problem or _problem_of(file, header, meta, verify_payload=verify_payload)
        if problem:
            end = min(end, size_bytes)
            yield Damage(segment=segment, start=offset, end=end, kind=header.kind, problem=problem)
        else:
            head = RecordHead(kind=header.kind, meta=meta, payload_bytes=header.payload_bytes)
            yield JournalRef(segment, offset, header.record_bytes), head
        offset = end


def read_record(descriptor: int, ref: JournalRef, size_bytes: int) -> Record:
    """The record at a place, all of it checked.

    Raises:
        JournalError: There is no such record, or it is damaged.
    """
    header = _header_at(descriptor, ref, size_bytes)
    place = ref.offset + RECORD_HEADER_BYTES
    meta = _read(descriptor, header.meta_bytes, place)
    payload = _read(descriptor, header.payload_bytes, place + header.meta_bytes)
    _check_sums(ref, header, meta, payload)
    return Record(kind=header.kind, meta=meta, payload=payload)


def read_payload_into(descriptor: int, ref: JournalRef, size_bytes: int, out: memoryview) -> int:
    """Read a record's payload into memory that is there, checked; nothing else of its size is allocated.

    Args:
        descriptor: The segment's file.
        ref: Where the record lies; it has no meta part.
        size_bytes: Where the segment's last record ends.
        out: Exactly as long as the payload.

    Returns:
        The record's kind.

    Raises:
        JournalError: There is no such record, or it is damaged; what is in `out` then is of no meaning.
    """
    head = bytearray(RECORD_HEADER_BYTES)
    _check_place(ref, size_bytes)
    done = os.preadv(descriptor, [head, out], ref.offset) - RECORD_HEADER_BYTES
    header = _decoded_header(bytes(head), ref)
    if header.meta_bytes or header.payload_bytes != out.nbytes:
        raise damage(ref.segment, ref.offset, f"the record has another payload than {out.nbytes} bytes alone")
    while done < out.nbytes:
        more = os.preadv(descriptor, [out[done:]], ref.offset + RECORD_HEADER_BYTES + done)
        if not more:
            raise damage(ref.segment, ref.offset, "the record is cut off")
        done += more
    _check_sums(ref, header, b"", out)
    return header.kind


def find_tail(file: BinaryIO, segment: int, size_bytes: int) -> Tail:
    """Where the last segment ends, and what before that was damaged.

    A record that isn't whole is a torn tail if nothing shows that it had ever been flushed: a crash
    may lose any of the pages after the last flush, in any order. If a later record says that the
    broken one was flushed before, it was damaged afterwards.
    """
    end = SEGMENT_HEADER_BYTES
    flushed: int | None = None
    damaged: list[Damage] = []
    for item in survey(file, segment, SEGMENT_HEADER_BYTES, size_bytes, verify_payload=True):
        if not isinstance(item, Damage):
            end = item[0].offset + item[0].length
            continue
        if flushed is None:
            # No header promises more than what lies before it: what is promised is promised behind each damage.
            flushed = max((header.durable_offset for _, header in _headers(file, segment, end, size_bytes)), default=0)
        if item.start >= flushed:
            return Tail(end=end, problem=str(item.error()), damaged=tuple(damaged))
        damaged.append(item)
        end = item.end
    return Tail(end=end, problem="", damaged=tuple(damaged))


def _next_header(file: BinaryIO, segment: int, offset: int, size_bytes: int) -> int:
    """Where the next header is that can be believed; the end where there is none."""
    return next((place for place, _ in _headers(file, segment, offset, size_bytes)), size_bytes)


def _headers(file: BinaryIO, segment: int, offset: int, size_bytes: int) -> Iterator[tuple[int, RecordHeader]]:
    """Every believable header in a part of a segment; nothing else is looked at."""
    position = offset
    overlap = b""
    while position < size_bytes:
        file.seek(position)
        if not (piece := file.read(min(_PIECE_BYTES, size_bytes - position))):
            return
        window = overlap + piece
        start = position - len(overlap)
        at = window.find(RECORD_MAGIC)
        while 0 <= at <= len(window) - RECORD_HEADER_BYTES:
            header = decode_record_header(window[at : at + RECORD_HEADER_BYTES], segment, start + at)
            if header is not None:
                yield start + at, header
            at = window.find(RECORD_MAGIC, at + 1)
        position += len(piece)
        overlap = window[-(RECORD_HEADER_BYTES - 1) :]


def _header_at(descriptor: int, ref: JournalRef, size_bytes: int) -> RecordHeader:
    _check_place(ref, size_bytes)
    return _decoded_header(os.pread(descriptor, RECORD_HEADER_BYTES, ref.offset), ref)


def _check_place(ref: JournalRef, size_bytes: int) -> None:
    if ref.offset < SEGMENT_HEADER_BYTES or ref.offset + ref.length > size_bytes:
        raise damage(ref.segment, ref.offset, f"no record of {ref.length} bytes fits there")


def _decoded_header(data: bytes, ref: JournalRef) -> RecordHeader:
    header = decode_record_header(data, ref.segment, ref.offset)
    if header is None:
        raise damage(ref.segment, ref.offset, "no record starts there")
    if header.record_bytes != ref.length:
        raise damage(ref.segment, ref.offset, f"the record has {header.record_bytes} bytes and not {ref.length}")
    return header


def _read(descriptor: int, size_bytes: int, offset: int) -> bytes:
    parts = []
    while size_bytes and (part := os.pread(descriptor, size_bytes, offset)):
        parts.append(part)
        size_bytes -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_sums(ref: JournalRef, header: RecordHeader, meta: bytes, payload: Buffer) -> None:
    if len(meta) != header.meta_bytes or checksum((meta,)) != header.meta_sum:
        raise damage(ref.segment, ref.offset, "the meta part doesn't match its checksum")
    if len(payload) != header.payload_bytes or checksum((payload,)) != header.payload_sum:
        raise damage(ref.segment, ref.offset, "the payload doesn't match its checksum")


def _header_of(file: BinaryIO, segment: int, offset: int) -> RecordHeader | None:
    file.seek(offset)
    return decode_record_header(file.read(RECORD_HEADER_BYTES), segment, offset)


def _problem_of(file: BinaryIO, header: RecordHeader, meta: bytes, *, verify_payload: bool) -> str:
    """What is wrong with a record whose meta part has just been read."""

    def pieces() -> Iterator[bytes]:
        left = header.payload_bytes
        while left and (piece := file.read(min(_PIECE_BYTES, left))):
            left -= len(piece)
            yield piece

    if len(meta) != header.meta_bytes or checksum((meta,)) != header.meta_sum:
        return "the meta part doesn't match its checksum"
    # What is cut off has another sum as well.
    if verify_payload and checksum(pieces()) != header.payload_sum:
        return "the payload doesn't match its checksum"
    return ""
