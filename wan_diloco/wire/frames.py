"""Bulk messages: two buffers cut into chunks, each with offset, lengths and checksum.

A payload is two buffers, codes and then scales, seen as one row of raw bytes. A *frame* is one chunk of
one buffer behind a fixed header; a *message* is one or more frames, and what the transport sends at once. A
small payload is one message.

    offset 0   magic "W2"
           2   buffer: 0 codes, 1 scales
           3   flags: 1 zstd, 2 shuffled (all even bytes, then all odd ones)
           4   offset of the chunk in its buffer, 64 bit
          12   raw length, 32 bit
          16   stored length, 32 bit
          20   the low 32 bits of xxh3 of the stored bytes after, seeded with that of the 20 bytes before

Little endian throughout. Sizes come from the header of the transfer, which was checked against the layout;
nothing that a frame says makes anybody allocate more than one chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from wan_diloco.errors import DecodeError
from wan_diloco.wire.compression import compress, decompress
from wan_diloco.wire.coverage import Coverage

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CHUNK_BYTES_DEFAULT",
    "CHUNK_BYTES_MAX",
    "FRAME_HEADER_BYTES",
    "Assembler",
    "Buffers",
    "Piece",
    "encode_frame",
    "pack",
    "pack_chunks",
    "spans",
    "unpack",
]

CHUNK_BYTES_DEFAULT: Final = 2**20
# With a header or two it stays well below gRPC's default limit of 4 MiB a message.
CHUNK_BYTES_MAX: Final = 2 * 2**20

_HEADER: Final = struct.Struct("<2sBBQII")
_SUM: Final = struct.Struct("<I")
FRAME_HEADER_BYTES: Final = _HEADER.size + _SUM.size
_MAGIC: Final = b"W2"
_CODES, _SCALES = 0, 1
_ZSTD, _SHUFFLED = 1, 2
# Compressed chunks cost time at the far end: below 3 % they aren't worth it.
_WORTH_IT: Final = 0.97
# A zstd frame has about 12 bytes of its own; below this nothing is won.
_COMPRESS_BYTES_MIN: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffers:
    """An encoded fragment, before zstd.

    Attributes:
        codes, scales: uint8, 1-D.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk that is checked and decompressed but not yet in its place.

    Attributes:
        start: Position in the row of codes and scales.
    """

    start: int
    raw: NDArray[np.uint8]


def pack(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], *, chunk_bytes: int = CHUNK_BYTES_DEFAULT, zstd: bool = True
) -> list[bytes]:
    """Cut two buffers into messages.

    Args:
        codes: uint8, 1-D, of any length.
        scales: The same.
        chunk_bytes: Raw bytes a frame, 1..CHUNK_BYTES_MAX; a message is two frame headers longer at most.
        zstd: Whether to compress chunks that get at least 3 % smaller by it.

    Thread: any; takes about 2 ms a MiB.
    """
    if not 1 <= chunk_bytes <= CHUNK_BYTES_MAX:
        raise ValueError(f"a chunk has 1 to {CHUNK_BYTES_MAX} bytes, not {chunk_bytes}")
    return pack_chunks(_cut(codes, chunk_bytes), scales, chunk_bytes=chunk_bytes, zstd=zstd)


def pack_chunks(
    codes: Iterable[NDArray[np.uint8]], scales: NDArray[np.uint8], *, chunk_bytes: int, zstd: bool
) -> list[bytes]:
    """The same, with codes that come in pieces: none is kept once its message is made.

    Args:
        codes: In order, each of at most `chunk_bytes`.
        scales: uint8, 1-D; read when all codes have come.
        chunk_bytes: Raw bytes a frame.
        zstd: As for `pack`.

    Thread: any.
    """
    messages: list[bytes] = []
    open_frames: list[bytes] = []
    open_bytes = 0
    for frame in chain(_frames(_CODES, codes, zstd=zstd), _frames(_SCALES, _cut(scales, chunk_bytes), zstd=zstd)):
        if open_frames and open_bytes + len(frame) > chunk_bytes + 2 * FRAME_HEADER_BYTES:
            messages.append(b"".join(open_frames))
            open_frames, open_bytes = [], 0
        open_frames.append(frame)
        open_bytes += len(frame)
    if open_frames:
        messages.append(b"".join(open_frames))
    return messages


def _cut(data: NDArray[np.uint8], chunk_bytes: int) -> Iterator[NDArray[np.uint8]]:
    for offset in range(0, data.size, chunk_bytes):
        yield np.ascontiguousarray(data[offset : offset + chunk_bytes])


def _frames(buffer: int, chunks: Iterable[NDArray[np.uint8]], *, zstd: bool) -> Iterator[bytes]:
    try_zstd, offset = zstd, 0
    for chunk in chunks:
        frame, smaller = encode_frame(buffer, offset, chunk, zstd=try_zstd)
        # The first chunk is the sample: where it doesn't pay, the rest of the buffer won't.
        try_zstd = try_zstd and smaller
        offset += chunk.size
        yield frame


def encode_frame(buffer: int, offset: int, chunk: NDArray[np.uint8], *, zstd: bool) -> tuple[bytes, bool]:
    """One frame, and whether compressing paid."""
    flags = 0
    stored: bytes | memoryview = chunk.data
    if zstd and chunk.size >= _COMPRESS_BYTES_MIN:
        # bf16 scales: their exponents differ little, their mantissas are noise.
        shuffle = buffer == _SCALES and chunk.size % 2 == 0
        squeezed = compress(chunk.reshape(-1, 2).T.tobytes() if shuffle else chunk.data)
        if len(squeezed) <= _WORTH_IT * chunk.size:
            stored, flags = squeezed, _ZSTD | (_SHUFFLED if shuffle else 0)
    head = _HEADER.pack(_MAGIC, buffer, flags, offset, chunk.size, len(stored))
    return b"".join((head, _SUM.pack(_checksum(head, stored)), stored)), flags != 0


def _checksum(head: bytes | memoryview, stored: bytes | memoryview) -> int:
    # A fifth of the time that crc32 takes; the seed joins the two parts without copying them together.
    return xxhash.xxh3_64_intdigest(stored, seed=xxhash.xxh3_64_intdigest(head)) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame as it lies in its message; the checksum is not yet looked at."""

    buffer: int
    flags: int
    offset: int
    raw_bytes: int
    head: memoryview
    stored: memoryview
    checksum: int

    def start(self, codes_bytes: int) -> int:
        return self.offset if self.buffer == _CODES else codes_bytes + self.offset


