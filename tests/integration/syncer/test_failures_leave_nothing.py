"""Uploads that break or are refused, hundreds of them: the syncer's memory, files and journal stay as they were."""

from __future__ import annotations

import asyncio
import dataclasses
import gc

import psutil
import pytest

from tests.support.syncer import contribution, small_delta, tiny_config
from tests.support.syncer_scene import scene, until
from wan_diloco.errors import TransportError
from wan_diloco.protocol.messages import ContributionHeader
from wan_diloco.syncer import spool
from wan_diloco.units import FragmentId
from wan_diloco.wire.frames import pack

FIRST = FragmentId(0)


@pytest.mark.parametrize(
    ("warm_up", "failures"), [(30, 70), pytest.param(50, 500, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_failed_uploads_leave_neither_memory_nor_claims(tmp_path, monkeypatch, warm_up, failures):
    monkeypatch.setattr(spool, "_WHOLE_BYTES_MAX", 0)
    process = psutil.Process()

    async def story():
        async with scene(tiny_config(model={"dim": 256}), tmp_path) as (made, group):
            learner = group[0]
            payload = small_delta(made.maths, FIRST, 1)
            frames = pack(payload.codes, payload.scales, chunk_bytes=2**14)
            spoilt = [frame[:-1] + bytes([frame[-1] ^ 1]) for frame in frames]
            claims = made.service._parts.keeper._claims

            def header() -> ContributionHeader:
                # Other work each time, so that none goes on where another stopped. The other learner takes no step,
                # so no round begins.
                learner.step()
                step = learner.local_step
                made_header = contribution(
                    made.maths, learner.name, FIRST, step_lo=step - 1, step_hi=step, base=learner.versions[FIRST]
                )
                key = dataclasses.replace(made_header.key, incarnation=learner.incarnation)
                return dataclasses.replace(made_header, key=key)

            async def fail(number: int) -> None:
                if number % 2:
                    assert not await learner._connection.upload(header(), spoilt, 0.0)
                    return
                with pytest.raises((TimeoutError, TransportError)):
                    # Broken off in the middle.
                    async with asyncio.timeout(0.01):
                        await learner._connection.upload(header(), frames, 60.0)

            for number in range(warm_up):
                await fail(number)
            gc.collect()
            before = process.memory_info().rss, process.num_fds(), len(asyncio.all_tasks())
            for number in range(failures):
                await fail(number)
            gc.collect()
            assert process.memory_info().rss - before[0] < 8 * 2**20
            assert process.num_fds() <= before[1]
            await until(lambda: len(asyncio.all_tasks()) <= before[2])
            # What is kept to be resumed is bounded by number; all else has let its segments go.
            assert len(claims) <= 8
            assert made.versions == [0, 0]
            assert made.service.status()["rejected"]["bad_checksum"] == (warm_up + failures) // 2

    asyncio.run(story())
