"""Wherever a crash cuts the journal, between chunks or inside: a contribution that has its record is whole."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.payloads import whole_payload
from tests.support.transport import contribution, random_buffers
from wan_diloco.algorithm.codec import PayloadSizes
from wan_diloco.storage import Journal
from wan_diloco.storage.journal_format import SEGMENT_HEADER_BYTES
from wan_diloco.syncer.journal_keeper import KIND_CONTRIBUTION, JournalKeeper, TapeMirror, format_ref
from wan_diloco.syncer.payloads import StoredPayload, contribution_meta
from wan_diloco.syncer.spool import Spool
from wan_diloco.syncer.workers import Workers
from wan_diloco.wire.frames import Buffers, pack

SIZES = PayloadSizes(codes_bytes=70_000, scales_bytes=2000)
SEGMENT_BYTES = 100_000


def _write(folder: Path, order: list[tuple[int, bool]]) -> dict[str, int]:
    """Feed uploads message by message, in the order given.

    Args:
        folder: Of the journal.
        order: Whose message comes next, and whether the journal is flushed then.

    Returns:
        The contributions by their places, each with the number of its upload.
    """
    journal = Journal.open(folder, SEGMENT_BYTES)
    keeper = JournalKeeper(journal, Workers.inline(), TapeMirror(folder / "tape.jsonl"), None, lambda _: None)
    messages = {number: iter(_messages(number)) for number in range(4)}
    spools = {
        number: Spool(
            contribution(SIZES.codes_bytes, SIZES.scales_bytes), keeper, Workers.inline(), lambda *_: None, _fail
        )
        for number in messages
    }
    made = {}

    async def story() -> None:
        for number, flush in order:
            message = next(messages[number], None)
            if message is not None:
                await spools[number].put(message)
            elif number not in made.values():
                spool = spools[number]
                meta = contribution_meta({}, spool.chunks, ())
                ref = await keeper.append(KIND_CONTRIBUTION, meta, (spool.row,), oldest=spool.oldest_segment)
                made[ref] = number
            if flush:
                journal.sync()

    asyncio.run(story())
    keeper.close()
    return made


def _fail(problem: Exception) -> None:
    raise problem


def _buffers(number: int) -> Buffers:
    return random_buffers(SIZES.codes_bytes, SIZES.scales_bytes, seed=10 * number)


def _messages(number: int) -> list[bytes]:
    return pack(_buffers(number).codes, _buffers(number).scales, chunk_bytes=2**14)


@settings(max_examples=40, deadline=None)
@given(
    order=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=10, max_size=40),
    cut=st.floats(0.0, 1.0),
    zeros=st.booleans(),
)
def test_after_any_cut_each_contribution_that_is_there_has_all_its_bytes(
    order: list[tuple[int, bool]], cut: float, *, zeros: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = _write(folder, order)
        last = max(folder.glob("*.journal"))
        data = last.read_bytes()
        # A segment's header is flushed before anything follows it.
        kept = max(SEGMENT_HEADER_BYTES, int(cut * len(data)))
        # A file may have grown before its pages were written.
        last.write_bytes(data[:kept] + (b"\0" * (len(data) - kept) if zeros else b""))
        with Journal.open(folder, SEGMENT_BYTES) as journal:
            found = [format_ref(ref) for ref, head in journal.records() if head.kind == KIND_CONTRIBUTION]
            by_place = {":".join(ref.split(":")[:3]): (ref, number) for ref, number in made.items()}
            assert set(found) <= set(by_place)
            for place in found:
                ref, number = by_place[place]
                payload = whole_payload(StoredPayload.open(journal, ref, SIZES))
                assert np.array_equal(payload.codes, _buffers(number).codes)
                assert np.array_equal(payload.scales, _buffers(number).scales)
            # The oldest segment that a place names is enough.
            for ref in made:
                oldest = int(ref.split(":")[-1]) if ref.count(":") == 3 else int(ref.split(":")[0])
                if ref.split(":")[0] == str(journal.segments[-1]) and ":".join(ref.split(":")[:3]) in found:
                    journal.drop_segments_before(oldest)
                    whole_payload(StoredPayload.open(journal, ref, SIZES))
                    break
