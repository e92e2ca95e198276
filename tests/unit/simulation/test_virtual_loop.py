"""Virtual time: hours pass in no time, in the right order, and a standstill is an error."""

from __future__ import annotations

import asyncio

import pytest

from wan_diloco.clock import ManualClock
from wan_diloco.simulation.virtual_loop import NothingScheduledError, run_virtual


def test_hours_pass_in_order() -> None:
    clock = ManualClock(now_s=5.0)
    seen: list[tuple[float, str]] = []

    async def wake(after_s: float, name: str) -> None:
        await asyncio.sleep(after_s)
        seen.append((clock.now_s(), name))

    async def main() -> str:
        async with asyncio.TaskGroup() as group:
            for after_s, name in ((7200.0, "late"), (0.001, "soon"), (3600.0, "middle"), (200_000.0, "days")):
                group.create_task(wake(after_s, name))
        return "done"

    assert run_virtual(main(), clock) == "done"
    assert seen == [
        (pytest.approx(5.001), "soon"),
        (3605.0, "middle"),
        (7205.0, "late"),
        (200_005.0, "days"),
    ]


def test_time_stands_still_while_there_is_work() -> None:
    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        assert asyncio.get_running_loop().time() == 0.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        assert asyncio.get_running_loop().time() == 30.0

    run_virtual(main())


def test_work_for_an_executor_is_done_at_once() -> None:
    def divide(number: int) -> float:
        return 1 / number

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, divide, 4) == 0.25
        assert await asyncio.to_thread(divide, 2) == 0.5
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, divide, 0)
        assert loop.time() == 0.0

    run_virtual(main())


def test_waiting_for_what_nothing_will_bring_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingScheduledError):
        run_virtual(main())
