"""What is checked before a contribution may be journalled."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from tests.support.payloads import whole_payload
from tests.support.syncer import contribution, maths_of, small_delta, tiny_config
from wan_diloco.protocol.events import SessionId, UploadFailed, UploadStored
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.storage import Journal
from wan_diloco.syncer import spool
from wan_diloco.syncer.journal_keeper import KIND_CONTRIBUTION, JournalKeeper, TapeMirror
from wan_diloco.syncer.payloads import StoredPayload
from wan_diloco.syncer.spool import Spool
from wan_diloco.syncer.uploads import Offers, store_upload
from wan_diloco.syncer.workers import Workers
from wan_diloco.units import Epoch, FragmentId, Version
from wan_diloco.wire.frames import CHUNK_BYTES_DEFAULT, pack

FIRST = FragmentId(0)
MATHS = maths_of(tiny_config())
HEADER = contribution(MATHS, "east", FIRST, step_lo=4, step_hi=8, base=Version(Epoch(0), 0))
GOOD = small_delta(MATHS, FIRST, 1)


class Parts:
    """A journal, and what stores contributions in it."""

    def __init__(self, folder):
        self.journal = Journal.open(folder / "journal")
        self.workers = Workers.inline()
        mirror = TapeMirror(folder / "tape.jsonl")
        self.keeper = JournalKeeper(self.journal, self.workers, mirror, None, lambda _: None)
        self.events = []

    async def send(self, header, codes, scales, chunk_bytes=CHUNK_BYTES_DEFAULT, befalls=lambda: None):
        """Bring the bytes into a spool, have something befall them there, and store it."""
        complete = []
        header = dataclasses.replace(header, codes_bytes=codes.size, scales_bytes=scales.size)
        spool = Spool(header, self.keeper, self.workers, lambda *all_of_it: complete.append(all_of_it), pytest.fail)
        for message in pack(codes, scales, chunk_bytes=chunk_bytes):
            await spool.put(message)
        spool.complete(None, header, 77)
        ((_, _, _, wire_bytes),) = complete
        befalls()
        await store_upload(
            session=SessionId(1),
            header=header,
            spool=spool,
            wire_bytes=wire_bytes,
            maths=MATHS,
            keeper=self.keeper,
            workers=self.workers,
            emit=self.events.append,
        )
        return self.events[-1]


@pytest.fixture(params=["held in memory", "in chunks"])
def parts(request, tmp_path, monkeypatch):
    if request.param == "in chunks":
        monkeypatch.setattr(spool, "_WHOLE_BYTES_MAX", 0)
    made = Parts(tmp_path)
    yield made
    made.keeper.close()


def test_a_good_one_is_in_the_journal_with_its_bytes(parts):
    event = asyncio.run(parts.send(HEADER, GOOD.codes, GOOD.scales, chunk_bytes=1000))
    assert isinstance(event, UploadStored)
    assert (event.session, event.header, event.payload_bytes) == (SessionId(1), HEADER, 77)
    stored = whole_payload(StoredPayload.open(parts.journal, event.ref, MATHS.sizes(FIRST)))
    assert stored.codes.tobytes() == GOOD.codes.tobytes()
    assert stored.scales.tobytes() == GOOD.scales.tobytes()
    assert parts.keeper.floor(["9:9:9"]) == 1
    parts.keeper.recorded(event.ref)
    assert parts.keeper.floor(["9:9:9"]) == 9


def _with_scale(bits: int):
    scales = GOOD.scales.copy()
    scales[:2] = np.frombuffer(bits.to_bytes(2, "little"), dtype=np.uint8)
    return scales


@pytest.mark.parametrize(
    ("header", "codes", "scales", "reason"),
    [
        (HEADER, GOOD.codes, _with_scale(0x7FC0), RefusalReason.NON_FINITE),
        (HEADER, GOOD.codes, _with_scale(0x7F80), RefusalReason.NON_FINITE),
        (HEADER, GOOD.codes[:-1], GOOD.scales, RefusalReason.WRONG_LENGTH),
        (HEADER, GOOD.codes, np.append(GOOD.scales, np.uint8(0)), RefusalReason.WRONG_LENGTH),
        (dataclasses.replace(HEADER, codec="int8"), GOOD.codes, GOOD.scales, RefusalReason.WRONG_CODEC),
        (dataclasses.replace(HEADER, tokens_hi=HEADER.tokens_lo), GOOD.codes, GOOD.scales, RefusalReason.NO_STEPS),
    ],
    ids=["nan", "infinite", "short", "long", "codec", "weightless"],
)
def test_a_bad_one_is_refused_whole_and_never_a_contribution(parts, header, codes, scales, reason):
    event = asyncio.run(parts.send(header, codes, scales))
    assert isinstance(event, UploadFailed)
    assert event.reason is reason
    assert KIND_CONTRIBUTION not in {head.kind for _, head in parts.journal.records()}
    assert parts.keeper.floor(["9:9:9"]) == 9, "its chunks are garbage"


@pytest.mark.parametrize("how", ["rotten", "gone"])
def test_what_can_not_be_read_back_is_refused_and_may_come_again(tmp_path, monkeypatch, how):
    monkeypatch.setattr(spool, "_WHOLE_BYTES_MAX", 0)
    parts = Parts(tmp_path)
    segment = tmp_path / "journal" / "0000000001.journal"

    def befalls():
        if how == "rotten":
            data = bytearray(segment.read_bytes())
            data[-1] ^= 0x40
            segment.write_bytes(data)
        else:
            parts.journal.seal()
            segment.unlink()

    async def story():
        event = await parts.send(HEADER, GOOD.codes, GOOD.scales, chunk_bytes=1000, befalls=befalls)
        assert isinstance(event, UploadFailed)
        assert event.reason is RefusalReason.BAD_CHECKSUM
        assert "can't be read back" in event.detail
        assert parts.keeper.floor(["9:9:9"]) == 9
        assert isinstance(await parts.send(HEADER, GOOD.codes, GOOD.scales), UploadStored)

    asyncio.run(story())
    parts.keeper.close()


def test_an_offer_waits_for_the_word_and_a_newer_one_ends_the_older():
    async def story():
        offers = Offers()
        session = SessionId(1)
        first = asyncio.get_running_loop().create_task(offers.decision(session, HEADER))
        await asyncio.sleep(0)
        second = asyncio.get_running_loop().create_task(offers.decision(session, HEADER))
        await asyncio.sleep(0)
        assert await first is False
        offers.decide(session, HEADER, accepted=True)
        assert await second is True
        offers.decide(session, HEADER, accepted=True)  # nobody waits any more

    asyncio.run(story())
