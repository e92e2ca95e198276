"""Control is never behind bulk: round trips that fit in while a slow upload is under way.

Times are asserted in virtual time only. What a real link does to them is in `tests/lab`.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.transport import RecordingHandler, contribution, hello, random_buffers, within
from tests.support.transport_worlds import LIMITS, MemoryWorld, Runner, World, run_in_memory, run_over_grpc
from wan_diloco.protocol.messages import LearnerMessage, Pace, Report
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.interface import Session
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.pacer import Pacer, chunk_bytes_for, wire_cost
from wan_diloco.units import GlobalStep, LocalStep
from wan_diloco.wire.frames import pack

# 1 Mbit/s: the upload takes two seconds at least.
RATE_BYTES_PER_S = 1e6 / 8
SIZE = 250_000
ROUND_TRIPS = 30
DELAY_S = 0.05
CHUNK_BYTES = chunk_bytes_for(RATE_BYTES_PER_S, 2**19)


def answer(session: Session, message: LearnerMessage) -> None:
    if isinstance(message, Report):
        session.send(Pace(global_step=GlobalStep(message.local_step), anchor=0))


async def echoes(world: World) -> list[tuple[float, bool]]:
    """How long each round trip took by the loop's clock, and whether the upload went on all the while."""
    handler = RecordingHandler()
    handler.on_said = answer
    server = await world.start(handler)
    connection = world.connection(Pacer(RATE_BYTES_PER_S))
    await connection.connect()
    connection.send(hello())
    buffers = random_buffers(SIZE, 0)
    frames = pack(buffers.codes, buffers.scales, chunk_bytes=CHUNK_BYTES)
    answers = connection.messages()
    found = []
    async with asyncio.TaskGroup() as group:
        moving = group.create_task(connection.upload(contribution(SIZE, 0), frames, 0.0, unasked=True))
        for step in range(1, ROUND_TRIPS + 1):
            sent_s = asyncio.get_running_loop().time()
            report = Report(
                local_step=LocalStep(step), tokens=0, step_time_s=1.0, loss=None, learning_rate=0.1, fragments=()
            )
            connection.send(report)
            told = await within(anext(answers))
            assert isinstance(told, Pace)
            assert told.global_step == step
            found.append((asyncio.get_running_loop().time() - sent_s, not moving.done()))
        assert await within(moving)
    assert not handler.ended
    await connection.close()
    await server.stop(0.0)
    return found


@pytest.mark.parametrize("run", [run_in_memory, run_over_grpc])
def test_heartbeats_are_answered_while_bulk_fills_the_uplink(run: Runner) -> None:
    async def story(world: World) -> None:
        # Behind the bulk they would have come after it; a busy machine may take its time, but not that much.
        assert all(under_way for _, under_way in (await echoes(world))[: ROUND_TRIPS // 3])

    run(story)


def test_no_heartbeat_waits_for_more_than_one_message_of_bulk() -> None:
    async def main() -> list[tuple[float, bool]]:
        link = Link(delay_s=DELAY_S, uplink_bytes_per_s=RATE_BYTES_PER_S, downlink_bytes_per_s=RATE_BYTES_PER_S)
        async with MemoryNetwork(link=link, limits=LIMITS) as network:
            return await echoes(MemoryWorld(network))

    beside = [took_s for took_s, under_way in run_virtual(main()) if under_way]
    assert len(beside) >= SIZE / RATE_BYTES_PER_S / (2 * DELAY_S) - 2, "the link was full all the while"
    assert max(beside) <= 2 * DELAY_S + wire_cost(CHUNK_BYTES) / RATE_BYTES_PER_S
