"""A syncer's process after hundreds of streams that failed, were cancelled, or went silent half-open: as it was before.

Seen from outside: memory, descriptors, threads. `test_failures_leave_nothing.py` counts the tasks inside.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter, deque
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.integration.syncer.test_process import Process, syncer_process
from tests.support.syncer import contribution, small_delta, tiny_config
from tests.support.syncer_scene import Learner, learners
from tests.support.text import write_text_corpus
from tests.support.transport import poll
from wan_diloco.config import RunConfig
from wan_diloco.errors import TransportError
from wan_diloco.lab.links import GOOD, Passage
from wan_diloco.lab.proxy import LinkProxy
from wan_diloco.protocol.messages import ContributionHeader
from wan_diloco.transport.grpc_client import fetch_status, grpc_connection
from wan_diloco.units import FragmentId
from wan_diloco.wire.frames import pack

FIRST = FragmentId(0)
WITHIN_S = 240.0
# So many links stand half-open at once; the syncer's keepalive finds them in a quarter of a minute.
_HALF_OPEN_MAX = 20
_GROWTH_BYTES = 16 * 2**20


class Mischief:
    """Does everything to a syncer that a bad link and a dying learner do."""

    def __init__(self, address: str, config: RunConfig, east: Learner, west: Learner) -> None:
        self._address = address
        self._config = config
        self._east = east
        self._west = west
        self._standing: deque[AsyncExitStack] = deque()

    async def fail(self, number: int) -> None:
        match number % 3:
            case 0:
                frames = self._frames(self._east)
                spoilt = [frame[:-1] + bytes([frame[-1] ^ 1]) for frame in frames]
                assert not await self._east._connection.upload(self._header(self._east), spoilt, 0.0)
            case 1:
                with pytest.raises((TimeoutError, TransportError)):
                    async with asyncio.timeout(0.02):
                        await self._east._connection.upload(self._header(self._east), self._frames(self._east), 60.0)
            case _:
                await self._go_silent()

    async def end(self) -> None:
        """The last half-open links stand for as long as the syncer takes to notice."""
        while self._standing:
            await self._standing.popleft().aclose()

    async def _go_silent(self) -> None:
        """The other learner reconnects over a link that becomes half-open while it sends."""
        if len(self._standing) >= _HALF_OPEN_MAX:
            await self._standing.popleft().aclose()
        standing = AsyncExitStack()
        self._standing.append(standing)
        link = await standing.enter_async_context(LinkProxy(lambda: self._address, Random(1)))
        before = self._west
        west = Learner(grpc_connection(link.address), self._config, before.name, before.values)
        west.incarnation, west.local_step, west.versions = before.incarnation, before.local_step, before.versions
        # What the run began with; a round may have closed since.
        west._initial_digests = before._initial_digests
        self._west = west
        running = asyncio.ensure_future(west.run())  # noqa: TID251
        try:
            await asyncio.wait_for(west.started.wait(), WITHIN_S)
            uploading = asyncio.ensure_future(  # noqa: TID251
                west._connection.upload(self._header(west), self._frames(west), 60.0)
            )
            await asyncio.sleep(0.02)
            link.change(GOOD.having(passage=Passage.LOST))
            uploading.cancel()
            with suppress(asyncio.CancelledError, TransportError):
                await uploading
        finally:
            # Nobody hears it: the link swallows that too.
            await west.leave()
            await running

    def _header(self, learner: Learner) -> ContributionHeader:
        # Other work each time. Neither is merged: a round needs both, and one is always about to go.
        learner.step()
        step = learner.local_step
        header = contribution(
            learner.maths, learner.name, FIRST, step_lo=step - 1, step_hi=step, base=learner.versions[FIRST]
        )
        return dataclasses.replace(header, key=dataclasses.replace(header.key, incarnation=learner.incarnation))

    def _frames(self, learner: Learner) -> list[bytes]:
        payload = small_delta(learner.maths, FIRST, 1)
        return list(pack(payload.codes, payload.scales, chunk_bytes=2**14))


async def poll_status(address: str, wanted: dict[str, bool]) -> None:
    """Wait until the syncer says of each learner whether it is connected, and says this."""
    connected: dict[str, bool] = {}
    while connected != wanted:
        status: Any = await fetch_status(address, WITHIN_S)
        connected = {each["learner_id"]: each["connected"] for each in status["learners"]}


def _holds(process: psutil.Process) -> Counter[str]:
    """How many there are of each sort: what descriptors lead to, without numbers of their own, and threads by name."""
    place = Path("/proc", str(process.pid))
    held: Counter[str] = Counter()
    for link in place.joinpath("fd").iterdir():
        with suppress(OSError):
            held["descriptor: " + re.sub(r"\d+", "", str(link.readlink()))] += 1
    for task in place.joinpath("task").iterdir():
        with suppress(OSError):
            held["thread: " + (task / "comm").read_text().strip()] += 1
    return held


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("warm_up", "failures"), [(9, 30), pytest.param(60, 500, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_failed_cancelled_and_half_open_streams_leave_a_process_as_it_was(tmp_path, warm_up, failures):
    # So many bytes that an upload can be broken off in its middle.
    config = tiny_config(
        run={"tokens": 64 * 100_000},
        model={"dim": 256},
        data={"source": f"text:{write_text_corpus(tmp_path / 'text.txt')}"},
        evaluation={"every_steps": 100_000, "tokens": "500"},
        # The thread that writes them would begin in the midst of it on a slow machine.
        syncer={"snapshot_every": "1h"},
    )
    (tmp_path / "given.json").write_text(config.resolved_json())

    async def noticed(address: str) -> None:
        """The syncer finds the last half-open session by its keepalive, in its own time."""
        async with asyncio.timeout(WITHIN_S):
            await poll_status(address, {"east": True, "west": False})

    async def story(made: Process) -> None:
        address = await made.address()
        process = psutil.Process(made.popen.pid)
        async with learners(config, lambda _: grpc_connection(address)) as (east, west):
            mischief = Mischief(address, config, east, west)
            for number in range(warm_up):
                await mischief.fail(number)
            await noticed(address)
            # Threads are started when they are first needed, and stay.
            before, grown_from = _holds(process), process.memory_info().rss
            for number in range(failures):
                await mischief.fail(number)
            await noticed(address)
            with suppress(TimeoutError):
                async with asyncio.timeout(WITHIN_S):
                    await poll(lambda: not _holds(process) - before)
            assert not _holds(process) - before
            assert process.memory_info().rss - grown_from < _GROWTH_BYTES
            await mischief.end()
            assert made.popen.poll() is None, made.log.read_text()

    async def main() -> None:
        async with syncer_process(tmp_path) as made:
            await story(made)

    asyncio.run(main())
