"""The memory network keeps the times of its links, breaks them when told, and repeats itself exactly."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from tests.support.transport import EAST, RecordingHandler, contribution, hello, random_buffers, same, update
from wan_diloco.errors import ConfigError, PeerUnavailable, TransportError
from wan_diloco.protocol.messages import Acknowledged, Goodbye, SyncerMessage
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.connection import ClientConnection
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.options import ConnectionOptions, ServerLimits
from wan_diloco.units import FragmentId, LearnerId, LocalStep
from wan_diloco.wire.frames import pack


def now_s() -> float:
    return asyncio.get_running_loop().time()


def acknowledged(step_hi: int) -> Acknowledged:
    return Acknowledged(fragment_id=FragmentId(1), step_lo=LocalStep(0), step_hi=LocalStep(step_hi))


async def joined(network: MemoryNetwork) -> tuple[ClientConnection, RecordingHandler]:
    handler = RecordingHandler()
    await network.server(handler).start()
    connection = network.connection(EAST)
    await connection.connect()
    return connection, handler


def test_messages_take_the_delay_of_the_link() -> None:
    async def main() -> None:
        async with MemoryNetwork(links={EAST: Link(delay_s=0.25)}) as network:
            connection, handler = await joined(network)
            assert now_s() == 0.5
            connection.send(hello())
            await handler.until(lambda: bool(handler.heard))
            assert now_s() == 0.75
            handler.sessions[0].send(acknowledged(1))
            assert await anext(connection.messages()) == acknowledged(1)
            assert now_s() == 1.0
            network.set_link(EAST, Link(delay_s=2.0))
            connection.send(hello())
            await handler.until(lambda: len(handler.heard) == 2)
            assert now_s() == 3.0

    run_virtual(main())


def test_bulk_takes_the_time_of_its_bytes_and_control_does_not_wait_for_it() -> None:
    async def main() -> None:
        link = Link(delay_s=0.1, uplink_bytes_per_s=1e6, downlink_bytes_per_s=2e6)
        async with MemoryNetwork(link=link) as network:
            connection, handler = await joined(network)
            buffers = random_buffers(1_000_000, 0)
            frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**16)
            async with asyncio.TaskGroup() as group:
                began_s = now_s()
                uploading = group.create_task(connection.upload(contribution(1_000_000, 0), frames, 0.0))
                await asyncio.sleep(0.5)
                connection.send(hello())
                await handler.until(lambda: bool(handler.heard))
                assert now_s() - began_s == pytest.approx(0.6, abs=0.001)
                await uploading
            # Header, go, bytes, done.
            assert now_s() - began_s == pytest.approx(4 * 0.1 + 1.0, abs=0.01)
            began_s = now_s()
            again = contribution(1_000_000, 0, step_hi=999)
            assert await connection.upload(again, frames, 0.0, unasked=True)
            # Header and bytes, done.
            assert now_s() - began_s == pytest.approx(2 * 0.1 + 1.0, abs=0.01)
            assert same(handler.complete[-1][1], buffers)
            began_s = now_s()
            async with asyncio.TaskGroup() as group:
                group.create_task(handler.sessions[0].send_update(update((1_000_000, 0)), [frames]))
                _, (got,) = await anext(connection.updates())
            assert same(got, buffers)
            assert now_s() - began_s == pytest.approx(0.6, abs=0.01)

    run_virtual(main())


def test_a_cut_is_noticed_after_a_while_loses_what_was_under_way_and_can_be_mended() -> None:
    async def main() -> None:
        async with MemoryNetwork(link=Link(delay_s=0.1)) as network:
            connection, handler = await joined(network)
            connection.send(Goodbye(reason="under way"))
            await asyncio.sleep(0.05)
            began_s = now_s()
            network.cut(EAST, noticed_after_s=7.0)
            handler.sessions[0].send(acknowledged(1))
            with pytest.raises(TransportError, match="cut"):
                await anext(connection.messages())
            assert now_s() - began_s == 7.0
            await handler.until(lambda: bool(handler.ended))
            assert handler.heard == []
            with pytest.raises(PeerUnavailable, match="cut"):
                await network.connection(EAST).connect()
            other = network.connection(LearnerId("eu-west"))
            await other.connect()
            network.restore(EAST)
            again = network.connection(EAST)
            await again.connect()
            handler.sessions[-1].send(acknowledged(2))
            assert await anext(again.messages()) == acknowledged(2)

    run_virtual(main())


def test_an_upload_broken_by_a_cut_goes_on_where_it_stopped() -> None:
    async def main() -> None:
        async with MemoryNetwork(link=Link(delay_s=0.1, uplink_bytes_per_s=1e6)) as network:
            connection, handler = await joined(network)
            buffers = random_buffers(2_000_000, 0)
            frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**16)
            header = contribution(2_000_000, 0)
            async with asyncio.TaskGroup() as group:
                group.create_task(fails(connection, header, frames))
                await asyncio.sleep(1.0)
                network.cut(EAST)
            assert not handler.failed
            network.restore(EAST)
            connection = network.connection(EAST)
            await connection.connect()
            began_s = now_s()
            assert await connection.upload(header, frames, 0.0)
            assert now_s() - began_s < 1.8
            assert same(handler.complete[0][1], buffers)

    run_virtual(main())


async def fails(connection: ClientConnection, header, frames) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TransportError):
        await connection.upload(header, frames, 0.0)


def test_broken_uploads_are_kept_within_bounds() -> None:
    async def main() -> None:
        limits = ServerLimits(partials_max=2)
        async with MemoryNetwork(link=Link(delay_s=0.01, uplink_bytes_per_s=1e6), limits=limits) as network:
            connection, handler = await joined(network)
            buffers = random_buffers(300_000, 0)
            frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**16)
            headers = [contribution(300_000, 0, step_hi=step_hi) for step_hi in (101, 102, 103)]
            for header in headers:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.25):
                        await connection.upload(header, frames, 0.0)
                await asyncio.sleep(0.1)
            costs = []
            for header in reversed(headers):
                before = connection.counters.uplink_bytes
                assert await connection.upload(header, frames, 0.0)
                costs.append(connection.counters.uplink_bytes - before)
            # The two newest are resumed, the oldest starts again.
            assert costs[0] < 200_000
            assert costs[1] < 200_000
            assert costs[2] > 300_000
            assert len(handler.complete) == 3

    run_virtual(main())


def test_a_broken_upload_whose_bytes_were_let_go_of_begins_again() -> None:
    async def main() -> None:
        async with MemoryNetwork(link=Link(delay_s=0.01, uplink_bytes_per_s=1e6)) as network:
            connection, handler = await joined(network)
            buffers = random_buffers(300_000, 0)
            frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**16)
            header = contribution(300_000, 0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.25):
                    await connection.upload(header, frames, 0.0)
            await handler.until(lambda: handler.rested == 1)
            handler.sinks[0].kept = False
            before = connection.counters.uplink_bytes
            assert await connection.upload(header, frames, 0.0)
            assert connection.counters.uplink_bytes - before > 300_000
            assert same(handler.complete[0][1], buffers)

    run_virtual(main())


def test_exactly_the_message_named_is_dropped() -> None:
    async def main() -> None:
        async with MemoryNetwork() as network:
            connection, handler = await joined(network)
            network.drop_next(EAST, lambda message: isinstance(message, Acknowledged) and message.step_hi == 2)
            network.drop_next(EAST, lambda message: isinstance(message, Goodbye))
            for step_hi in (1, 2, 2, 3):
                handler.sessions[0].send(acknowledged(step_hi))
            messages = connection.messages()
            assert [(await anext(messages)) for _ in range(3)] == [acknowledged(hi) for hi in (1, 2, 3)]
            connection.send(Goodbye(reason="lost"))
            connection.send(Goodbye(reason="found"))
            await handler.until(lambda: bool(handler.heard))
            assert handler.heard == [Goodbye(reason="found")]

    run_virtual(main())


def test_a_crashed_server_says_nothing_and_another_may_take_its_place() -> None:
    async def main() -> None:
        async with MemoryNetwork(link=Link(delay_s=0.1)) as network:
            handler = RecordingHandler()
            server = network.server(handler)
            await server.start()
            with pytest.raises(ConfigError):
                await network.server(handler).start()
            connection = network.connection(EAST)
            await connection.connect()
            handler.sessions[0].send(acknowledged(1))
            await server.crash()
            with pytest.raises(TransportError, match="gone"):
                await anext(connection.messages())
            assert len(handler.ended) == 1
            successor = RecordingHandler()
            await network.server(successor).start()
            await network.connection(EAST).connect()
            assert len(successor.sessions) == 1

    run_virtual(main())


def test_a_peer_that_does_not_read_is_cut_off() -> None:
    async def main() -> None:
        limits, options = ServerLimits(outbox_max=50), ConnectionOptions(outbox_max=50)
        async with MemoryNetwork(link=Link(delay_s=0.1), limits=limits, options=options) as network:
            connection, handler = await joined(network)
            for step_hi in range(2000):
                handler.sessions[0].send(acknowledged(step_hi))
                await asyncio.sleep(0)
            with contextlib.suppress(TransportError):
                async for _ in connection.messages():
                    pass
            await handler.until(lambda: bool(handler.ended))
            assert "doesn't read" in handler.ended[0]

            connection = network.connection(EAST)
            await connection.connect()
            for _ in range(51):
                connection.send(hello())
            with pytest.raises(TransportError, match="doesn't read"):
                await anext(connection.messages())

    run_virtual(main())


def test_a_learner_that_talks_nonsense_is_cut_off() -> None:
    async def main() -> None:
        async with MemoryNetwork() as network:
            connection, handler = await joined(network)
            # Past the conversion, as a hostile peer would.
            connection._outbox.put("nonsense", b"\xff\xff\xff")
            with pytest.raises(TransportError, match="makes no sense"):
                await anext(connection.messages())
            await handler.until(lambda: bool(handler.ended))
            assert "makes no sense" in handler.ended[0]

    run_virtual(main())


def story(seed: int) -> list[object]:
    """A busy minute over jittery links, written down with its times."""
    told: list[object] = []

    async def listen(connection: ClientConnection) -> None:
        with contextlib.suppress(TransportError):
            async for message in connection.messages():
                told.append((now_s(), message))  # noqa: PERF401 - the stream ends by raising

    async def main() -> None:
        link = Link(delay_s=0.05, jitter_s=0.04, uplink_bytes_per_s=1e6, downlink_bytes_per_s=1e6)
        async with MemoryNetwork(link=link, seed=seed) as network:
            handler = RecordingHandler()
            server = network.server(handler)
            await server.start()
            connections = [network.connection(LearnerId(name)) for name in ("a", "b", "c")]
            async with asyncio.TaskGroup() as group:
                for index, connection in enumerate(connections):
                    await connection.connect()
                    group.create_task(listen(connection))
                    buffers = random_buffers(200_000, 10, seed=index)
                    frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**15)
                    group.create_task(connection.upload(contribution(200_000, 10, step_hi=200 + index), frames, 0.1))
                for step_hi in range(30):
                    for session in handler.sessions:
                        session.send(acknowledged(step_hi))
                    await asyncio.sleep(0.03)
                await asyncio.sleep(1)
                await server.stop(1.0)
            told.extend((header, int(np.sum(payload.codes, dtype=np.int64))) for header, payload, _ in handler.complete)

    run_virtual(main())
    return told


def test_a_run_repeats_itself_to_the_bit_and_another_seed_differs() -> None:
    first = story(1)
    assert len(first) == 93
    assert story(1) == first
    assert story(2) != first


@pytest.mark.parametrize("wrong", [{"delay_s": -1.0}, {"jitter_s": -1.0}, {"uplink_bytes_per_s": 0.0}])
def test_links_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no link"):
        Link(**wrong)


def test_order_is_kept_under_jitter() -> None:
    async def main() -> None:
        async with MemoryNetwork(link=Link(delay_s=0.05, jitter_s=1.0)) as network:
            connection, handler = await joined(network)
            messages = connection.messages()
            for step_hi in range(50):
                handler.sessions[0].send(acknowledged(step_hi))
                await asyncio.sleep(0.001)
            got: list[SyncerMessage] = [await anext(messages) for _ in range(50)]
            assert got == [acknowledged(step_hi) for step_hi in range(50)]

    run_virtual(main())
