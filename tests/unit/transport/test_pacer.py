"""Transfers wait their turn: oldest first, never faster than the link, spread when asked to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.pacer import Pacer, Transfer, chunk_bytes_for, wire_cost

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


def test_the_oldest_transfer_goes_first() -> None:
    async def main() -> None:
        pacer, left = Pacer(1e6), list[tuple[float, str]]()
        old, new = pacer.transfer(), pacer.transfer()
        async with asyncio.TaskGroup() as group:
            group.create_task(send(new, 3, left, "new"))
            group.create_task(send(old, 3, left, "old"))
        # The first message of the newer one was under way before the older one asked.
        assert [name for _, name in left] == ["new", "old", "old", "old", "new", "new"]
        assert left[-1][0] == pytest.approx(5 * wire_cost(MESSAGE) / 1e6, abs=0.1)

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
    assert chunk_bytes_for(25e6, 2**19) == 2**19
    assert chunk_bytes_for(1.25e6, 2**19) == 62_500
    assert chunk_bytes_for(1000.0, 2**19) == 16 * 1024
    assert chunk_bytes_for(1000.0, 5000) == 5000


def test_the_line_carries_more_than_the_payload() -> None:
    assert wire_cost(0) == 14 + 66
    # A full segment's share of the line is 95.6 %, as TCP can reach at an MTU of 1500.
    assert 2**20 / wire_cost(2**20) == pytest.approx(0.956, abs=0.002)
