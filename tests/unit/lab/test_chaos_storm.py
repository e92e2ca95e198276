"""Faults befall real processes and links at their times, and are taken back however the storm ends."""

from __future__ import annotations

import asyncio
import errno
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.transport import poll
from wan_diloco.clock import SystemClock
from wan_diloco.config import FaultSchedule, parse_schedule
from wan_diloco.errors import StorageError
from wan_diloco.lab.chaos_storm import Storm
from wan_diloco.lab.links import GOOD, LinkState, Passage
from wan_diloco.lab.proxy import LinkProxy
from wan_diloco.lab.skewed_clock import skewed, why_no_skew
from wan_diloco.lab.small_disk import Ballast, SmallDisk, plan_disk
from wan_diloco.lab.victims import Victim, command_of, uplink_of

WITHIN_S = 60.0
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


class Ground:
    """One process that is the syncer and everything else."""

    def __init__(self, process: psutil.Process | None) -> None:
        self.victim = None if process is None else Victim(process)
        self.released: list[str] = []
        self.skewed: list[tuple[str, float]] = []

    def syncer(self) -> Victim | None:
        return self.victim

    def learner(self, region: str) -> Victim | None:
        return self.victim

    def uplink(self, region: str) -> Victim | None:
        return self.victim

    def link(self, region: str) -> LinkState:
        return GOOD

    def address(self) -> str:
        return ""

    def release(self, region: str) -> None:
        self.released.append(region)

    def skew(self, name: str, offset_s: float) -> None:
        self.skewed.append((name, offset_s))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER)
    yield process
    process.kill()
    process.wait()


def schedule(*faults: dict[str, Any]) -> FaultSchedule:
    return parse_schedule({"faults": [{"at": "0s", **fault} for fault in faults]}, "test")


def storm(
    faults: FaultSchedule,
    ground: Ground,
    link: LinkProxy,
    ballast: Ballast | None = None,
    ends: tuple[asyncio.Event, ...] = (),
) -> Storm:
    return Storm(
        faults,
        processes=ground,
        links={"east": link},
        ballast=ballast,
        starting=ground,
        say=lambda _: None,
        ends=ends,
    )


