"""The bytes of a journal's segment: what a header looks like, and when one is to be believed.

All integers are little-endian. A segment starts with

    magic 8 | segment number u64 | sum u32                                              20 bytes

and goes on with records, one right after the other:

    magic 4 | kind u32 | meta length u32 | payload length u64 | durable offset u64
    | sum of meta u32 | sum of payload u32 | sum of all before u32                       40 bytes
    meta | payload

Sums are the low 32 bits of xxh3. A header's is seeded with the record's own place, so that bytes which
were copied, shifted or embedded in a payload are no record. `durable offset` says up to where this
segment was flushed when the record was written: it tells a tail that a crash tore from damage to what
was already promised.

This module does no I/O, and allocates nothing whose size comes from the bytes it looks at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import xxhash

__all__ = [
    "META_BYTES_MAX",
    "RECORD_HEADER_BYTES",
    "RECORD_MAGIC",
    "SEGMENT_HEADER_BYTES",
    "Buffer",
    "RecordHeader",
    "checksum",
    "decode_record_header",
    "encode_segment_header",
    "segment_header_problem",
]

Buffer = bytes | bytearray | memoryview

RECORD_MAGIC: Final = b"\xabWDR"
META_BYTES_MAX: Final = 16 * 2**20

_SEGMENT_MAGIC: Final = b"WDJRNL\x00\x02"  # the last byte is the format's version
_SEGMENT: Final = struct.Struct("<8sQI")
_RECORD: Final = struct.Struct("<4sIIQQIII")
_PLACE: Final = struct.Struct("<QQ")
_SUM_BYTES: Final = 4
_SUM_MASK: Final = 2**32 - 1

SEGMENT_HEADER_BYTES: Final = _SEGMENT.size
RECORD_HEADER_BYTES: Final = _RECORD.size


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What stands before a record's bytes.

    Attributes:
        kind: The caller's number for the kind of record.
        meta_bytes: Length of the meta part.
        payload_bytes: Length of the payload.
        durable_offset: The segment was flushed up to here when the record was written.
        meta_sum: Checksum of the meta part.
        payload_sum: Checksum of the payload.
    """

    kind: int
    meta_bytes: int
    payload_bytes: int
    durable_offset: int
    meta_sum: int
    payload_sum: int

    @property
    def record_bytes(self) -> int:
        """Length of the whole record, header included."""
        return RECORD_HEADER_BYTES + self.meta_bytes + self.payload_bytes

    def encode(self, segment: int, offset: int) -> bytes:
        """The header's bytes for a record at this place."""
        body = _RECORD.pack(
            RECORD_MAGIC,
            self.kind,
            self.meta_bytes,
            self.payload_bytes,
            self.durable_offset,
            self.meta_sum,
            self.payload_sum,
            0,
        )[:-_SUM_BYTES]
        return body + _placed(body, segment, offset).to_bytes(_SUM_BYTES, "little")


def decode_record_header(data: bytes, segment: int, offset: int) -> RecordHeader | None:
    """The header at this place, or None where these bytes are no header.

    Args:
        data: `RECORD_HEADER_BYTES` bytes, or fewer at a file's end.
        segment: Number of the segment that they were read from.
        offset: Where in it they were read.
    """
    if len(data) != RECORD_HEADER_BYTES:
        return None
    magic, kind, meta_bytes, payload_bytes, durable, meta_sum, payload_sum, own_sum = _RECORD.unpack(data)
    if magic != RECORD_MAGIC or own_sum != _placed(data[:-_SUM_BYTES], segment, offset):
        return None
    if meta_bytes > META_BYTES_MAX or durable > offset:
        return None
    return RecordHeader(
        kind=kind,
        meta_bytes=meta_bytes,
        payload_bytes=payload_bytes,
        durable_offset=durable,
        meta_sum=meta_sum,
        payload_sum=payload_sum,
    )


def encode_segment_header(segment: int) -> bytes:
    """The first bytes of a segment."""
    body = _SEGMENT.pack(_SEGMENT_MAGIC, segment, 0)[:-_SUM_BYTES]
    return body + checksum((body,)).to_bytes(_SUM_BYTES, "little")


def segment_header_problem(data: bytes, segment: int) -> str:
    """Why these bytes can't start this segment; empty where they can."""
    if data == encode_segment_header(segment):
        return ""
    if len(data) < SEGMENT_HEADER_BYTES:
        return "the segment's header is cut off"
    magic, number, own_sum = _SEGMENT.unpack(data)
    if own_sum != checksum((data[:-_SUM_BYTES],)) or magic[:-1] != _SEGMENT_MAGIC[:-1]:
        return "the segment's header is damaged"
    if magic != _SEGMENT_MAGIC:
        return f"the segment has format {magic[-1]}, and this version reads format {_SEGMENT_MAGIC[-1]}"
    return f"the file holds segment {number}"


def checksum(parts: Iterable[Buffer]) -> int:
    """The sum of these bytes, as if they were in one piece.

    Thread: any; large parts are read without the interpreter's lock.
    """
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest() & _SUM_MASK


def _placed(body: bytes, segment: int, offset: int) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(_PLACE.pack(segment, offset))) & _SUM_MASK
