"""Payloads become messages and come back; whatever else comes is refused by type."""

from __future__ import annotations

import hashlib
import io
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
import zstandard

from tests.support.transport import random_buffers, random_bytes, same
from wan_diloco.errors import DecodeError
from wan_diloco.wire.compression import compress, decompress
from wan_diloco.wire.coverage import Coverage
from wan_diloco.wire.frames import (
    CHUNK_BYTES_DEFAULT,
    CHUNK_BYTES_MAX,
    FRAME_HEADER_BYTES,
    Assembler,
    encode_frame,
    pack,
    spans,
    unpack,
)
from wan_diloco.wire.limits import MESSAGE_BYTES_MAX

NOTHING = np.empty(0, dtype=np.uint8)


def frame(
    stored: bytes, raw_bytes: int, *, buffer: int = 0, flags: int = 0, offset: int = 0, stored_bytes: int | None = None
) -> bytes:
    """A frame with a good checksum whatever else is wrong about it."""
    length = len(stored) if stored_bytes is None else stored_bytes
    head = struct.pack("<2sBBQII", b"W2", buffer, flags, offset, raw_bytes, length)
    return (
        head + struct.pack("<I", xxhash.xxh3_64_intdigest(stored, xxhash.xxh3_64_intdigest(head)) & 0xFFFFFFFF) + stored
    )


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("size", [8_672_945, 4_194_304])
def test_a_tensor_larger_than_a_message_arrives_bit_by_bit(size: int, *, zstd: bool) -> None:
    codes = random_bytes(size) & 63
    messages = pack(codes, NOTHING, zstd=zstd)
    assert max(map(len, messages)) <= CHUNK_BYTES_DEFAULT + 2 * FRAME_HEADER_BYTES < MESSAGE_BYTES_MAX
    assembler = Assembler(size, 0)
    for message in messages:
        assembler.add(message)
    assert hashlib.sha256(assembler.result().codes.tobytes()).digest() == hashlib.sha256(codes.tobytes()).digest()


def test_the_largest_chunk_fits_a_message_of_grpc() -> None:
    messages = pack(random_bytes(3 * CHUNK_BYTES_MAX), NOTHING, chunk_bytes=CHUNK_BYTES_MAX)
    assert max(map(len, messages)) <= CHUNK_BYTES_MAX + 2 * FRAME_HEADER_BYTES < MESSAGE_BYTES_MAX


def test_offsets_pass_32_bits_without_anybody_allocating_that_much() -> None:
    total = 3 * 2**32 + 5
    chunk = random_bytes(1000)
    offsets = [0, 2**31 - 500, 2**31 + 500, 2**32 - 1, total - 1000]
    messages = [encode_frame(0, offset, chunk, zstd=False)[0] for offset in offsets]
    assert spans(messages, total) == [(offset, offset + 1000) for offset in offsets]
    coverage = Coverage(total)
    for start, end in spans(messages, total):
        assert coverage.add(start, end)
    assert coverage.gap() == (1000, 2**31 - 500)
    for start, end in [(1000, 2**31 - 500), (2**31 + 1500, 2**32 - 1), (2**32 + 999, total - 1000)]:
        assert not coverage.complete
        assert coverage.add(start, end)
    assert coverage.complete


def test_a_small_payload_is_one_message_with_both_buffers() -> None:
    buffers = random_buffers(3350, 106)
    (message,) = pack(buffers.codes, buffers.scales, zstd=False)
    assert len(message) == 3350 + 106 + 2 * FRAME_HEADER_BYTES
    assert FRAME_HEADER_BYTES <= 32
    assembler = Assembler(3350, 106)
    assembler.add(message)
    assert same(assembler.result(), buffers)


def test_each_buffer_is_compressed_only_where_it_pays() -> None:
    noise, flat = random_bytes(100_000), np.zeros(100_000, dtype=np.uint8)
    assert len(b"".join(pack(noise, NOTHING))) == 100_000 + FRAME_HEADER_BYTES
    assert len(b"".join(pack(flat, NOTHING))) < 1000
    assert len(b"".join(pack(noise, flat))) < 101_000
    assert len(b"".join(pack(flat, NOTHING, zstd=False))) == 100_000 + FRAME_HEADER_BYTES


def test_scales_whose_exponents_repeat_shrink() -> None:
    scales = (np.random.default_rng(0).random(20_000).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    raw = scales.view(np.uint8)
    assert len(b"".join(pack(NOTHING, raw))) < 0.8 * raw.size
    assembler = Assembler(0, raw.size)
    for message in pack(NOTHING, raw, chunk_bytes=2**14):
        assembler.add(message)
    assert np.array_equal(assembler.result().scales, raw)


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 1), (1, 1), (63, 65), (4096, 4095), (70_000, 70_001)])
def test_all_sizes_come_back(sizes: tuple[int, int]) -> None:
    buffers = random_buffers(*sizes)
    assembler = Assembler(*sizes)
    for message in reversed(pack(buffers.codes, buffers.scales, chunk_bytes=4096)):
        assert not assembler.complete
        assembler.add(message)
    assert assembler.complete
    assert same(assembler.result(), buffers)


