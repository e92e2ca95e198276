"""What all sessions of a syncer share: its ingress and its egress, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.transport import EAST, RecordingHandler, contribution, hello, random_buffers, update
from wan_diloco.protocol.messages import Pace, Report
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.connection import ClientConnection
from wan_diloco.transport.memory import Link, MemoryNetwork, MemoryServer
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.pacer import Pacer
from wan_diloco.units import GlobalStep, LearnerId, LocalStep
from wan_diloco.wire.frames import pack

WEST = LearnerId("us-west")
SIZE = 1_000_000
LIMITS = ServerLimits(hello_timeout_s=1e6)


def run(story: Coroutine[Any, Any, None]) -> None:
    run_virtual(story)


async def begin(network: MemoryNetwork, handler: RecordingHandler, stack: AsyncExitStack, **rates: Any) -> MemoryServer:
    server = network.server(handler)
    await server.start()
    server.set_rates(**{"ingress_bytes_per_s": None, "egress_bytes_per_s": None, **rates})
    stack.push_async_callback(server.stop, 0.0)
    return server


def now_s() -> float:
    return asyncio.get_running_loop().time()


def frames(size: int) -> list[bytes]:
    buffers = random_buffers(size, 0)
    return pack(buffers.codes, buffers.scales, chunk_bytes=2**14)


def test_uploads_of_all_sessions_together_keep_to_the_ingress_and_share_it() -> None:
    async def story() -> None:
        handler, ends_s = RecordingHandler(), dict[str, float]()
        async with MemoryNetwork(link=Link(delay_s=0.01), limits=LIMITS) as network, AsyncExitStack() as stack:
            await begin(network, handler, stack, ingress_bytes_per_s=1e6)
            connections = {name: network.connection(name) for name in (EAST, WEST)}

            async def upload(name: LearnerId, number: int) -> None:
                header = contribution(SIZE, 0, step_hi=200 + number)
                assert await connections[name].upload(header, frames(SIZE), 0.0, unasked=True)
                ends_s[f"{name}{number}"] = now_s()

            for connection in connections.values():
                await connection.connect()
            async with asyncio.TaskGroup() as group:
                # One is greedy.
                for number in range(3):
                    group.create_task(upload(EAST, number))
                group.create_task(upload(WEST, 9))
            # On the line a byte takes 1.05; nothing of it is paced by its sender.
            assert max(ends_s.values()) == pytest.approx(4 * 1.05, rel=0.05)
            assert ends_s["us-west9"] <= 2 * 1.05 * 1.1

    run(story())


def test_control_does_not_wait_for_the_ingress_and_is_made_room_for() -> None:
    async def story() -> None:
        handler = RecordingHandler()
        handler.on_said = lambda session, message: (
            session.send(Pace(global_step=GlobalStep(message.local_step), anchor=0))
            if isinstance(message, Report)
            else None
        )
        async with MemoryNetwork(link=Link(delay_s=0.01), limits=LIMITS) as network, AsyncExitStack() as stack:
            await begin(network, handler, stack, ingress_bytes_per_s=1e5)
            # Faster than it is granted, but not so that it takes slow reading for a dead peer.
            connection = network.connection(EAST, Pacer(4e5))
            await connection.connect()
            connection.send(hello())
            answers = connection.messages()
            async with asyncio.TaskGroup() as group:
                moving = group.create_task(connection.upload(contribution(SIZE, 0), frames(SIZE), 0.0, unasked=True))
                await asyncio.sleep(1.0)
                for step in range(1, 20):
                    asked_s = now_s()
                    connection.send(
                        Report(
                            local_step=LocalStep(step),
                            tokens=0,
                            step_time_s=1.0,
                            loss=None,
                            learning_rate=0.1,
                            fragments=(),
                        )
                    )
                    await anext(answers)
                    assert now_s() - asked_s == pytest.approx(0.02)
                assert not moving.done()
                await moving
            assert now_s() >= 10.0

    run(story())


async def read(connection: ClientConnection) -> None:
    async for _ in connection.updates():
        pass


def test_a_session_that_reads_slowly_takes_nothing_of_the_egress_from_another() -> None:
    async def story() -> None:
        handler, ends_s = RecordingHandler(), list[float]()
        async with MemoryNetwork(link=Link(delay_s=0.01), limits=LIMITS) as network, AsyncExitStack() as stack:
            server = await begin(network, handler, stack, egress_bytes_per_s=1e6)
            network.set_link(WEST, Link(delay_s=0.01, downlink_bytes_per_s=1e4))
            connections = [network.connection(name) for name in (WEST, EAST)]
            for connection in connections:
                await connection.connect()
            slow, quick = handler.sessions

            async def send() -> None:
                await quick.send_update(update((SIZE, 0)), [frames(SIZE)])
                ends_s.append(now_s())

            async with asyncio.TaskGroup() as group:
                reading = [group.create_task(read(connection)) for connection in connections]
                greedy = [group.create_task(slow.send_update(update((SIZE, 0)), [frames(SIZE)])) for _ in range(3)]
                await send()
                # What the slow one's link doesn't take, it doesn't ask for.
                assert ends_s[-1] <= 1.4
                server.set_rates(ingress_bytes_per_s=None, egress_bytes_per_s=None)
                began_s = now_s()
                await send()
                assert now_s() == pytest.approx(began_s, abs=0.1), "a cap that is lifted counts at once"
                for task in (*greedy, *reading):
                    task.cancel()

    run(story())
