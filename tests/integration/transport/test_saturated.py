"""Control is never behind bulk: round trips that fit in while a slow upload is under way. No time is asserted."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.transport import RecordingHandler, contribution, hello, random_buffers, within
from tests.support.transport_worlds import Runner, World, run_in_memory, run_over_grpc
from wan_diloco.protocol.messages import LearnerMessage, Pace, Report
from wan_diloco.transport.interface import Session
from wan_diloco.transport.pacer import Pacer, chunk_bytes_for
from wan_diloco.units import GlobalStep, LocalStep
from wan_diloco.wire.frames import pack

# 1 Mbit/s: the upload takes two seconds at least.
RATE_BYTES_PER_S = 1e6 / 8
SIZE = 250_000
ROUND_TRIPS = 30


def answer(session: Session, message: LearnerMessage) -> None:
    if isinstance(message, Report):
        session.send(Pace(global_step=GlobalStep(message.local_step), anchor=0))


@pytest.mark.parametrize("run", [run_in_memory, run_over_grpc])
def test_heartbeats_are_answered_while_bulk_fills_the_uplink(run: Runner) -> None:
    async def story(world: World) -> None:
        handler = RecordingHandler()
        handler.on_said = answer
        server = await world.start(handler)
        pacer = Pacer(RATE_BYTES_PER_S)
        connection = world.connection(pacer)
        await connection.connect()
        connection.send(hello())
        buffers = random_buffers(SIZE, 0)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=chunk_bytes_for(RATE_BYTES_PER_S, 2**19))
        answers = connection.messages()
        async with asyncio.TaskGroup() as group:
            moving = group.create_task(connection.upload(contribution(SIZE, 0), frames, 0.0, unasked=True))
            for step in range(1, ROUND_TRIPS + 1):
                report = Report(
                    local_step=LocalStep(step), tokens=0, step_time_s=1.0, loss=None, learning_rate=0.1, fragments=()
                )
                connection.send(report)
                told = await within(anext(answers))
                assert isinstance(told, Pace)
                assert told.global_step == step
                # Behind the bulk it would have come after it; a busy machine may take its time, but not that much.
                if step <= ROUND_TRIPS // 3:
                    assert not moving.done()
            assert await within(moving)
        assert not handler.ended
        await connection.close()
        await server.stop(0.0)

    run(story)
