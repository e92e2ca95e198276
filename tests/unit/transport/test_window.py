"""What may be on its way, and how long it may stay there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from wan_diloco.errors import DeadlineExceeded
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.kernel import tcp_limits
from wan_diloco.transport.window import Receipts, SendWindow, WindowPlan

PLAN = WindowPlan(limit_bytes=100, progress_timeout_s=8.0)


def test_no_more_is_written_than_the_far_end_will_have_room_for() -> None:
    async def main() -> None:
        window: SendWindow[str] = SendWindow(PLAN)
        loop = asyncio.get_running_loop()
        written: list[tuple[str, float]] = []

        async def write() -> None:
            for name in "abcd":
                await window.room(40)
                window.wrote(name, 40)
                written.append((name, loop.time()))

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            await asyncio.sleep(1.0)
            assert [name for name, _ in written] == ["a", "b"]
            window.acknowledged(39)
            await asyncio.sleep(1.0)
            assert window.unacknowledged == ["a", "b", "c"], "a part of a message leaves room for another's"
            window.acknowledged(80)
            window.acknowledged(40)
        assert [name for name, _ in written] == ["a", "b", "c", "d"]
        assert window.unacknowledged == ["c", "d"]

    run_virtual(main())


def test_a_message_longer_than_the_window_goes_alone() -> None:
    async def main() -> None:
        window: SendWindow[str] = SendWindow(PLAN)
        await window.room(1000)
        window.wrote("long", 1000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(window.room(1), 1.0)
        window.acknowledged(1000)
        await window.room(1)

    run_virtual(main())


def test_a_far_end_that_says_more_than_was_written_changes_nothing() -> None:
    async def main() -> None:
        window: SendWindow[str] = SendWindow(PLAN)
        window.acknowledged(10**9)
        window.wrote("a", 60)
        window.wrote("b", 60)
        assert window.unacknowledged == ["a", "b"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(window.room(60), 1.0)

    run_virtual(main())


def test_no_progress_ends_a_stream_and_any_progress_keeps_it() -> None:
    async def main() -> None:
        window: SendWindow[str] = SendWindow(PLAN)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(expect_deadline(window))
            await asyncio.sleep(100.0)
            assert not watching.done(), "nothing is on its way"
            window.wrote("a", 20)
            await asyncio.sleep(100.0)
            assert not watching.done(), "so little needs no word"
            window.wrote("b", 80)
            for received in range(1, 5):
                await asyncio.sleep(7.0)
                window.acknowledged(received * 15)
            assert not watching.done()
            last_s = loop.time()
            assert await watching == pytest.approx(last_s + 8.0)


def test_the_last_word_is_owed_too() -> None:
    async def main() -> None:
        window: SendWindow[str] = SendWindow(PLAN)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(expect_deadline(window, "10 bytes"))
            window.wrote("a", 10)
            window.ended()
            await asyncio.sleep(7.0)
            window.answered()
            assert window.unacknowledged == []
            await asyncio.sleep(100.0)
            assert not watching.done()
            window.wrote("b", 10)
            window.ended()
            assert await watching == pytest.approx(107.0 + 8.0)

    run_virtual(main())


async def expect_deadline(window: SendWindow[str], what: str = "40 bytes") -> float:
    with pytest.raises(DeadlineExceeded, match=rf"{what} weren't acknowledged within 8\.0 s"):
        await window.watch()
    return asyncio.get_running_loop().time()


def test_receipts_come_four_times_a_window_or_never() -> None:
    async def main() -> None:
        said: list[int] = []

        async def say(received_bytes: int) -> None:
            said.append(received_bytes)

        receipts = Receipts(100, say)
        for _ in range(10):
            await receipts.took(10)
        assert said == [30, 60, 90]
        silent = Receipts(0, say)
        await silent.took(1000)
        assert len(said) == 3
        await receipts.set_window(40)
        assert said[3:] == [100], "a smaller window makes it due"
        await receipts.took(1)
        await asyncio.sleep(1.0)
        await receipts.took(1)
        assert said[4:] == [102], "a slow link isn't a dead one"

    run_virtual(main())


def test_what_the_kernel_says_about_connections(tmp_path: Path) -> None:
    assert tcp_limits(tmp_path).congestion == "cubic"
    (tmp_path / "tcp_rmem").write_text("4096\t131072\t33554432\n")
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t4194304\n")
    (tmp_path / "tcp_congestion_control").write_text("bbr\n")
    found = tcp_limits(tmp_path)
    assert (found.receive_bytes_max, found.send_bytes_max, found.congestion) == (33554432, 4194304, "bbr")
    (tmp_path / "tcp_rmem").write_text("?\n")
    assert tcp_limits(tmp_path).congestion == "cubic"
