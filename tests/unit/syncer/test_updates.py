"""Packing: once for everybody where everybody lacks the same."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.syncer import maths_of, small_delta, tiny_config
from wan_diloco.algorithm.codec import Payload
from wan_diloco.errors import JournalError
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol.events import UpdateSource
from wan_diloco.syncer import updates
from wan_diloco.syncer.fragments_store import FragmentStore
from wan_diloco.syncer.updates import Packing, PublishedValue, Updates, frames_bytes
from wan_diloco.syncer.workers import Workers
from wan_diloco.units import Epoch, FragmentId, Version
from wan_diloco.wire.frames import Assembler

FIRST = FragmentId(0)


class Stored:
    """Publications by their place."""

    def __init__(self, maths) -> None:
        self.reads: list[str] = []
        self._payloads = {f"1:{n}:9": small_delta(maths, FIRST, n) for n in range(1, 5)}

    def payload(self, ref: str) -> Payload:
        return self._payloads[ref]

    def read(self, ref, kind):
        assert kind == 3
        self.reads.append(ref)
        if ref not in self._payloads:
            raise JournalError("nothing there")
        return self._payloads[ref].codes.tobytes() + self._payloads[ref].scales.tobytes()


def _source(to: int) -> UpdateSource:
    return UpdateSource(
        from_version=Version(Epoch(0), to - 1),
        to_version=Version(Epoch(0), to),
        digest="d",
        ref=f"1:{to}:9",
        codes_bytes=0,
        scales_bytes=0,
    )


@pytest.fixture
def scene():
    maths = maths_of(tiny_config())
    stored = Stored(maths)
    return maths, stored, Updates(maths, stored, Workers.inline(), Packing(zstd=True), 4096)


def _unpacked(payload: Payload, frames) -> Payload:
    assembler = Assembler(payload.codes.size, payload.scales.size)
    for frame in frames:
        assembler.add(frame)
    both = assembler.result()
    return Payload(codes=both.codes, scales=both.scales)


def test_a_chain_carries_the_stored_bytes_in_order(scene):
    _, stored, updates = scene
    frames = asyncio.run(updates.chain(FIRST, (_source(1), _source(2)), 4096))
    for ref, messages in zip(("1:1:9", "1:2:9"), frames, strict=True):
        payload = stored.payload(ref)
        again = _unpacked(payload, messages)
        assert again.codes.tobytes() == payload.codes.tobytes()
        assert again.scales.tobytes() == payload.scales.tobytes()
        assert frames_bytes(messages) >= payload.codes.size // 2


def test_many_learners_cost_one_reading_of_the_newest(scene):
    _, stored, updates = scene

    async def story():
        await asyncio.gather(*(updates.chain(FIRST, (_source(3),), 4096) for _ in range(8)))
        await updates.chain(FIRST, (_source(3),), 4096)

    asyncio.run(story())
    assert stored.reads == ["1:3:9"]


def test_what_was_just_merged_is_not_read_at_all_and_older_links_are_not_kept(scene):
    _, stored, updates = scene
    updates.remember(FIRST, Version(Epoch(0), 4), 4096, [b"packed"])

    async def story():
        for _ in range(2):
            frames = await updates.chain(FIRST, (_source(3), _source(4)), 4096)
            assert frames[1] == [b"packed"]

    asyncio.run(story())
    assert stored.reads == ["1:3:9", "1:3:9"]


def test_what_is_kept_is_bounded_and_what_was_used_last_stays(scene, monkeypatch):
    _, _, packed = scene
    monkeypatch.setattr(updates, "_KEPT_BYTES", 1000)
    for index in range(5):
        packed.remember(FragmentId(index), Version(Epoch(0), 4), 4096, [bytes(300)])
        # Asked for all the time, so it outlives younger ones.
        assert asyncio.run(packed.chain(FIRST, (_source(4),), 4096)) == [[bytes(300)]]
    assert list(packed._kept._forms) == [(3, 4096), (4, 4096), (0, 4096)]
    # A newer one takes the place of its predecessor, and two stay whatever they take.
    packed.remember(FIRST, Version(Epoch(0), 5), 4096, [bytes(5000)])
    packed.remember(FragmentId(7), Version(Epoch(0), 5), 4096, [bytes(6000)])
    assert list(packed._kept._forms) == [(0, 4096), (7, 4096)]
    assert packed._kept.total_bytes == 11_000
    packed.remember(FragmentId(8), Version(Epoch(0), 5), 4096, [bytes(10)])
    assert packed._kept.total_bytes == 6010


def test_a_publication_that_is_gone_is_an_error_for_all_who_wait(scene):
    _, _, updates = scene
    gone = UpdateSource(
        from_version=Version(Epoch(0), 8),
        to_version=Version(Epoch(0), 9),
        digest="d",
        ref="1:9:9",
        codes_bytes=0,
        scales_bytes=0,
    )

    async def story():
        return await asyncio.gather(*(updates.chain(FIRST, (gone,), 4096) for _ in range(2)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(story())] == [JournalError, JournalError]


def test_the_value_is_exact(scene):
    maths, _, updates = scene
    store = FragmentStore.fresh(maths.layout, model_tensors(build_model(tiny_config())))
    value = store.value(FIRST)
    (frames,) = asyncio.run(updates.value(FIRST, PublishedValue(value.version, value.published_N), 4096))
    raw = value.published_N.numpy().tobytes()
    assembler = Assembler(len(raw), 0)
    for frame in frames:
        assembler.add(frame)
    assert assembler.result().codes.tobytes() == raw


def test_each_size_of_chunks_is_packed_once_and_an_older_version_is_let_go_in_all_sizes(scene):
    _, stored, updates = scene

    async def story():
        for _ in range(3):
            small = await updates.chain(FIRST, (_source(3),), 1024)
            large = await updates.chain(FIRST, (_source(3),), 4096)
            assert len(small[0]) > len(large[0])
        assert stored.reads == ["1:3:9", "1:3:9"]
        updates.remember(FIRST, Version(Epoch(0), 4), 4096, [b"packed"])
        await updates.chain(FIRST, (_source(4),), 1024)
        await updates.chain(FIRST, (_source(3),), 4096)

    asyncio.run(story())
    assert stored.reads == ["1:3:9", "1:3:9", "1:4:9", "1:3:9"]