def test_the_first_gap_says_where_to_go_on() -> None:
    buffers = random_buffers(100_000, 1000)
    messages = pack(buffers.codes, buffers.scales, chunk_bytes=10_000, zstd=False)
    assembler = Assembler(100_000, 1000)
    assert assembler.gap == (0, 101_000)
    for index in (0, 1, 2, 5, 6):
        assembler.add(messages[index])
        assembler.add(messages[index])
    assert assembler.gap == (30_000, 50_000)
    for index in (3, 4):
        assembler.add(messages[index])
    assert assembler.gap == (70_000, 101_000)


def test_a_bit_that_flips_anywhere_is_noticed() -> None:
    buffers = random_buffers(300, 20)
    (message,) = pack(buffers.codes, buffers.scales, zstd=False)
    for position in range(len(message)):
        damaged = bytearray(message)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(DecodeError) as caught:
            unpack(bytes(damaged), 300, 20)
        assert caught.value.reason == "bad_checksum"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"W", "bad_checksum"),
        (b"x" * 100, "bad_checksum"),
        (frame(b"abc", 3, stored_bytes=4), "bad_checksum"),
        (frame(b"abc", 4), "wrong_length"),
        (frame(b"abc", 3, offset=8), "wrong_length"),
        (frame(b"abc", 3, offset=2**64 - 1), "wrong_length"),
        (frame(b"abc", 3, buffer=1, offset=3), "wrong_length"),
        (frame(b"", 0), "wrong_length"),
        (frame(compress(bytes(CHUNK_BYTES_MAX + 1)), CHUNK_BYTES_MAX + 1, flags=1), "wrong_length"),
        (frame(compress(bytes(2**20)), 10, flags=1), "wrong_length"),
        (frame(compress(bytes(9)), 10, flags=1), "wrong_length"),
        (frame(b"not zstd at all", 10, flags=1), "garbage"),
        (frame(b"", 10, flags=1), "garbage"),
        (frame(compress(b"abc"), 3, flags=3), "garbage"),
        (frame(b"abc", 3, flags=2), "garbage"),
        (frame(b"abc", 3, flags=9), "garbage"),
        (frame(b"abc", 3, buffer=2), "garbage"),
    ],
)
def test_a_frame_that_lies_is_refused_with_its_reason(message: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        unpack(message, 10, 5)
    assert caught.value.reason == reason


def test_chunks_that_overlap_in_part_are_refused() -> None:
    assembler = Assembler(10, 0)
    assembler.add(frame(b"abcd", 4))
    assembler.add(frame(b"bc", 2, offset=1))
    with pytest.raises(DecodeError, match="overlap"):
        assembler.add(frame(b"defg", 4, offset=3))


def test_chunks_scattered_all_over_are_refused() -> None:
    def scatter() -> None:
        for offset in range(0, 10_000, 2):
            assembler.add(frame(b"a", 1, offset=offset))

    assembler = Assembler(10_000, 0)
    with pytest.raises(DecodeError, match="scattered"):
        scatter()


def streamed(raw: bytes) -> bytes:
    """What a streaming compressor makes: a frame without content size."""
    target = io.BytesIO()
    with zstandard.ZstdCompressor(level=1).stream_writer(target, closefd=False) as writer:
        writer.write(raw)
    return target.getvalue()


@pytest.mark.parametrize("make", [compress, streamed])
def test_frames_with_and_without_content_size_and_several_of_them_decompress(make) -> None:  # type: ignore[no-untyped-def]
    raw = bytes(random_bytes(300_000) & 31)
    assert decompress(make(raw), len(raw)) == raw
    assert decompress(make(raw) + make(raw[:1000]), len(raw) + 1000) == raw + raw[:1000]


@pytest.mark.parametrize("make", [compress, streamed])
@pytest.mark.parametrize("tail", [b"(", b"\x28\xb5\x2f\xfd", b"trailing garbage", bytes(20)])
def test_whatever_follows_a_frame_is_refused(make, tail: bytes) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DecodeError):
        decompress(make(b"abc" * 1000) + tail, 3000)


@pytest.mark.parametrize("make", [compress, streamed])
@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_frame_cut_short_is_refused(make, cut: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DecodeError):
        decompress(make(bytes(random_bytes(3000)))[:-cut], 3000)


@pytest.mark.parametrize("declared", [1, 2999, 3001])
@pytest.mark.parametrize("make", [compress, streamed])
def test_another_length_than_declared_is_refused(make, declared: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DecodeError) as caught:
        decompress(make(b"abc" * 1000), declared)
    assert caught.value.reason == "wrong_length"


def test_a_window_larger_than_ours_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    target = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(target, closefd=False) as writer:
        writer.write(bytes(1000))
    with pytest.raises(DecodeError):
        decompress(target.getvalue(), 1000)


def test_threads_do_not_share_contexts() -> None:
    """16 threads, 1000 payloads each."""
    pool = random_bytes(2**18) & 127

    def trips(thread: int) -> int:
        rng = np.random.default_rng(thread)
        wrong = 0
        for _ in range(1000):
            # From 1 to 256 KiB, so that contexts are used again and again at different sizes.
            size = int(2 ** rng.uniform(10, 18))
            start = int(rng.integers(0, pool.size - size + 1))
            raw = pool[start : start + size].tobytes()
            wrong += decompress(compress(raw), size) != raw
        return wrong

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(trips, range(16))) == 0
