"""What every transport must do with contributions; run over each of them."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.transport import (
    RecordingHandler,
    contribution,
    poll,
    random_buffers,
    same,
    within,
)
from tests.support.transport_words import connected
from tests.support.transport_worlds import Runner, World
from wan_diloco.errors import TransportError
from wan_diloco.protocol.messages import (
    RefusalReason,
)
from wan_diloco.wire.frames import pack


def test_a_contribution_arrives_whole(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        buffers = random_buffers(3_000_001, 46_876)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**18)
        header = contribution(3_000_001, 46_876)
        assert await within(connection.upload(header, frames, 0.0))
        ((got, payload, wire_bytes),) = handler.complete
        assert got == header
        assert same(payload, buffers)
        assert wire_bytes == connection.counters.uplink_bytes == session.counters.uplink_bytes
        assert sum(map(len, frames)) < wire_bytes < sum(map(len, frames)) + 100
        assert await within(connection.upload(contribution(3_000_001, 46_876, step_hi=999), frames, 0.0, unasked=True))
        assert same(handler.complete[1][1], buffers)
        assert sum(map(len, frames)) < handler.complete[1][2] < sum(map(len, frames)) + 100
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_a_small_contribution_costs_little_more_than_its_payload(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        buffers = random_buffers(3350, 106)
        frames = pack(buffers.codes, buffers.scales, zstd=False)
        assert len(frames) == 1
        assert await within(connection.upload(contribution(), frames, 0.0))
        assert connection.counters.uplink_bytes < 3350 + 106 + 120
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_a_refused_contribution_sends_no_payload(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler(accept=False)
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        buffers = random_buffers(3350, 106)
        assert not await within(connection.upload(contribution(), pack(buffers.codes, buffers.scales), 0.0))
        assert len(handler.offered) == 1
        assert connection.counters.uplink_bytes < 100
        # Bytes that come unasked are read and let go.
        big = random_buffers(300_000, 106)
        frames = pack(big.codes, big.scales, chunk_bytes=2**14)
        assert not await within(connection.upload(contribution(300_000, 106), frames, 0.0, unasked=True))
        assert not handler.complete
        assert not handler.failed
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_an_empty_contribution_arrives(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        assert await within(connection.upload(contribution(0, 0), [], 0.0))
        assert len(handler.complete) == 1
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_a_contribution_beyond_the_limit_fails_without_taking_memory(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        assert not await within(connection.upload(contribution(2**50, 0), [], 0.0))
        assert [reason for reason, _ in handler.failed] == [RefusalReason.WRONG_LENGTH]
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def damage(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


def test_a_contribution_damaged_for_good_fails_with_its_reason(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        buffers = random_buffers(100_000, 106)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**14)
        frames[3] = damage(frames[3])
        assert not await within(connection.upload(contribution(100_000, 106), frames, 0.0))
        assert [reason for reason, _ in handler.failed] == [RefusalReason.BAD_CHECKSUM]
        assert not handler.complete
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_a_chunk_damaged_on_the_way_is_asked_for_again(run: Runner) -> None:
    class Flaky(list[bytes]):
        """Frames of which some are bad, each the first time it is looked at."""

        def __init__(self, frames: list[bytes]) -> None:
            super().__init__(frames)
            self.bad = {1, 2, 5}

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            frame = super().__getitem__(index)
            if index not in self.bad:
                return frame
            self.bad.discard(index)
            return damage(frame)

    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        buffers = random_buffers(100_000, 106)
        frames = Flaky(pack(buffers.codes, buffers.scales, chunk_bytes=2**14))
        assert await within(connection.upload(contribution(100_000, 106), frames, 0.0))
        assert same(handler.complete[0][1], buffers)
        again = sum(len(frame) for index, frame in enumerate(frames) if index in (1, 2, 5))
        assert connection.counters.uplink_bytes < sum(map(len, frames)) + again + 100
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_a_cancelled_upload_goes_on_where_it_stopped_on_a_new_connection(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        buffers = random_buffers(1_000_000, 106)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**16)
        header = contribution(1_000_000, 106)
        half = sum(map(len, frames)) // 2
        async with asyncio.TaskGroup() as group:
            # Spread so that it can't be over before it is cancelled.
            uploading = group.create_task(connection.upload(header, frames, 3.0))
            await within(poll(lambda: session.counters.uplink_bytes >= half))
            uploading.cancel()
        await within(connection.close())
        await within(handler.until(lambda: len(handler.ended) == 1))
        connection, session = await connected(world, handler)
        assert await within(connection.upload(header, frames, 0.0))
        assert session.counters.uplink_bytes < half + 2**17
        assert same(handler.complete[0][1], buffers)
        assert handler.complete[0][2] < sum(map(len, frames)) + 2**17
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_uploads_of_a_session_are_bounded(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        buffers = random_buffers(100_000, 0)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**14)
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(connection.upload(contribution(100_000, 0, step_hi=step_hi), frames, 1000.0))
                for step_hi in (101, 102)
            ]
            await within(handler.until(lambda: len(handler.offered) == 2))
            with pytest.raises(TransportError, match="2 uploads"):
                await within(connection.upload(contribution(100_000, 0, step_hi=103), frames, 0.0))
            assert [reason for reason, _ in handler.refusals] == [RefusalReason.TOO_MANY_CALLS]
            for task in running:
                task.cancel()
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)
