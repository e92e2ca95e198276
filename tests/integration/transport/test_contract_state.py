"""A state from one learner to another through a syncer, over each transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.transport import RecordingHandler, poll, random_bytes, within
from tests.support.transport_words import collect, connected, pace, report
from tests.support.transport_worlds import Runner, World
from wan_diloco.errors import TransportError
from wan_diloco.protocol.messages import SyncerMessage
from wan_diloco.transport.interface import Connection, SyncerServer
from wan_diloco.transport.pacer import Pacer
from wan_diloco.units import TransferId

if TYPE_CHECKING:
    from numpy.typing import NDArray

T1, T2 = TransferId(1), TransferId(2)
ROW = random_bytes(5_000_001, seed=4)


class Sink:
    """A row as far as it came; may spoil the line after so many bytes."""

    def __init__(self, size_bytes: int = ROW.size) -> None:
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self.row: NDArray[np.uint8] = np.zeros(size_bytes, np.uint8)
        self.reached = asyncio.Event()
        self.stop_at: int | None = None

    def put(self, raw: NDArray[np.uint8]) -> None:
        self.row[self.received_bytes : self.received_bytes + raw.size] = raw
        self.received_bytes += raw.size
        if self.stop_at is not None and self.received_bytes >= self.stop_at:
            self.reached.set()


class Pair:
    """A donor and a joiner, connected."""

    def __init__(self, handler: RecordingHandler, server: SyncerServer, donor: Connection, joiner: Connection) -> None:
        self.handler = handler
        self.server = server
        self.donor = donor
        self.joiner = joiner

    def allow(self, transfer: TransferId) -> None:
        self.handler.relays[transfer, True] = self.handler.sessions[0]
        self.handler.relays[transfer, False] = self.handler.sessions[1]

    async def close(self) -> None:
        await within(self.donor.close())
        await within(self.joiner.close())
        await within(self.server.stop(1.0))


async def pair(world: World, pacer: Pacer | None = None) -> Pair:
    handler = RecordingHandler()
    server = await world.start(handler)
    donor = world.connection(pacer)
    await within(donor.connect())
    await within(handler.until(lambda: len(handler.sessions) == 1))
    joiner, _ = await connected(world, handler)
    return Pair(handler, server, donor, joiner)


async def fails(work: Awaitable[None]) -> str:
    with pytest.raises(TransportError) as caught:
        await within(work)
    return str(caught.value)


@pytest.mark.parametrize("first", ["donor", "joiner"])
def test_a_state_arrives_whoever_comes_first(run: Runner, first: str) -> None:
    async def scenario(world: World) -> None:
        both = await pair(world)
        both.allow(T1)
        sink = Sink()
        work = {"donor": both.donor.give_state(T1, ROW), "joiner": both.joiner.take_state(T1, sink)}
        second = "joiner" if first == "donor" else "donor"
        async with asyncio.TaskGroup() as group:
            group.create_task(within(work[first]))
            for _ in range(20):
                await asyncio.sleep(0)
            group.create_task(within(work[second]))
        assert np.array_equal(sink.row, ROW)
        sessions = both.handler.sessions
        assert sessions[0].counters.uplink_bytes == both.donor.counters.uplink_bytes > ROW.size
        assert sessions[1].counters.downlink_bytes == both.joiner.counters.downlink_bytes > ROW.size
        await both.close()

    run(scenario)


def test_what_broke_goes_on_where_it_stopped(run: Runner) -> None:
    async def scenario(world: World) -> None:
        both = await pair(world, Pacer(4e6))
        both.allow(T1)
        both.allow(T2)
        sink = Sink()
        sink.stop_at = ROW.size // 2
        async with asyncio.TaskGroup() as group:
            giving = group.create_task(both.donor.give_state(T1, ROW))
            taking = group.create_task(fails(both.joiner.take_state(T1, sink)))
            await within(sink.reached.wait())
            giving.cancel()
            await taking
        sent = both.donor.counters.uplink_bytes
        assert sink.stop_at <= sink.received_bytes < sink.size_bytes
        missing = sink.size_bytes - sink.received_bytes
        async with asyncio.TaskGroup() as group:
            group.create_task(within(both.donor.give_state(T2, ROW)))
            group.create_task(within(both.joiner.take_state(T2, sink)))
        assert np.array_equal(sink.row, ROW)
        assert missing <= both.donor.counters.uplink_bytes - sent < missing + 100_000
        await both.close()

    run(scenario)


def test_a_taker_that_goes_ends_the_giving(run: Runner) -> None:
    async def scenario(world: World) -> None:
        both = await pair(world, Pacer(4e6))
        both.allow(T1)
        sink = Sink()
        sink.stop_at = 1
        async with asyncio.TaskGroup() as group:
            giving = group.create_task(fails(both.donor.give_state(T1, ROW)))
            taking = group.create_task(both.joiner.take_state(T1, sink))
            await within(sink.reached.wait())
            taking.cancel()
            await giving
        await both.close()

    run(scenario)


def test_a_donor_whose_connection_dies_ends_the_taking(run: Runner) -> None:
    async def scenario(world: World) -> None:
        both = await pair(world, Pacer(4e6))
        both.allow(T1)
        sink = Sink()
        sink.stop_at = ROW.size // 10
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(both.donor.give_state(T1, ROW)))
            taking = group.create_task(fails(both.joiner.take_state(T1, sink)))
            await within(sink.reached.wait())
            await both.donor.close()
            await taking
        await both.close()

    run(scenario)


def test_nobody_gives_or_takes_what_isnt_theirs(run: Runner) -> None:
    async def scenario(world: World) -> None:
        both = await pair(world)
        both.allow(T1)
        assert "no transfer" in await fails(both.joiner.give_state(T1, ROW))
        assert "no transfer" in await fails(both.donor.take_state(T1, Sink()))
        assert "no transfer" in await fails(both.joiner.take_state(T2, Sink()))
        await both.close()

    run(scenario)


def test_a_row_of_another_length_is_not_taken(run: Runner) -> None:
    async def scenario(world: World) -> None:
        both = await pair(world)
        both.allow(T1)
        async with asyncio.TaskGroup() as group:
            group.create_task(_either(both.donor.give_state(T1, ROW)))
            await fails(both.joiner.take_state(T1, Sink(ROW.size - 1)))
        both.allow(T2)
        async with asyncio.TaskGroup() as group:
            group.create_task(_either(both.donor.give_state(T2, ROW)))
            await fails(both.joiner.take_state(T2, Sink(ROW.size + 1)))
        # Nobody's session ends for that: both are heard, and hear.
        for index, connection in enumerate((both.donor, both.joiner)):
            came: list[SyncerMessage] = []
            async with asyncio.TaskGroup() as group:
                hearing = group.create_task(collect(connection, came))
                connection.send(report(index))
                await within(both.handler.until(lambda number=index: len(both.handler.heard) > number))
                both.handler.sessions[index].send(pace(index))
                await within(poll(lambda heard=came: bool(heard)))
                hearing.cancel()
            assert came == [pace(index)]
        assert not both.handler.ended
        await both.close()

    run(scenario)


async def _either(work: Awaitable[None]) -> None:
    with suppress(TransportError):
        await within(work)
