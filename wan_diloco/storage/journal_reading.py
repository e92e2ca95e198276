"""Reading one segment of a journal: record after record, and what to make of bytes that are none.

Reads only; the journal decides what to cut. Memory is bounded by one record's meta part, or by the
one payload that was asked for, whatever the bytes claim.
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
    "JournalRef",
    "Record",
    "RecordHead",
    "check_segment_header",
    "damage",
    "find_tail",
    "read_payload_into",
    "read_record",
    "scan",
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


def damage(segment: int, offset: int, problem: str) -> JournalError:
    """The error that names a place in the journal."""
    return JournalError(f"the journal is damaged in segment {segment} at offset {offset}: {problem}")


def check_segment_header(file: BinaryIO, segment: int) -> None:
    """See that the file starts as this segment does.

    Raises:
        JournalError: It doesn't.
    """
    file.seek(0)
    problem = segment_header_problem(file.read(SEGMENT_HEADER_BYTES), segment)
    if problem:
        raise damage(segment, 0, problem)


def scan(
    file: BinaryIO, segment: int, size_bytes: int, *, verify_payload: bool
) -> Iterator[tuple[JournalRef, RecordHead]]:
    """Every record of a segment, in order.

    Args:
        file: The segment.
        segment: Its number.
        size_bytes: Where its last record ends.
        verify_payload: Whether payloads are read for their checksum.

    Raises:
        JournalError: Something before `size_bytes` is no record; the sentence names the place.
    """
    offset = SEGMENT_HEADER_BYTES
    while offset < size_bytes:
        header = _read_header(file, segment, offset, size_bytes)
        meta = _read_meta(file, segment, offset, header)
        if verify_payload:
            _check_payload(file, segment, offset, header)
        head = RecordHead(kind=header.kind, meta=meta, payload_bytes=header.payload_bytes)
        yield JournalRef(segment, offset, header.record_bytes), head
        offset += header.record_bytes


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


def find_tail(file: BinaryIO, segment: int, size_bytes: int) -> tuple[int, str]:
    """Where the last whole record of the last segment ends.

    A record that isn't whole is a torn tail if nothing shows that it had ever been flushed: a crash
    may lose any of the pages after the last flush, in any order. If a later record says that the
    broken one was flushed before, it was damaged afterwards.

    Returns:
        The end of what is whole, and what is wrong behind it (empty where nothing is).

    Raises:
        JournalError: A record that had been flushed is damaged.
    """
    end = SEGMENT_HEADER_BYTES
    try:
        for ref, _ in scan(file, segment, size_bytes, verify_payload=True):
            end = ref.offset + ref.length
    except JournalError as exc:
        if _flushed_up_to(file, segment, end, size_bytes) > end:
            raise
        return end, str(exc)
    return end, ""


def _flushed_up_to(file: BinaryIO, segment: int, offset: int, size_bytes: int) -> int:
    # The highest promise of any believable header behind a broken record. Only headers are looked at.
    highest = 0
    file.seek(offset)
    position = offset
    overlap = b""
    while position < size_bytes and (piece := file.read(min(_PIECE_BYTES, size_bytes - position))):
        window = overlap + piece
        start = position - len(overlap)
        at = window.find(RECORD_MAGIC)
        while 0 <= at <= len(window) - RECORD_HEADER_BYTES:
            header = decode_record_header(window[at : at + RECORD_HEADER_BYTES], segment, start + at)
            if header is not None:
                highest = max(highest, header.durable_offset)
            at = window.find(RECORD_MAGIC, at + 1)
        position += len(piece)
        overlap = window[-(RECORD_HEADER_BYTES - 1) :]
    return highest


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


def _read_header(file: BinaryIO, segment: int, offset: int, size_bytes: int) -> RecordHeader:
    file.seek(offset)
    header = decode_record_header(file.read(RECORD_HEADER_BYTES), segment, offset)
    if header is None:
        raise damage(segment, offset, "no record starts there")
    if offset + header.record_bytes > size_bytes:
        raise damage(segment, offset, f"the record needs {header.record_bytes} bytes and is cut off")
    return header


def _read_meta(file: BinaryIO, segment: int, offset: int, header: RecordHeader) -> bytes:
    meta = file.read(header.meta_bytes)
    if len(meta) != header.meta_bytes or checksum((meta,)) != header.meta_sum:
        raise damage(segment, offset, "the meta part doesn't match its checksum")
    return meta


def _check_payload(file: BinaryIO, segment: int, offset: int, header: RecordHeader) -> None:
    def pieces() -> Iterator[bytes]:
        left = header.payload_bytes
        while left and (piece := file.read(min(_PIECE_BYTES, left))):
            left -= len(piece)
            yield piece

    # What is cut off has another sum as well.
    if checksum(pieces()) != header.payload_sum:
        raise damage(segment, offset, "the payload doesn't match its checksum")