def stopped(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_a_stopped_process_goes_on_after_the_last_of_two_stops(sleeper: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        ground = Ground(psutil.Process(sleeper.pid))
        link = LinkProxy(lambda: "", random.Random(0))
        stop = {"kind": "stop", "target": "syncer"}
        faults = schedule({**stop, "for": "100ms"}, {**stop, "for": "1h"})
        async with asyncio.timeout(WITHIN_S), link:
            playing = storm(faults, ground, link)
            running = asyncio.ensure_future(playing.run())  # noqa: TID251
            await poll(lambda: playing.befallen[0].ended_s is not None)
            await poll(lambda: stopped(sleeper))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await poll(lambda: not stopped(sleeper))

    asyncio.run(main())


def test_what_befalls_a_run_is_undone_at_its_end_and_nothing_begins_any_more(
    sleeper: subprocess.Popen[bytes],
) -> None:
    async def main() -> None:
        ground, ends = Ground(psutil.Process(sleeper.pid)), (asyncio.Event(), asyncio.Event())
        link = LinkProxy(lambda: "", random.Random(0))
        faults = schedule(
            {"kind": "stop", "target": "learner:east", "for": "1h"},
            {"kind": "cut", "target": "link:east", "for": "1h"},
            {"kind": "kill", "target": "syncer", "at": "1h"},
        )
        async with asyncio.timeout(WITHIN_S), link, asyncio.TaskGroup() as group:
            playing = storm(faults, ground, link, ends=ends)
            running = group.create_task(playing.run())
            await poll(lambda: stopped(sleeper) and link.state.cut)
            ends[1].set()
            await running
            assert link.state == GOOD
            await poll(lambda: not stopped(sleeper))
        stop, cut, kill = playing.befallen
        for item in (stop, cut):
            assert item.cut_short
            assert item.ended_s is not None
            assert item.problem == ""
        assert (kill.began_s, kill.cut_short) == (None, False)

    asyncio.run(main())


def test_a_fault_that_is_due_in_the_moment_of_the_end_does_not_begin(sleeper: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        link, end = LinkProxy(lambda: "", random.Random(0)), asyncio.Event()
        end.set()
        async with asyncio.timeout(WITHIN_S), link:
            playing = storm(
                schedule({"kind": "kill", "target": "syncer"}),
                Ground(psutil.Process(sleeper.pid)),
                link,
                ends=(end,),
            )
            await playing.run()
        assert playing.befallen[0].began_s is None
        assert sleeper.poll() is None

    asyncio.run(main())


def test_a_process_that_ended_by_itself_was_not_hit(sleeper: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        ground = Ground(psutil.Process(sleeper.pid))
        link = LinkProxy(lambda: "", random.Random(0))
        sleeper.kill()
        sleeper.wait()
        faults = schedule({"kind": "kill", "target": "syncer"}, {"kind": "stop", "target": "learner:east", "for": "1h"})
        async with asyncio.timeout(WITHIN_S), link:
            playing = storm(faults, ground, link)
            await playing.run()
        for item in playing.befallen:
            assert (item.began_s, item.problem) == (None, "the process ended by itself")

    asyncio.run(main())


def test_another_process_with_the_same_number_is_not_the_same(sleeper: subprocess.Popen[bytes]) -> None:
    process = psutil.Process(sleeper.pid)
    assert Victim(process).condition() is not None
    process._ident = (process.pid, 1.0)
    assert Victim(process).condition() is None
    assert not Victim(process).send(signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_disk_that_takes_its_time_holds_nothing_up_and_is_empty_afterwards(tmp_path: Path) -> None:
    class Slow(Ballast):
        entered, go_on = threading.Event(), threading.Event()

        def fill(self) -> int:
            self.entered.set()
            assert self.go_on.wait(WITHIN_S)
            (tmp_path / "ballast").write_bytes(b"x")
            return 1

    async def main() -> None:
        link, ballast = LinkProxy(lambda: "", random.Random(0)), Slow(tmp_path)
        async with asyncio.timeout(WITHIN_S), link:
            full = {"kind": "full-disk", "target": "disk", "for": "1h"}
            running = asyncio.ensure_future(storm(schedule(full), Ground(None), link, ballast).run())  # noqa: TID251
            await poll(ballast.entered.is_set)
            running.cancel()
            ballast.go_on.set()
            await asyncio.gather(running, return_exceptions=True)
        assert not (tmp_path / "ballast").exists()

    asyncio.run(main())


def test_a_disk_that_fails_otherwise_is_told_of(tmp_path: Path) -> None:
    class Broken(Ballast):
        def fill(self) -> int:
            raise OSError(errno.EIO, "Input/output error")

    async def main() -> None:
        link = LinkProxy(lambda: "", random.Random(0))
        async with asyncio.timeout(WITHIN_S), link:
            full = {"kind": "full-disk", "target": "disk", "for": "1h"}
            playing = storm(schedule(full), Ground(None), link, Broken(tmp_path))
            await playing.run()
        (item,) = playing.befallen
        assert (item.began_s, item.problem) == (None, "the disk can't be filled: Input/output error")

    asyncio.run(main())


def test_a_storm_that_is_broken_off_leaves_nothing_stopped_bad_or_full(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    class Bottomless(Ballast):
        filled = emptied = 0

        def fill(self) -> int:
            self.filled += 1
            return 0

        def empty(self) -> None:
            self.emptied += 1

    async def main() -> None:
        ground, ballast = Ground(psutil.Process(sleeper.pid)), Bottomless(tmp_path)
        link = LinkProxy(lambda: "", random.Random(0))
        faults = schedule(
            {"kind": "stop", "target": "learner:east", "for": "1h"},
            {"kind": "cut", "target": "link:east", "for": "1h"},
            {"kind": "full-disk", "target": "disk", "for": "1h"},
        )
        async with asyncio.timeout(WITHIN_S), link:
            playing = storm(faults, ground, link, ballast)
            running = asyncio.ensure_future(playing.run())  # noqa: TID251
            await poll(lambda: stopped(sleeper) and link.state.cut and ballast.filled > 0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await poll(lambda: not stopped(sleeper))
            assert link.state == GOOD
            assert ballast.emptied

    asyncio.run(main())


def test_faults_of_one_link_add_up_and_end_one_by_one() -> None:
    async def main() -> None:
        faults = schedule(
            {"kind": "throttle", "target": "link:east", "for": "200ms", "rate": "8mbit", "way": "up"},
            {"kind": "delay", "target": "link:east", "for": "600ms", "delay": "50ms"},
            {"kind": "cut", "target": "link:east", "for": "600ms", "way": "down"},
            {"kind": "corrupt", "target": "link:east", "for": "600ms", "flips_per_byte": 0.5},
        )
        states = []

        class Recording(LinkProxy):
            def change(self, state: LinkState) -> None:
                states.append(state)
                super().change(state)

        link = Recording(lambda: "", random.Random(0))
        async with asyncio.timeout(WITHIN_S), link:
            await storm(faults, Ground(None), link).run()
        everything = max(states, key=lambda state: (state.up.flips_per_byte, state.up.rate_bytes_per_s or 0.0))
        assert everything.up.rate_bytes_per_s == 1e6
        assert everything.down.rate_bytes_per_s is None
        assert everything.up.delay_s == everything.down.delay_s == 0.05
        assert (everything.up.passage, everything.down.passage) == (Passage.OPEN, Passage.HELD)
        assert states[-1] == GOOD

    asyncio.run(main())


def test_the_dead_are_found_alive_before_they_are_killed_and_joiners_released(
    sleeper: subprocess.Popen[bytes],
) -> None:
    async def main() -> None:
        ground = Ground(None)
        link = LinkProxy(lambda: "", random.Random(0))
        faults = schedule(
            {"kind": "kill", "target": "uplink:east"},
            {"kind": "join", "target": "learner:east"},
            {"kind": "full-disk", "target": "disk", "for": "1s"},
        )
        playing = storm(faults, ground, link)
        async with asyncio.timeout(WITHIN_S), link, asyncio.TaskGroup() as group:
            running = group.create_task(playing.run())
            await poll(lambda: ground.released == ["east"])
            assert sleeper.poll() is None
            ground.victim = Victim(psutil.Process(sleeper.pid))
            await running
        assert sleeper.wait(10) == -signal.SIGKILL
        kill, join, disk = playing.befallen
        assert kill.began_s is not None
        assert join.ended_s is not None
        assert disk.problem == "no disk can be filled here"
        assert disk.began_s is None

    asyncio.run(main())


def test_a_skewed_process_dies_and_its_follower_is_to_have_another_clock(sleeper: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        ground = Ground(psutil.Process(sleeper.pid))
        link = LinkProxy(lambda: "", random.Random(0))
        async with asyncio.timeout(WITHIN_S), link:
            await storm(schedule({"kind": "skew", "target": "syncer", "offset": "1h"}), ground, link).run()
        assert ground.skewed == [("syncer", 3600.0)]
        assert sleeper.wait(10) == -signal.SIGKILL

    asyncio.run(main())


@pytest.mark.skipif(bool(why_no_skew()), reason=why_no_skew() or "it can be done here")
def test_a_skewed_process_has_a_clock_that_is_ahead() -> None:
    program = "from wan_diloco.clock import SystemClock; print(SystemClock().now_s())"
    words = [*skewed(1e6), sys.executable, "-c", program]
    before_s = SystemClock().now_s()
    ahead_s = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout) - before_s
    assert 1e6 <= ahead_s < 1e6 + WITHIN_S


def test_victims_are_found_below_their_guardian_and_no_other_is_hit() -> None:
    source = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()', "
        "'wan_diloco.learner.uplink']); import signal; signal.pause()"
    )
    guardian = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys, signal; subprocess.Popen([sys.executable, '-c', {source!r}]); signal.pause()",
        ],
        start_new_session=True,
    )
    family: list[psutil.Process] = []

    async def main() -> None:
        async with asyncio.timeout(WITHIN_S):
            await poll(lambda: uplink_of(command_of(guardian.pid)) is not None)
        family.extend(psutil.Process(guardian.pid).children(recursive=True))
        learner = command_of(guardian.pid)
        uplink = uplink_of(learner)
        assert learner is not None
        assert uplink is not None
        assert {learner.pid, uplink.pid} == {process.pid for process in family}
        condition = uplink.condition()
        assert condition is not None
        assert condition.runs
        assert uplink.send(signal.SIGKILL)
        await poll(lambda: uplink_of(learner) is None)
        assert uplink.condition() is None
        assert command_of(guardian.pid) == learner

    try:
        asyncio.run(main())
    finally:
        for process in [*family, psutil.Process(guardian.pid)]:
            if process.is_running():
                process.kill()
        guardian.wait()
    assert command_of(None) is None
    assert uplink_of(None) is None


def test_a_small_disk_fills_up_empties_and_leaves_its_files_behind(tmp_path: Path) -> None:
    plan = plan_disk(tmp_path / "run")
    if not plan.mount:
        pytest.skip(plan.why_not or plan.how)
    folder = tmp_path / "run"
    disk = SmallDisk(folder, 2**20)
    with disk:
        assert plan_disk(folder).how.startswith("a file of ballast on the disk that is mounted there")
        (folder / "state").mkdir()
        (folder / "state" / "kept").write_text("kept")
        ballast = Ballast(folder)
        assert ballast.fill() > 2**19
        assert ballast.fill() == 0
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_text("x" * 10_000)
        ballast.empty()
        ballast.empty()
        (folder / "more").write_text("x" * 10_000)
        with (folder / "more").open(), pytest.raises(StorageError, match="is still mounted, with all of it"):
            disk.__exit__(None, None, None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "only the disk has it"
    assert not folder.is_mount()
    assert (folder / "state" / "kept").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_an_earlier_disk_held_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".run.kept").mkdir()
    with pytest.raises(StorageError, match=r"\.run\.kept holds what was on an earlier small disk"):
        SmallDisk(tmp_path / "run", 2**20).__enter__()
    assert not (tmp_path / "run").exists()
