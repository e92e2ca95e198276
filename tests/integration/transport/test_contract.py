"""What every transport must do; run over each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import numpy as np
import pytest

from tests.support.transport import (
    RecordingHandler,
    contribution,
    hello,
    poll,
    random_buffers,
    same,
    update,
    within,
)
from tests.support.transport_words import START, acknowledged, collect, connected, pace, report
from tests.support.transport_worlds import Runner, World
from wan_diloco.errors import PeerUnavailable, TransportError
from wan_diloco.protocol.messages import (
    Goodbye,
    LearnerMessage,
    RefusalReason,
    Stop,
    SyncerMessage,
)
from wan_diloco.transport.interface import Connection
from wan_diloco.units import GlobalStep, TransferId
from wan_diloco.wire.frames import Buffers, pack


def test_messages_arrive_in_order_both_ways(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler(on_said=lambda session, message: session.send(acknowledged(len(handler.heard))))
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        said: list[LearnerMessage] = [hello(), *(Goodbye(reason=str(number)) for number in range(20))]
        for message in said:
            connection.send(message)
        answers = [message async for message in take(connection, len(said))]
        assert handler.heard == said
        assert answers == [acknowledged(number + 1) for number in range(len(said))]
        assert connection.counters.control_bytes == handler.sessions[0].counters.control_bytes > 0
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


async def take(connection: Connection, number: int) -> AsyncIterator[SyncerMessage]:
    stream = connection.messages()
    for _ in range(number):
        yield await within(anext(stream))


def test_an_unsent_report_or_pace_is_replaced_by_a_newer_one(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        for step in range(1, 50):
            connection.send(report(step))
            session.send(pace(step))
        connection.send(Goodbye(reason="last"))
        session.send(START)
        answers = [message async for message in take(connection, 2)]
        assert answers == [pace(49), START]
        await within(handler.until(lambda: len(handler.heard) == 2))
        assert handler.heard == [report(49), Goodbye(reason="last")]
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_what_was_said_before_closing_arrives_with_the_reason(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        session.send(START)
        session.send(acknowledged(5))
        session.close("fenced by a newer life")
        session.send(acknowledged(6))
        got: list[SyncerMessage] = []
        assert "fenced by a newer life" in await within(collect(connection, got))
        assert got == [START, acknowledged(5)]
        await within(handler.until(lambda: bool(handler.ended)))
        assert handler.ended == ["fenced by a newer life"]
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


@pytest.mark.parametrize("iterating", [False, True])
def test_a_goodbye_sent_right_before_closing_arrives(run: Runner, *, iterating: bool) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        got: list[SyncerMessage] = []
        async with asyncio.TaskGroup() as group:
            if iterating:
                group.create_task(within(collect(connection, got)))
                session.send(START)
                await asyncio.sleep(0)
            connection.send(Goodbye(reason="done"))
            await within(connection.close())
        await within(handler.until(lambda: bool(handler.ended)))
        assert handler.heard == [Goodbye(reason="done")]
        assert handler.ended == ["goodbye"]
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


@pytest.mark.parametrize("stopped", [False, True])
def test_one_that_closes_without_a_goodbye_did_so_by_order_or_not(run: Runner, *, stopped: bool) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        connection.send(hello())
        await within(handler.until(lambda: bool(handler.heard)))
        if stopped:
            session.send(Stop(reason="the last step is reached", global_step=GlobalStep(9)))
        await within(connection.close())
        await within(handler.until(lambda: bool(handler.ended)))
        assert handler.ended == ["it was told to stop" if stopped else "it went without a goodbye"]
        await within(server.stop(1.0))

    run(scenario)


def test_updates_arrive_whole_and_in_the_order_sent(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        big, small, value = random_buffers(1_500_000, 777), random_buffers(5, 0), random_buffers(70_000, 2)

        def packed(buffers: Buffers) -> list[bytes]:
            return pack(buffers.codes, buffers.scales, chunk_bytes=2**18)

        first, second = update((1_500_000, 777), (0, 0), (5, 0)), update((70_000, 2), fragment_id=3)
        async with asyncio.TaskGroup() as group:
            group.create_task(session.send_update(first, [packed(big), [], packed(small)]))
            group.create_task(session.send_update(second, [packed(value)]))
            updates = connection.updates()
            header, segments = await within(anext(updates))
            assert header == first
            assert same(segments[0], big)
            assert segments[1].codes.size == 0
            assert same(segments[2], small)
            header, segments = await within(anext(updates))
            assert header == second
            assert same(segments[0], value)
        assert connection.counters.downlink_bytes == session.counters.downlink_bytes
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_control_passes_bulk(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        session.set_downlink_rate(1e6)
        buffers = random_buffers(2_000_000, 0)
        messages = connection.messages()
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(
                session.send_update(update((2_000_000, 0)), [pack(buffers.codes, buffers.scales)])
            )
            await within(poll(lambda: session.counters.downlink_bytes > 0))
            session.send(START)
            assert await within(anext(messages)) == START
            assert not sending.done()
            _, (got,) = await within(anext(connection.updates()))
            assert same(got, buffers)
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_everything_of_a_session_ends_with_it(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        buffers = random_buffers(1_000_000, 106)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**16)
        async with asyncio.TaskGroup() as group:
            saying = group.create_task(collect(connection, []))
            uploading = group.create_task(ends(connection.upload(contribution(1_000_000, 106), frames, 1000.0)))
            updating = group.create_task(ends(anext(connection.updates())))
            session.set_downlink_rate(1.0)
            sending = group.create_task(ends(session.send_update(update((1_000_000, 106)), [frames])))
            await within(handler.until(lambda: bool(handler.offered)))
            session.close("enough")
            assert "enough" in await within(saying)
            await within(uploading)
            await within(updating)
            await within(sending)
        with pytest.raises(TransportError):
            await within(session.send_update(update((1_000_000, 106)), [frames]))
        with pytest.raises(TransportError):
            await within(connection.upload(contribution(1_000_000, 106), frames, 0.0))
        session.send(START)
        connection.send(hello())
        assert len(handler.ended) == 1
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


async def ends(work: Awaitable[object]) -> None:
    with pytest.raises(TransportError):
        await work


def test_what_begins_after_leaving_ends_as_what_was_under_way_does(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, _ = await connected(world, handler)
        await within(connection.close())
        buffers = random_buffers(1_000, 106)
        frames = pack(buffers.codes, buffers.scales)
        await within(ends(connection.upload(contribution(1_000, 106), frames, 0.0)))
        await within(ends(connection.give_state(TransferId(1), np.zeros(8, np.uint8))))
        await within(ends(anext(connection.messages())))
        await within(ends(anext(connection.updates())))
        connection.send(hello())
        await within(server.stop(1.0))

    run(scenario)


def test_stopping_says_so_and_ends_every_session(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        got: list[SyncerMessage] = []
        async with asyncio.TaskGroup() as group:
            saying = group.create_task(collect(connection, got))
            session.send(START)
            await within(server.stop(5.0))
            assert handler.ended == ["the syncer is stopping"]
            assert "the syncer is stopping" in await within(saying)
        assert got == [START]
        await within(connection.close())
        with pytest.raises(PeerUnavailable):
            await within(world.connection().connect())

    run(scenario)


def test_nobody_is_there(run: Runner) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(PeerUnavailable):
            await within(world.connection().connect())
        with pytest.raises(PeerUnavailable):
            await within(world.status())

    run(scenario)


def test_sessions_are_bounded_and_numbers_are_never_used_again(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        first = [await connected(world, handler) for _ in range(3)]
        for connection, _ in first:
            connection.send(hello())
        await within(handler.until(lambda: len(handler.heard) == 3))
        with pytest.raises(PeerUnavailable, match="3 sessions"):
            await within(world.connection().connect())
        assert [reason for reason, _ in handler.refusals] == [RefusalReason.TOO_MANY_CALLS]
        for connection, _ in first:
            await within(connection.close())
        await within(handler.until(lambda: len(handler.ended) == 3))
        connection, _ = await connected(world, handler)
        numbers = [session.session for session in handler.sessions]
        assert sorted(set(numbers)) == numbers
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)


def test_the_status_is_told(run: Runner) -> None:
    async def scenario(world: World) -> None:
        server = await world.start(RecordingHandler())
        assert await within(world.status()) == {"heard": 0}
        await within(server.stop(1.0))

    run(scenario)


def test_a_driver_may_drop_its_readers_and_still_say_goodbye(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        got: list[SyncerMessage] = []
        async with asyncio.TaskGroup() as group:
            saying = group.create_task(collect(connection, got))
            updating = group.create_task(ends(anext(connection.updates())))
            session.send(START)
            await within(poll(lambda: bool(got)))
            saying.cancel()
            updating.cancel()
        connection.send(Goodbye(reason="stopping"))
        await within(connection.close())
        await within(handler.until(lambda: bool(handler.ended)))
        assert handler.heard == [Goodbye(reason="stopping")]
        assert handler.ended == ["goodbye"]
        await within(server.stop(1.0))

    run(scenario)


def test_an_update_that_nobody_reads_does_not_hold_up_the_end(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        buffers = random_buffers(2**24, 0)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**14)
        async with asyncio.TaskGroup() as group:
            group.create_task(ends(session.send_update(update((2**24, 0)), [frames])))
            await within(poll(lambda: session.counters.downlink_bytes > 0))
            await within(connection.close())
            await within(handler.until(lambda: bool(handler.ended)))
        await within(server.stop(1.0))

    run(scenario)


def test_an_update_whose_sender_was_cancelled_still_arrives_whole(run: Runner) -> None:
    async def scenario(world: World) -> None:
        handler = RecordingHandler()
        server = await world.start(handler)
        connection, session = await connected(world, handler)
        session.set_downlink_rate(1e6)
        buffers = random_buffers(500_000, 0)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=2**15)
        async with asyncio.TaskGroup() as group:
            begun = group.create_task(session.send_update(update((500_000, 0)), [frames]))
            waiting = group.create_task(session.send_update(update((500_000, 0), fragment_id=8), [frames]))
            last = group.create_task(session.send_update(update((500_000, 0), fragment_id=9), [frames]))
            await within(poll(lambda: session.counters.downlink_bytes > 0))
            begun.cancel()
            waiting.cancel()
            updates = connection.updates()
            for fragment_id in (7, 9):
                header, (got,) = await within(anext(updates))
                assert header.fragment_id == fragment_id
                assert same(got, buffers)
            await last
        await within(connection.close())
        await within(server.stop(1.0))

    run(scenario)
