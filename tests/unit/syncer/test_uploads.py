"""What is checked before a contribution may be journalled."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from tests.support.syncer import contribution, maths_of, small_delta, tiny_config
from wan_diloco.protocol.events import SessionId, UploadFailed, UploadStored
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.storage import Journal
from wan_diloco.syncer.journal_keeper import KIND_CONTRIBUTION, JournalKeeper, TapeMirror
from wan_diloco.syncer.uploads import Offers, store_upload
from wan_diloco.syncer.workers import Workers
from wan_diloco.units import Epoch, FragmentId, Version
from wan_diloco.wire.frames import Buffers

FIRST = FragmentId(0)
MATHS = maths_of(tiny_config())
HEADER = contribution(MATHS, "east", FIRST, step_lo=4, step_hi=8, base=Version(Epoch(0), 0))
GOOD = small_delta(MATHS, FIRST, 1)


@pytest.fixture
def store(tmp_path):
    journal = Journal.open(tmp_path / "journal")
    keeper = JournalKeeper(journal, Workers.inline(), TapeMirror(tmp_path / "tape.jsonl"), None, lambda _: None)

    def run(header, codes, scales):
        events = []
        asyncio.run(
            store_upload(
                session=SessionId(1),
                header=header,
                buffers=Buffers(codes=codes, scales=scales),
                wire_bytes=77,
                maths=MATHS,
                keeper=keeper,
                workers=Workers.inline(),
                emit=events.append,
            )
        )
        return events[0], keeper

    yield run
    keeper.close()


def test_a_good_one_is_in_the_journal_with_its_bytes(store):
    event, keeper = store(HEADER, GOOD.codes, GOOD.scales)
    assert isinstance(event, UploadStored)
    assert (event.session, event.header, event.payload_bytes) == (SessionId(1), HEADER, 77)
    assert keeper.read(event.ref, KIND_CONTRIBUTION) == GOOD.codes.tobytes() + GOOD.scales.tobytes()


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
def test_a_bad_one_is_refused_whole_and_never_journalled(store, header, codes, scales, reason):
    event, keeper = store(header, codes, scales)
    assert isinstance(event, UploadFailed)
    assert event.reason is reason
    assert list(keeper._journal.records()) == []


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
