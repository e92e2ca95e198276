"""How often bytes are copied on their way into messages and out of them; gRPC itself takes nothing but `bytes`."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np

from wan_diloco.wire.frames import Assembler, pack, unpack

MIB = 2**20
CODES = np.random.default_rng(0).integers(0, 256, 16 * MIB, dtype=np.uint8)
NOTHING = np.empty(0, dtype=np.uint8)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that some work held beyond what was there before."""
    tracemalloc.start()
    try:
        kept = work()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
        return peak
    finally:
        tracemalloc.stop()


def test_what_does_not_compress_is_copied_into_its_message_and_nowhere_else() -> None:
    peak = peak_bytes(lambda: pack(CODES, NOTHING, chunk_bytes=MIB, zstd=False))
    assert peak < CODES.size + MIB // 4


def test_trying_to_compress_costs_one_chunk() -> None:
    peak = peak_bytes(lambda: pack(CODES, NOTHING, chunk_bytes=MIB))
    assert peak < CODES.size + 2 * MIB


def test_a_message_that_is_not_compressed_is_read_where_it_lies() -> None:
    (message,) = pack(CODES[:MIB], NOTHING, chunk_bytes=MIB, zstd=False)
    assert peak_bytes(lambda: unpack(message, MIB, 0)) < 16 * 1024
    (piece,) = unpack(message, MIB, 0)
    assert np.shares_memory(piece.raw, np.frombuffer(message, dtype=np.uint8))


def test_putting_messages_together_takes_the_payload_and_nothing_more() -> None:
    messages = pack(CODES, NOTHING, chunk_bytes=MIB, zstd=False)

    def put_together() -> Assembler:
        assembler = Assembler(CODES.size, 0)
        for message in messages:
            assembler.add(message)
        return assembler

    assert peak_bytes(put_together) < CODES.size + MIB // 4
