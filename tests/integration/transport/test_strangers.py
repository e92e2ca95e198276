"""Calls of those who are no learners: bounded, counted with a reason, and never in a learner's way."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.transport import EAST, RecordingHandler, hello, within
from tests.support.transport_worlds import Runner, World
from wan_diloco.errors import PeerUnavailable, TransportError
from wan_diloco.protocol.messages import RefusalReason, ResyncRequest
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.interface import Connection
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.options import ServerLimits
from wan_diloco.units import FragmentId


async def end_of(connection: Connection) -> str:
    """Why a connection ended."""
    try:
        async for _ in connection.messages():
            pass
    except TransportError as problem:
        return str(problem)
    raise AssertionError("messages end by raising")


def test_a_call_without_a_hello_ends_after_a_while_and_one_with_it_does_not() -> None:
    async def main() -> None:
        limits = ServerLimits(hello_timeout_s=5.0)
        async with MemoryNetwork(link=Link(delay_s=0.1), limits=limits) as network:
            handler = RecordingHandler()
            server = network.server(handler)
            await server.start()
            polite, silent = network.connection(EAST), network.connection(EAST)
            await polite.connect()
            polite.send(hello())
            await silent.connect()
            assert "no Hello within 5 s" in await end_of(silent)
            assert asyncio.get_running_loop().time() == pytest.approx(0.2 + 0.1 + 5.0 + 0.1, abs=0.2)
            assert handler.refusals == [(RefusalReason.NO_HELLO, "no Hello within 5 s")]
            await asyncio.sleep(100.0)
            assert len(handler.ended) == 1
            await server.stop(1.0)

    run_virtual(main())


def test_silent_calls_keep_no_learner_out(run: Runner) -> None:
    """The world has room for three sessions."""

    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        learner = world.connection()
        await within(learner.connect())
        learner.send(hello())
        await within(handler.until(lambda: bool(handler.heard)))
        silent = [world.connection() for _ in range(2)]
        for connection in silent:
            await within(connection.connect())
        another = world.connection()
        await within(another.connect())
        another.send(hello("eu-west"))
        await within(handler.until(lambda: len(handler.heard) == 2))
        assert "another needs its place" in await within(end_of(silent[0]))
        assert [reason for reason, _ in handler.refusals] == [RefusalReason.NO_HELLO]
        assert len(handler.ended) == 1, "the oldest silent one went, and nobody else"
        third = world.connection()
        await within(third.connect())
        third.send(hello("ap-south"))
        await within(handler.until(lambda: len(handler.heard) == 3))
        with pytest.raises(PeerUnavailable, match="3 sessions"):
            await within(world.connection().connect())
        for connection in (learner, another, third, *silent):
            await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_one_that_is_told_to_go_and_does_not_read_makes_room(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connections = [world.connection() for _ in range(3)]
        for connection in connections:
            await within(connection.connect())
            connection.send(hello())
        await within(handler.until(lambda: len(handler.heard) == 3))
        handler.sessions[1].close("refused")
        late = world.connection()
        await within(late.connect())
        await within(handler.until(lambda: bool(handler.ended)))
        assert handler.refusals == []
        for connection in (*connections, late):
            await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_words_before_a_hello_are_counted(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection = world.connection()
        await within(connection.connect())
        request = ResyncRequest(fragment_id=FragmentId(0), reason=RefusalReason.DIGEST)
        connection.send(request)
        await within(handler.until(lambda: bool(handler.refusals)))
        assert handler.refusals == [(RefusalReason.GARBAGE, "a ResyncRequest before any Hello")]
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)
