"""Control messages wait in order, bounded, the outdated ones replaced."""

from __future__ import annotations

import asyncio

from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.outbox import Outbox


def test_order_replacement_bound_and_end() -> None:
    async def main() -> None:
        outbox = Outbox(int, 3)
        assert outbox.put(1, b"1")
        assert outbox.put("a", b"a")
        assert outbox.put(2, b"2")
        assert outbox.put("b", b"b")
        assert not outbox.put("c", b"c")
        # A replacement needs no room.
        assert outbox.put(3, b"3")
        outbox.close()
        assert outbox.put("late", b"late")
        assert [await outbox.get() for _ in range(5)] == [b"a", b"b", b"3", None, None]

    run_virtual(main())


def test_a_reader_that_waits_is_woken_and_a_cancelled_one_loses_nothing() -> None:
    async def main() -> None:
        outbox = Outbox(int, 3)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(outbox.get())
            await asyncio.sleep(1)
            outbox.put("a", b"a")
            first.cancel()
        assert await outbox.get() == b"a"
        async with asyncio.TaskGroup() as group:
            second = group.create_task(outbox.get())
            await asyncio.sleep(1)
            outbox.close()
        assert second.result() is None

    run_virtual(main())