def _parse(message: bytes) -> Iterator[_Frame]:
    """The frames of a message; stops by DecodeError where it makes no sense."""
    view = memoryview(message)
    while view:
        if len(view) < FRAME_HEADER_BYTES:
            raise DecodeError("bad_checksum", "a frame is shorter than its header")
        magic, buffer, flags, offset, raw_bytes, stored_bytes = _HEADER.unpack_from(view)
        (checksum,) = _SUM.unpack_from(view, _HEADER.size)
        if magic != _MAGIC:
            raise DecodeError("bad_checksum", "this is no frame")
        end = FRAME_HEADER_BYTES + stored_bytes
        if end > len(view):
            raise DecodeError("bad_checksum", "a frame is cut short")
        yield _Frame(buffer, flags, offset, raw_bytes, view[: _HEADER.size], view[FRAME_HEADER_BYTES:end], checksum)
        view = view[end:]


def spans(messages: Sequence[bytes], codes_bytes: int) -> list[tuple[int, int]]:
    """Which part [start, end) of the row of codes and scales each message carries.

    Args:
        messages: As `pack` made them.
        codes_bytes: Length of the first buffer.

    Raises:
        DecodeError: They aren't messages.
    """
    found = []
    for message in messages:
        frames = list(_parse(message))
        if not frames:
            raise DecodeError("garbage", "a message without frames")
        found.append((frames[0].start(codes_bytes), frames[-1].start(codes_bytes) + frames[-1].raw_bytes))
    return found


