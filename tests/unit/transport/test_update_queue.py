"""Updates leave in an even stream, each in time, and nobody who is in a hurry waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.transport import random_buffers, update
from wan_diloco.errors import TransportError
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.interface import Counters
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.update_sender import UpdateQueue
from wan_diloco.wire.frames import pack

CHUNK = 10_000


class Wire:
    """The serving end of a download call that notes when what left."""

    def __init__(self) -> None:
        self.left: list[tuple[float, int]] = []

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def write(self, message: bytes) -> None:
        self.left.append((asyncio.get_running_loop().time(), len(message)))


class Scene:
    """A queue that is served."""

    def __init__(self, group: asyncio.TaskGroup, pacer: Pacer | None = None) -> None:
        self.wire = Wire()
        self.queue = UpdateQueue(pacer or Pacer(), Counters(), 100)
        self.group = group
        group.create_task(self.queue.serve(self.wire, is_first=True))  # type: ignore[arg-type]  # it only reads and writes

    def send(self, chunks: int, spread_s: float) -> asyncio.Task[None]:
        buffers = random_buffers(chunks * CHUNK, 0)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=CHUNK)
        return self.group.create_task(self.queue.send(update((chunks * CHUNK, 0)), [frames], spread_s))

    @property
    def times_s(self) -> list[float]:
        """When each message of bulk left; headers don't count."""
        return [at_s for at_s, size in self.wire.left if size > 1000]


def run(story: Coroutine[Any, Any, None]) -> None:
    run_virtual(story)


def test_an_update_is_spread_evenly_over_its_time() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            scene = Scene(group)
            await scene.send(10, 2.0)
            assert scene.times_s == pytest.approx([0.2 * index for index in range(10)], abs=0.02)
            scene.queue.end("done")

    run(story())


def test_two_at_once_share_the_time_and_both_are_there_at_its_end() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            scene = Scene(group)
            first, second = scene.send(5, 2.0), scene.send(5, 2.0)
            await first
            await second
            gaps = [later - earlier for earlier, later in zip(scene.times_s, scene.times_s[1:], strict=False)]
            assert gaps == pytest.approx([0.2] * 9, abs=0.02)
            scene.queue.end("done")

    run(story())


def test_one_in_a_hurry_pushes_what_is_before_it() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            scene = Scene(group)
            first = scene.send(10, 10.0)
            await asyncio.sleep(2.5)
            assert len(scene.times_s) == 3
            await scene.send(1, 0.0)
            assert asyncio.get_running_loop().time() == pytest.approx(2.5)
            await first
            scene.queue.end("done")

    run(story())


def test_a_small_update_does_not_wait_at_all() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            scene = Scene(group)
            await scene.send(1, 5.0)
            assert asyncio.get_running_loop().time() < 0.5
            scene.queue.end("done")

    run(story())


def test_the_end_of_a_session_is_not_waited_for() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            scene = Scene(group)
            buffers = random_buffers(10 * CHUNK, 0)
            frames = pack(buffers.codes, buffers.scales, chunk_bytes=CHUNK)
            asyncio.get_running_loop().call_later(1.0, scene.queue.end, "gone")
            with pytest.raises(TransportError, match="gone"):
                await scene.queue.send(update((10 * CHUNK, 0)), [frames], 100.0)
            assert asyncio.get_running_loop().time() < 2.0

    run(story())
