"""Bytes on their way into the journal: what is held, what is copied, and what a broken stream leaves behind."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc

import numpy as np
import pytest

from tests.support.payloads import whole_payload
from tests.support.transport import contribution, random_buffers, random_bytes
from wan_diloco.algorithm.codec import PayloadSizes
from wan_diloco.errors import DecodeError, JournalError, StorageError, TransportError
from wan_diloco.storage import Journal
from wan_diloco.syncer import journal_keeper
from wan_diloco.syncer.journal_keeper import KIND_CHUNK, JournalKeeper, TapeMirror
from wan_diloco.syncer.payloads import StoredPayload
from wan_diloco.syncer.spool import Spool
from wan_diloco.syncer.workers import Workers
from wan_diloco.wire.frames import encode_frame, pack

SIZES = PayloadSizes(codes_bytes=1_000_001, scales_bytes=31_250)
HEADER = contribution(SIZES.codes_bytes, SIZES.scales_bytes)
BUFFERS = random_buffers(SIZES.codes_bytes, SIZES.scales_bytes)


class Scene:
    def __init__(self, folder, workers=None):
        self.journal = Journal.open(folder / "journal")
        self.workers = workers or Workers.inline()
        mirror = TapeMirror(folder / "tape.jsonl")
        self.keeper = JournalKeeper(self.journal, self.workers, mirror, None, lambda _: None)
        self.failures = []

    def spool(self, header=HEADER):
        return Spool(header, self.keeper, self.workers, lambda *_: None, self.failures.append)

    def payload(self, spool, sizes=SIZES):
        return whole_payload(StoredPayload(self.journal, sizes, spool.chunks, spool.row))


@pytest.fixture
def scene(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_keeper, "JOURNAL_RETRY_FIRST_S", 0.0)
    made = Scene(tmp_path)
    yield made
    made.keeper.close()


async def _put(spool, messages):
    for message in messages:
        await spool.put(message)


def _same(payload, buffers):
    return np.array_equal(payload.codes, buffers.codes) and np.array_equal(payload.scales, buffers.scales)


@pytest.mark.parametrize("zstd", [False, True])
def test_what_comes_lies_in_the_journal_chunk_by_chunk(scene, zstd):
    spool = scene.spool()
    assert spool.gap == (0, SIZES.total_bytes)
    asyncio.run(_put(spool, pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16, zstd=zstd)))
    assert spool.gap == (SIZES.total_bytes, SIZES.total_bytes)
    assert spool.stored_bytes == SIZES.total_bytes
    assert {head.kind for _, head in scene.journal.records()} == {KIND_CHUNK}
    assert len(spool.chunks) == 17
    assert _same(scene.payload(spool), BUFFERS)


def test_any_order_and_any_repetition_gives_the_same_row(scene):
    messages = pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16)
    spool = scene.spool()
    asyncio.run(_put(spool, [messages[3], *messages[::-1], messages[0]]))
    assert _same(scene.payload(spool), BUFFERS)
    assert len(list(scene.journal.records())) == 17, "what is there isn't written again"


def test_a_small_contribution_is_held_and_writes_nothing_yet(scene):
    buffers = random_buffers(3350, 106)
    spool = scene.spool(contribution(3350, 106))
    asyncio.run(_put(spool, pack(buffers.codes, buffers.scales)))
    assert spool.gap == (3456, 3456)
    assert list(scene.journal.records()) == []
    assert _same(scene.payload(spool, PayloadSizes(codes_bytes=3350, scales_bytes=106)), buffers)


def _peak_of(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("zstd", "copies"), [(False, 0), (True, 1)])
def test_a_byte_is_copied_by_nothing_but_its_decompression(scene, zstd, copies):
    size = 64 * 2**20
    codes = random_bytes(2**21) & 31
    message, squeezed = encode_frame(0, 2**21, codes, zstd=zstd)
    assert squeezed == zstd
    spool = scene.spool(contribution(size, 0))

    async def first():
        # What is allocated once, such as decompression contexts, isn't counted.
        await spool.put(encode_frame(0, 0, codes, zstd=zstd)[0])

    async def measured():
        await spool.put(message)

    asyncio.run(first())
    peak = _peak_of(lambda: asyncio.run(measured()))
    assert copies * codes.size <= peak < copies * codes.size + 2**18


def test_memory_does_not_grow_with_the_contribution(scene):
    size = 64 * 2**20
    codes = random_bytes(2**20)
    spool = scene.spool(contribution(size, 0))

    async def story():
        for index in range(32):
            await spool.put(encode_frame(0, index * 2**20, codes, zstd=False)[0])

    # The one message that the sender's end has made.
    assert _peak_of(lambda: asyncio.run(story())) < 3 * 2**20


def test_reading_holds_one_chunk(scene):
    spool = scene.spool(contribution(16 * 2**20, 2**19))
    codes, scales = random_bytes(16 * 2**20), random_bytes(2**19)
    asyncio.run(_put(spool, pack(codes, scales, chunk_bytes=2**19, zstd=False)))
    payload = StoredPayload(scene.journal, PayloadSizes(codes_bytes=codes.size, scales_bytes=scales.size), spool.chunks)
    tile = np.empty(3000, dtype=np.uint8)

    def work():
        for start in range(0, codes.size - tile.size, tile.size):
            payload.codes_into(start, tile)
            assert np.array_equal(tile, codes[start : start + tile.size])

    assert _peak_of(work) < 2 * 2**19 + 2**16
    assert np.array_equal(payload.scales(), scales)


@pytest.mark.parametrize(("start", "size"), [(0, 1), (65_535, 2), (65_536, 65_536), (1, 300_000), (999_000, 1001)])
def test_any_range_is_read_across_chunks(scene, start, size):
    spool = scene.spool()
    asyncio.run(_put(spool, pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16)))
    payload = StoredPayload(scene.journal, SIZES, spool.chunks)
    for _ in range(2):
        out = np.empty(size, dtype=np.uint8)
        payload.codes_into(start, out)
        assert np.array_equal(out, BUFFERS.codes[start : start + size])


def test_a_chunk_damaged_on_the_disk_is_an_error_and_never_a_value(scene, tmp_path):
    spool = scene.spool()
    asyncio.run(_put(spool, pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16)))
    ref = spool.chunks[4].ref
    segment = tmp_path / "journal" / "0000000001.journal"
    data = bytearray(segment.read_bytes())
    data[ref.offset + ref.length // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(JournalError, match=f"offset {ref.offset}: the payload doesn't match"):
        scene.payload(spool)


def test_a_bad_message_leaves_everything_as_it_was(scene):
    messages = pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16)
    spool = scene.spool()
    asyncio.run(spool.put(messages[0]))
    with pytest.raises(DecodeError, match="bad_checksum"):
        asyncio.run(spool.put(messages[1][:-1] + b"?"))
    assert spool.gap == (2**16, SIZES.total_bytes)
    assert len(list(scene.journal.records())) == 1


def test_a_flood_of_tiny_chunks_is_garbage(scene):
    spool = scene.spool(contribution(2**18, 0))

    async def story():
        for index in range(2**18):
            await spool.put(encode_frame(0, index, np.zeros(1, dtype=np.uint8), zstd=False)[0])

    with pytest.raises(DecodeError, match="more than 64 chunks"):
        asyncio.run(story())


def test_a_full_disk_is_waited_out_and_nothing_is_written_twice(scene, monkeypatch):
    append = scene.journal.append
    calls = []

    def narrow(kind, meta, payload=()):
        calls.append(kind)
        if 3 <= len(calls) <= 6:
            raise StorageError("can't append: the disk or the quota is full")
        return append(kind, meta, payload)

    monkeypatch.setattr(scene.journal, "append", narrow)
    spool = scene.spool()
    asyncio.run(_put(spool, pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**17)))
    assert _same(scene.payload(spool), BUFFERS)
    assert len(list(scene.journal.records())) == len(spool.chunks) == len(calls) - 4
    assert not scene.failures


def test_a_journal_that_lost_track_is_told_and_ends_the_upload(scene, monkeypatch):
    def lost(*_):
        raise StorageError("the journal must be opened anew")

    monkeypatch.setattr(scene.journal, "append", lost)
    monkeypatch.setattr(scene.journal, "sync", lost)
    with pytest.raises(TransportError, match="disk"):
        asyncio.run(_put(scene.spool(), pack(BUFFERS.codes, BUFFERS.scales)))
    assert ["opened anew" in str(failure) for failure in scene.failures] == [True]


def test_segments_stay_while_a_spool_needs_them_and_go_after(scene):
    spool = scene.spool()
    assert scene.keeper.floor(["9:9:9"]) == 9
    asyncio.run(_put(spool, pack(BUFFERS.codes, BUFFERS.scales)[:1]))
    assert scene.keeper.floor(["9:9:9"]) == 1
    spool.rest()
    assert scene.keeper.floor(["9:9:9"]) == 1
    assert spool.resume()
    spool.abandon()
    assert scene.keeper.floor(["9:9:9"]) == 9
    assert not spool.resume()


def test_what_is_resumed_is_kept_before_its_next_bytes_come(scene, monkeypatch):
    """Also where none are missing but the mark of their end: a snapshot comes between the offer and that."""
    monkeypatch.setattr("wan_diloco.syncer.journal_keeper._IDLE_SEGMENTS_MAX", 4)
    spools = [scene.spool(), scene.spool()]
    for spool in spools:
        asyncio.run(_put(spool, pack(BUFFERS.codes, BUFFERS.scales)))
        spool.rest()
    assert spools[0].resume()
    monkeypatch.setattr(type(scene.keeper), "newest_segment", 99)
    assert scene.keeper.floor(["98:9:9"]) == 1
    assert spools[0].chunks
    assert [spool.resume() for spool in spools] == [True, False]


def test_the_next_stream_waits_for_what_a_broken_one_left_at_work(tmp_path):
    scene = Scene(tmp_path, Workers.threads(2))
    append = scene.journal.append
    at_work, goes_on = threading.Event(), threading.Event()

    def slow(kind, meta, payload=()):
        if not at_work.is_set():
            at_work.set()
            assert goes_on.wait(10)
        return append(kind, meta, payload)

    scene.journal.append = slow
    messages = pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16)
    spool = scene.spool()

    async def story():
        loop = asyncio.get_running_loop()
        broken = loop.create_task(spool.put(messages[0]))
        await loop.run_in_executor(None, at_work.wait)
        broken.cancel()
        await asyncio.wait([broken])
        spool.rest()
        again = loop.create_task(_put(spool, messages))
        await asyncio.sleep(0)
        goes_on.set()
        await again

    asyncio.run(story())
    scene.workers.shutdown()
    assert _same(scene.payload(spool), BUFFERS)
    assert len(spool.chunks) == 17
    scene.keeper.close()
