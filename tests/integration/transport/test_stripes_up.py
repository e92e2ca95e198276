"""Uploads over several connections at once, and what may be under way: over each network, and with every fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.transport import EAST, RecordingHandler, contribution, poll, random_buffers, same, within
from tests.support.transport_words import connected
from tests.support.transport_worlds import LIMITS, Runner, World
from wan_diloco.errors import DeadlineExceeded, TransportError
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.connection import ClientConnection
from wan_diloco.transport.interface import Connection
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.options import ConnectionOptions
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.streams import STRIPE_KEY, ClientStream, Metadata, Method
from wan_diloco.wire.convert import encode_contribution
from wan_diloco.wire.frames import pack

CODES, SCALES = 2_000_000, 62_500
HEADER = contribution(CODES, SCALES)
BUFFERS = random_buffers(CODES, SCALES)
FRAMES = pack(BUFFERS.codes, BUFFERS.scales, chunk_bytes=2**16)
TOTAL = sum(map(len, FRAMES))


class Stream:
    """A call that counts what is written to it, and can go bad."""

    def __init__(self, inside: ClientStream, fault: Callable[[int], None] | None) -> None:
        self.inside = inside
        self.fault = fault
        self.messages = 0

    async def accepted(self) -> Metadata:
        return await self.inside.accepted()

    async def read(self) -> bytes | None:
        return await self.inside.read()

    async def write(self, message: bytes) -> None:
        if self.fault is not None:
            self.fault(self.messages)
        self.messages += 1
        await self.inside.write(message)

    def reason(self) -> str:
        return self.inside.reason()

    def cancel(self) -> None:
        self.inside.cancel()


class Lanes:
    """All upload calls of a connection, by the number of their stripe; the first call of each is 0."""

    def __init__(self, connection: Connection, faults: dict[int, Callable[[int], None]] | None = None) -> None:
        assert isinstance(connection, ClientConnection)
        self.calls: list[tuple[int, int, Stream]] = []
        self._faults = faults or {}
        self._call = connection._dialer.call
        connection._dialer.call = self.open  # type: ignore[method-assign]

    def open(self, method: Method, metadata: Metadata, channel: int = 0) -> ClientStream:
        inside = self._call(method, metadata, channel)
        if method is not Method.UPLOAD:
            return inside
        stripe = int(metadata.get(STRIPE_KEY, 0))
        stream = Stream(inside, self._faults.get(stripe))
        self.calls.append((stripe, channel, stream))
        return stream

    def mend(self) -> None:
        self._faults = {}
        self.calls.clear()

    @property
    def stripes(self) -> list[int]:
        return [stripe for stripe, _, _ in self.calls]


def striped(connection: Connection, faults: dict[int, Callable[[int], None]] | None = None) -> Lanes:
    assert isinstance(connection, ClientConnection)
    connection._options = ConnectionOptions(channels=3)
    connection.set_round_trip(0.1)
    return Lanes(connection, faults)


@pytest.mark.parametrize("unasked", [False, True])
def test_an_upload_goes_over_all_channels_and_each_message_once(run: Runner, *, unasked: bool) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        # The pacer sees to it that no lane is done before the others have begun.
        connection = world.connection(Pacer(4e6))
        await within(connection.connect())
        lanes = striped(connection)
        assert await within(connection.upload(HEADER, FRAMES, 0.0, unasked=unasked))
        assert sorted(lanes.stripes) == [0, 1, 2]
        assert len({channel for _, channel, _ in lanes.calls}) == 3
        assert all(stream.messages > 2 for _, _, stream in lanes.calls)
        ((header, payload, wire_bytes),) = handler.complete
        assert header == HEADER
        assert same(payload, BUFFERS)
        assert wire_bytes == connection.counters.uplink_bytes == TOTAL + 3 * len(encode_contribution(HEADER))
        assert handler.sessions[0].counters.uplink_bytes == wire_bytes
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_one_channel_is_one_call(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        lanes = Lanes(connection)
        connection.set_round_trip(0.0001)
        assert await within(connection.upload(HEADER, FRAMES, 0.0, unasked=True))
        assert lanes.stripes == [0]
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def broken(after: int) -> Callable[[int], None]:
    def fault(messages: int) -> None:
        if messages >= after:
            raise TransportError("this lane is broken")

    return fault


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_what_a_broken_stripe_carried_others_carry(run: Runner, after: int) -> None:
    """Broken at once, before its first message, and among them."""

    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection = world.connection(Pacer(4e6))
        await within(connection.connect())
        lanes = striped(connection, {1: broken(after)})
        assert await within(connection.upload(HEADER, FRAMES, 0.0, unasked=True))
        assert sorted(lanes.stripes) == [0, 1, 2]
        ((_, payload, wire_bytes),) = handler.complete
        assert same(payload, BUFFERS)
        assert wire_bytes <= TOTAL + 5 * 2**16 + 1000
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_a_broken_first_call_breaks_the_upload_which_goes_on_where_it_stopped(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection = world.connection(Pacer(4e6))
        await within(connection.connect())
        lanes = striped(connection, {0: broken(9)})
        with pytest.raises(TransportError, match="this lane is broken"):
            await within(connection.upload(HEADER, FRAMES, 0.0, unasked=True))
        await within(handler.until(lambda: handler.rested == 1))
        before = connection.counters.uplink_bytes
        assert before > 2 * 2**16
        lanes.mend()
        assert await within(connection.upload(HEADER, FRAMES, 0.0))
        ((_, payload, _),) = handler.complete
        assert same(payload, BUFFERS)
        assert connection.counters.uplink_bytes < TOTAL + before, "what had arrived wasn't sent twice"
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_a_stripe_of_nothing_ends(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        assert isinstance(connection, ClientConnection)
        stream = connection._dialer.call(Method.UPLOAD, {**connection._credentials, STRIPE_KEY: "1"})
        await stream.write(encode_contribution(HEADER))
        with pytest.raises(TransportError, match="no upload"):
            await within(stream.read())
        assert handler.offered == []
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


class Line:
    """Virtual time, a link, and a handler."""

    def __init__(self, scenario, *, delay_s: float = 0.05, uplink: float | None = 2e6) -> None:  # type: ignore[no-untyped-def]
        async def main() -> None:
            async with MemoryNetwork(link=Link(delay_s=delay_s, uplink_bytes_per_s=uplink), limits=LIMITS) as network:
                self.handler = RecordingHandler()
                server = network.server(self.handler)
                await server.start()
                self.connection = network.connection(EAST)
                await self.connection.connect()
                await scenario(self)
                await self.connection.close()
                await server.stop(1.0)

        run_virtual(main())


def test_a_stripe_that_goes_silent_is_given_up_and_the_rest_does_not_wait_for_it() -> None:
    async def scenario(line: Line) -> None:
        lanes = striped(line.connection)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            uploading = group.create_task(line.connection.upload(HEADER, FRAMES, 0.0, unasked=True))
            await poll(lambda: len(lanes.calls) == 3 and lanes.calls[1][2].messages > 3)
            silent = lanes.calls[1][2].inside
            silent.silence()  # type: ignore[attr-defined]
            silent_s = loop.time()
        assert uploading.result()
        assert loop.time() - silent_s < 12.0
        ((_, payload, _),) = line.handler.complete
        assert same(payload, BUFFERS)

    Line(scenario)


def test_a_stripe_that_never_connects_is_not_waited_for() -> None:
    async def scenario(line: Line) -> None:
        lanes = striped(line.connection)
        inside = lanes._call

        def open_silently(method: Method, metadata: Metadata, channel: int = 0) -> ClientStream:
            stream = inside(method, metadata, channel)
            if STRIPE_KEY in metadata:
                stream.silence()  # type: ignore[attr-defined]
            return stream

        lanes._call = open_silently
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await line.connection.upload(HEADER, FRAMES, 0.0, unasked=True)
        assert sorted(lanes.stripes) == [0, 1, 2]
        assert loop.time() - began_s == pytest.approx(TOTAL / 2e6 + 0.2, rel=0.1)

    Line(scenario)


def test_a_syncer_that_takes_nothing_holds_one_window_and_the_upload_is_broken_off() -> None:
    async def scenario(line: Line) -> None:
        class Stuck:
            """A sink whose disk does nothing any more."""

            gap, stored_bytes = (0, CODES + SCALES), 0

            async def put(self, message: bytes) -> None:
                await asyncio.Event().wait()

            def rest(self) -> None:
                pass

            def resume(self) -> bool:
                return True

            def abandon(self) -> None:
                pass

        async def offered(session: object, header: object) -> Stuck:
            return Stuck()

        line.handler.upload_offered = offered  # type: ignore[method-assign, assignment]
        line.connection._pacer.set_rate(2e6)
        line.connection.set_round_trip(0.1)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(DeadlineExceeded):
            await line.connection.upload(HEADER, FRAMES, 0.0, unasked=True)
        assert loop.time() - began_s < 12.0
        # Twice the rate times the round trip.
        assert line.connection.counters.uplink_bytes < 400_000 + 1000

    Line(scenario)


@pytest.mark.parametrize("cap", [10e3, 2e6])
def test_a_slow_link_that_makes_progress_is_left_alone(cap: float) -> None:
    """Also one that is two hundred times as slow as it should be. A fixed clock would have ended it."""

    async def scenario(line: Line) -> None:
        line.connection._pacer.set_rate(cap)
        line.connection.set_round_trip(0.1)
        assert await line.connection.upload(HEADER, FRAMES, 0.0, unasked=True)
        assert asyncio.get_running_loop().time() > 180.0

    Line(scenario, uplink=10e3)
