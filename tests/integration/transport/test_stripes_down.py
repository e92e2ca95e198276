"""Updates over several connections at once, and what may be under way: over each network, and with every fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.transport import EAST, RecordingHandler, poll, random_buffers, same, update, within
from tests.support.transport_words import connected
from tests.support.transport_worlds import LIMITS, Runner, World
from wan_diloco.errors import TransportError
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.connection import ClientConnection
from wan_diloco.transport.interface import Connection, Session
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.options import ConnectionOptions
from wan_diloco.transport.streams import STRIPE_KEY, ClientStream, Metadata, Method
from wan_diloco.wire.frames import pack

CODES, SCALES = 2_000_000, 62_500
BUFFERS = random_buffers(CODES, SCALES)
FRAMES = pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16)
SMALL = random_buffers(70_000, 2)
SMALL_FRAMES = pack(SMALL.codes, SMALL.scales, chunk_bytes=2**14)


class Stream:
    """A download call that counts what is read from it, and can go bad."""

    def __init__(self, inside: ClientStream, fault: Callable[[int], None] | None) -> None:
        self.inside = inside
        self.fault = fault
        self.messages = 0

    async def accepted(self) -> Metadata:
        return await self.inside.accepted()

    async def read(self) -> bytes | None:
        if self.fault is not None:
            self.fault(self.messages)
        message = await self.inside.read()
        self.messages += 1
        return message

    async def write(self, message: bytes) -> None:
        await self.inside.write(message)

    def reason(self) -> str:
        return self.inside.reason()

    def cancel(self) -> None:
        self.inside.cancel()


def broken(after: int) -> Callable[[int], None]:
    def fault(messages: int) -> None:
        if messages >= after:
            raise TransportError("this lane is broken")

    return fault


@contextlib.asynccontextmanager
async def striped(
    connection: Connection, faults: dict[int, Callable[[int], None]] | None = None
) -> AsyncIterator[dict[int, Stream]]:
    """Keep three download calls; the streams of the stripes, by their numbers."""
    assert isinstance(connection, ClientConnection)
    streams: dict[int, Stream] = {}
    call = connection._dialer.call

    def opened(method: Method, metadata: Metadata, channel: int = 0) -> ClientStream:
        inside = call(method, metadata, channel)
        if method is not Method.DOWNLOAD:
            return inside
        stripe = int(metadata[STRIPE_KEY])
        assert channel == stripe
        stream = Stream(inside, (faults or {}).get(stripe))
        # The first of each: a broken one is tried again after a while.
        streams.setdefault(stripe, stream)
        return stream

    connection._dialer.call = opened  # type: ignore[method-assign]
    connection._options = ConnectionOptions(channels=3)
    connection.set_round_trip(0.1)
    async with asyncio.TaskGroup() as group:
        maintaining = group.create_task(lost(connection))
        await poll(lambda: len(streams) == 2)
        yield streams
        maintaining.cancel()


async def lost(connection: Connection) -> None:
    with contextlib.suppress(TransportError):
        await connection.maintain()


def attached(session: Session) -> int:
    return session._updates._lanes  # type: ignore[attr-defined, no-any-return]


def test_updates_go_over_all_channels_and_arrive_in_the_order_announced(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        # A rate, so that no lane is done before the others have begun; and small windows, so that all get a part.
        session.set_downlink_rate(8e6)
        session.set_round_trip(0.02)
        async with striped(connection) as streams, asyncio.TaskGroup() as group:
            await within(poll(lambda: attached(session) == 3))
            for fragment_id in range(4):
                header = update((CODES, SCALES), (0, 0), fragment_id=fragment_id)
                group.create_task(session.send_update(header, [FRAMES, []]))
                header = update((70_000, 2), fragment_id=10 + fragment_id)
                group.create_task(session.send_update(header, [SMALL_FRAMES]))
            updates = connection.updates()
            for fragment_id in range(4):
                header, segments = await within(anext(updates))
                assert header.fragment_id == fragment_id
                assert same(segments[0], BUFFERS)
                header, segments = await within(anext(updates))
                assert header.fragment_id == 10 + fragment_id
                assert same(segments[0], SMALL)
            assert all(stream.messages > 8 for stream in streams.values())
        assert connection.counters.downlink_bytes == session.counters.downlink_bytes
        total = 4 * (sum(map(len, FRAMES)) + sum(map(len, SMALL_FRAMES)))
        assert total < session.counters.downlink_bytes < 1.01 * total, "each message once"
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_what_a_broken_stripe_carried_others_carry(run: Runner, after: int) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        session.set_downlink_rate(8e6)
        session.set_round_trip(0.02)
        async with striped(connection, {1: broken(after)}) as streams, asyncio.TaskGroup() as group:
            if after:
                await within(poll(lambda: attached(session) == 3))
            for fragment_id in range(3):
                header = update((CODES, SCALES), fragment_id=fragment_id)
                group.create_task(session.send_update(header, [FRAMES]))
            updates = connection.updates()
            for fragment_id in range(3):
                header, (got,) = await within(anext(updates))
                assert header.fragment_id == fragment_id
                assert same(got, BUFFERS)
            assert streams[1].messages == after
            assert streams[2].messages > 5
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_the_first_call_alone_does(run: Runner) -> None:
    """A link whose round trip is short, or not known, has no stripes."""

    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        connection.set_round_trip(0.0001)
        async with asyncio.TaskGroup() as group:
            maintaining = group.create_task(lost(connection))
            group.create_task(session.send_update(update((CODES, SCALES)), [FRAMES]))
            _, (got,) = await within(anext(connection.updates()))
            assert same(got, BUFFERS)
            assert attached(session) == 1
            await within(connection.close())
            await within(maintaining)
        await within(server.stop(1.0))

    run(scenario)


class Line:
    """Virtual time, a link, and a handler."""

    def __init__(self, scenario, *, delay_s: float = 0.05, downlink: float | None = 2e6) -> None:  # type: ignore[no-untyped-def]
        async def main() -> None:
            link = Link(delay_s=delay_s, downlink_bytes_per_s=downlink)
            async with MemoryNetwork(link=link, limits=LIMITS) as network:
                self.handler = RecordingHandler()
                server = network.server(self.handler)
                await server.start()
                self.connection = network.connection(EAST)
                await self.connection.connect()
                await self.handler.until(lambda: bool(self.handler.sessions))
                self.session = self.handler.sessions[0]
                await scenario(self)
                await self.connection.close()
                await server.stop(1.0)

        run_virtual(main())


def test_a_stripe_that_goes_silent_is_given_up_and_later_updates_wait_for_nothing_else() -> None:
    async def scenario(line: Line) -> None:
        loop = asyncio.get_running_loop()
        line.session.set_downlink_rate(2e6)
        line.session.set_round_trip(0.1)
        async with striped(line.connection) as streams, asyncio.TaskGroup() as group:
            await poll(lambda: attached(line.session) == 3)
            for fragment_id in range(3):
                group.create_task(line.session.send_update(update((CODES, SCALES), fragment_id=fragment_id), [FRAMES]))
            updates = line.connection.updates()
            reading = group.create_task(anext(updates))
            await poll(lambda: streams[1].messages > 3)
            streams[1].inside.silence()  # type: ignore[attr-defined]
            silent_s = loop.time()
            assert same((await reading)[1][0], BUFFERS)
            for _ in range(2):
                _, (got,) = await anext(updates)
                assert same(got, BUFFERS)
            assert loop.time() - silent_s < 15.0

    Line(scenario)


def test_a_learner_that_reads_nothing_is_sent_one_window_and_its_session_ends() -> None:
    async def scenario(line: Line) -> None:
        loop = asyncio.get_running_loop()
        line.session.set_downlink_rate(2e6)
        line.session.set_round_trip(0.1)
        began_s = loop.time()
        with pytest.raises(TransportError):
            await line.session.send_update(update((CODES, SCALES)), [FRAMES])
        assert loop.time() - began_s < 12.0
        # Twice the rate times the round trip.
        assert line.session.counters.downlink_bytes < 400_000 + 1000
        await line.handler.until(lambda: bool(line.handler.ended))

    Line(scenario)


@pytest.mark.parametrize("cap", [10e3, 2e6])
def test_a_slow_link_that_makes_progress_is_left_alone(cap: float) -> None:
    """Also one that is two hundred times as slow as it should be."""

    async def scenario(line: Line) -> None:
        line.session.set_downlink_rate(cap)
        line.session.set_round_trip(0.1)
        async with asyncio.TaskGroup() as group:
            group.create_task(line.session.send_update(update((CODES, SCALES)), [FRAMES]))
            _, (got,) = await anext(line.connection.updates())
        assert same(got, BUFFERS)
        assert asyncio.get_running_loop().time() > 180.0

    Line(scenario, downlink=10e3)


def test_an_update_spread_over_minutes_is_left_alone() -> None:
    async def scenario(line: Line) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(line.session.send_update(update((CODES, SCALES)), [FRAMES], 300.0))
            _, (got,) = await anext(line.connection.updates())
        assert same(got, BUFFERS)
        assert asyncio.get_running_loop().time() > 250.0

    Line(scenario)
