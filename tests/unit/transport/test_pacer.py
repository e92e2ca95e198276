"""Transfers wait their turn: what is due first goes first, never faster than the caps, spread when asked to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from wan_diloco.protocol.pacing import Cap
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.pacer import Pacer, Total, Transfer, acknowledging_cost, chunk_bytes_for, wire_cost
from wan_diloco.wire.frames import FRAME_HEADER_BYTES

MESSAGE = 100_000


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def send(transfer: Transfer, messages: int, into: list[tuple[float, str]], name: str) -> None:
    for _ in range(messages):
        await transfer.wait(MESSAGE)
        into.append((now_s(), name))


def run(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


def test_without_a_cap_nothing_waits() -> None:
    async def main() -> None:
        left: list[tuple[float, str]] = []
        await send(Pacer().transfer(), 5, left, "a")
        assert [at_s for at_s, _ in left] == [0.0] * 5

    run(main())


def test_what_is_due_first_is_hardly_delayed_by_the_others_and_keeps_none_from_going_on() -> None:
    async def main() -> None:
        pacer, left = Pacer(1e6), list[tuple[float, str]]()
        late, soon = pacer.transfer(50 * MESSAGE, 2.0), pacer.transfer(50 * MESSAGE, 1.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(send(late, 50, left, "late"))
            group.create_task(send(soon, 50, left, "soon"))
        names = [name for _, name in left]
        last = max(index for index, name in enumerate(names) if name == "soon")
        # Alone it would have been 50 messages; the other has an eighth of its share.
        assert 50 + 4 <= last + 1 <= 50 + 10
        assert left[-1][0] == pytest.approx(100 * wire_cost(MESSAGE) / 1e6, abs=0.2)

    run(main())


def test_of_two_that_are_due_at_once_the_older_goes_first() -> None:
    async def main() -> None:
        pacer, left = Pacer(1e6), list[tuple[float, str]]()
        old, new = pacer.transfer(), pacer.transfer()
        async with asyncio.TaskGroup() as group:
            group.create_task(send(new, 20, left, "new"))
            group.create_task(send(old, 8, left, "old"))
        assert [name for _, name in left[:11]].count("old") == 8

    run(main())


def test_a_greedy_session_takes_nothing_from_another_under_a_total() -> None:
    async def main() -> None:
        total, left = Total(1e6), list[tuple[float, str]]()
        greedy, modest = Pacer(total=total), Pacer(total=total)
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(send(greedy.transfer(), 20, left, "greedy"))
            group.create_task(send(modest.transfer(), 20, left, "modest"))
        modest_last = max(index for index, (_, name) in enumerate(left) if name == "modest")
        # Turn by turn: its 20 messages are among the first 40 and a few.
        assert modest_last <= 42

    run(main())


def test_a_session_waits_for_its_own_cap_without_keeping_others_from_the_total() -> None:
    async def main() -> None:
        total, left = Total(1e6), list[tuple[float, str]]()
        narrow, wide = Pacer(1e4, total), Pacer(total=total)
        assert narrow.rate_bytes_per_s == 1e4
        assert wide.rate_bytes_per_s == 1e6
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(send(narrow.transfer(), 100, left, "narrow"))
            await send(wide.transfer(), 20, left, "wide")
            assert now_s() == pytest.approx(20 * wire_cost(MESSAGE) / 1e6, rel=0.15)
            slow.cancel()
        assert 1 <= [name for _, name in left].count("narrow") <= 2

    run(main())

    run(main())


def test_the_cap_holds_over_all_transfers_and_control() -> None:
    async def main() -> None:
        pacer, left = Pacer(1e6), list[tuple[float, str]]()
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(send(pacer.transfer(), 5, left, name))
            for _ in range(50):
                pacer.spend(1000)
                await asyncio.sleep(0.02)
        sent = 14 * wire_cost(MESSAGE) + 50 * wire_cost(1000)
        assert left[-1][0] >= (sent - 16 * 1024) / 1e6

    run(main())


def test_a_cancelled_transfer_lets_the_others_go_on() -> None:
    async def main() -> None:
        pacer, left = Pacer(1e6), list[tuple[float, str]]()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(send(pacer.transfer(), 100, left, "first"))
            second = group.create_task(send(pacer.transfer(), 100, left, "second"))
            third = group.create_task(send(pacer.transfer(), 2, left, "third"))
            await asyncio.sleep(0.25)
            second.cancel()
            first.cancel()
            await third
            assert now_s() < 1.0
        assert [name for _, name in left][-2:] == ["third", "third"]

    run(main())


def test_a_transfer_is_spread_over_the_time_given() -> None:
    async def main() -> None:
        left = list[tuple[float, str]]()
        await send(Pacer(1e9).transfer(10 * MESSAGE, 5.0), 10, left, "a")
        assert [at_s for at_s, _ in left] == pytest.approx([0.5 * index for index in range(10)], abs=0.01)

    run(main())


def test_a_new_cap_counts_at_once_and_can_be_lifted() -> None:
    async def main() -> None:
        pacer, left = Pacer(), list[tuple[float, str]]()
        pacer.set_rate(1e6)
        await send(pacer.transfer(), 6, left, "a")
        assert now_s() >= 0.5
        pacer.set_rate(1e5)
        slow_from_s = now_s()
        await send(pacer.transfer(), 2, left, "a")
        assert now_s() - slow_from_s >= 1.5
        pacer.set_rate(None)
        fast_from_s = now_s()
        await send(pacer.transfer(), 100, left, "a")
        assert now_s() == fast_from_s

    run(main())


def test_slow_links_get_small_chunks() -> None:
    assert chunk_bytes_for(None, 2**19) == 2**19
    assert 4 * 1024 <= chunk_bytes_for(1000.0, 2**19) <= 8 * 1024
    assert 12 * 1024 <= chunk_bytes_for(12.5e6, 2**19) <= 16 * 1024
    assert chunk_bytes_for(1000.0, 5000) == 5000
    assert chunk_bytes_for(1e10, 2**19) == 2**19


@pytest.mark.parametrize("rate", [1.0, 1e5, 1e6, 12.5e6, 25e6, 125e6, 1e9])
def test_no_message_takes_more_than_its_part_of_a_burst(rate: float) -> None:
    chunk = chunk_bytes_for(rate, 2**21)
    assert wire_cost(chunk + 2 * FRAME_HEADER_BYTES) <= Cap.of(rate).message_bytes_max
    assert Cap.of(rate).message_bytes_max <= Cap.of(rate).burst_bytes / 2
    assert chunk >= 4 * 1024


def test_the_line_carries_more_than_the_payload() -> None:
    assert wire_cost(0) == 14 + 66
    assert acknowledging_cost(0) == 0
    assert acknowledging_cost(2**20) == pytest.approx(2**20 * 66 / 2896, rel=0.01)
    # A full segment's share of the line is 95.6 %, as TCP can reach at an MTU of 1500.
    assert 2**20 / wire_cost(2**20) == pytest.approx(0.956, abs=0.002)