def unpack(message: bytes, codes_bytes: int, scales_bytes: int) -> list[Piece]:
    """Check and decompress a message; chunks that came uncompressed share its memory.

    Args:
        message: Bytes from anywhere.
        codes_bytes: Length of the first buffer, as agreed upon.
        scales_bytes: Of the second.

    Thread: any.

    Raises:
        DecodeError: `bad_checksum` when asking again may help; any other reason when it can't.
    """
    sizes = (codes_bytes, scales_bytes)
    return [Piece(frame.start(codes_bytes), _inflate(frame, sizes)) for frame in _parse(message)]


def _inflate(frame: _Frame, sizes: tuple[int, int]) -> NDArray[np.uint8]:
    if _checksum(frame.head, frame.stored) != frame.checksum:
        raise DecodeError("bad_checksum", f"chunk at {frame.offset}")
    if frame.buffer > _SCALES or frame.flags not in (0, _ZSTD, _ZSTD | _SHUFFLED):
        raise DecodeError("garbage", f"a frame of buffer {frame.buffer} with flags {frame.flags}")
    if not 1 <= frame.raw_bytes <= CHUNK_BYTES_MAX:
        raise DecodeError("wrong_length", f"a chunk of {frame.raw_bytes} bytes")
    if frame.offset + frame.raw_bytes > sizes[frame.buffer]:
        raise DecodeError("wrong_length", f"a chunk beyond the end of buffer {frame.buffer}")
    if not frame.flags & _ZSTD:
        if len(frame.stored) != frame.raw_bytes:
            raise DecodeError("wrong_length", "a stored chunk of another length than its own")
        return np.frombuffer(frame.stored, dtype=np.uint8)
    raw = np.frombuffer(decompress(frame.stored, frame.raw_bytes), dtype=np.uint8)
    if not frame.flags & _SHUFFLED:
        return raw
    if raw.size % 2:
        raise DecodeError("garbage", "a shuffled chunk of odd length")
    return raw.reshape(2, -1).T.reshape(-1)


class Assembler:
    """Puts two buffers together from messages in any order; repeated ones change nothing.

    Owner: one task.

    Args:
        codes_bytes, scales_bytes: Lengths agreed upon; memory for them is taken here.
    """

    def __init__(self, codes_bytes: int, scales_bytes: int) -> None:
        """Take memory; pages that nothing is written to cost nothing."""
        self._sizes = (codes_bytes, scales_bytes)
        self._row: NDArray[np.uint8] = np.empty(codes_bytes + scales_bytes, dtype=np.uint8)
        self._coverage = Coverage(codes_bytes + scales_bytes)

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return self._coverage.complete

    @property
    def gap(self) -> tuple[int, int]:
        """The first part [start, end) of the row that is missing; empty when complete."""
        return self._coverage.gap()

    @property
    def stored_bytes(self) -> int:
        """How many bytes are there."""
        return self._coverage.covered

    def add(self, message: bytes) -> None:
        """Check a message and put its chunks into their places.

        Raises:
            DecodeError: As `unpack`; or chunks overlap in part, or lie scattered so that no honest sender made them.
        """
        for piece in unpack(message, *self._sizes):
            if self._coverage.add(piece.start, piece.start + piece.raw.size):
                self._row[piece.start : piece.start + piece.raw.size] = piece.raw

    def result(self) -> Buffers:
        """The two buffers, sharing memory with the assembler; to be called once, when complete."""
        if not self.complete:
            raise AssertionError("the payload isn't complete")
        return Buffers(codes=self._row[: self._sizes[0]], scales=self._row[self._sizes[0] :])
