"""The guardian, with real processes: nothing survives whom it must not survive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from wan_diloco.cli.guardian import KILL_ALL, guarded
from wan_diloco.clock import SystemClock

_WITHIN_S = 20.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; the bound only keeps a broken test from hanging."""
    clock, never = SystemClock(), threading.Event()
    end_s = clock.now_s() + _WITHIN_S
    while not condition():
        assert clock.now_s() < end_s, f"never happened: {what}"
        never.wait(0.01)


def python(source: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pid(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text().endswith("\n"), f"{path.name} is written")
    return int(path.read_text())


# Writes its pid, leaves a child of its own in a *new session*, as torchrun does with ranks, and sleeps.
FAMILY = """
    import os, pathlib, subprocess, sys, time
    folder = pathlib.Path(sys.argv[1])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "grandchild").write_text(f"{other.pid}\\n")
    (folder / "child").write_text(f"{os.getpid()}\\n")
    time.sleep(600)
"""


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(command: list[str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


Start = Callable[[list[str]], subprocess.Popen[bytes]]


@pytest.mark.parametrize("code", [0, 1, 75, 78])
def test_the_exit_code_is_handed_on(start: Start, code: int) -> None:
    assert start(guarded(os.getpid(), python(f"raise SystemExit({code})"))).wait(_WITHIN_S) == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_death_by_signal_is_handed_on(start: Start, number: signal.Signals) -> None:
    source = f"import os; os.kill(os.getpid(), {number.value})"
    assert start(guarded(os.getpid(), python(source))).wait(_WITHIN_S) == -number


def test_a_command_that_is_missing_ends_with_an_exit_code(start: Start, tmp_path: Path) -> None:
    assert start(guarded(os.getpid(), [str(tmp_path / "nothing")])).wait(_WITHIN_S) == 127


def test_a_termination_reaches_the_command_which_may_end_in_its_own_way(start: Start, tmp_path: Path) -> None:
    source = """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        pathlib.Path(sys.argv[1]).write_text("1\\n")
        time.sleep(600)
    """
    guardian = start(guarded(os.getpid(), python(source, tmp_path / "ready")))
    read_pid(tmp_path / "ready")
    guardian.terminate()
    assert guardian.wait(_WITHIN_S) == 143


def test_a_hangup_waits_until_the_command_can_take_it(start: Start, tmp_path: Path) -> None:
    source = """
        import pathlib, signal, sys, time
        folder = pathlib.Path(sys.argv[1])
        (folder / "ready").write_text("1\\n")
        while signal.SIGHUP not in signal.sigpending():
            time.sleep(0.01)
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(41))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
        time.sleep(600)
    """
    guardian = start(guarded(os.getpid(), python(source, tmp_path)))
    read_pid(tmp_path / "ready")
    guardian.send_signal(signal.SIGHUP)
    assert guardian.wait(_WITHIN_S) == 41


def test_what_a_killed_command_leaves_behind_is_killed(start: Start, tmp_path: Path) -> None:
    guardian = start(guarded(os.getpid(), python(FAMILY, tmp_path)))
    child, grandchild = read_pid(tmp_path / "child"), read_pid(tmp_path / "grandchild")
    os.kill(child, signal.SIGKILL)
    assert guardian.wait(_WITHIN_S) == -signal.SIGKILL
    assert not alive(child)
    assert not alive(grandchild)


def test_a_stopped_command_is_killed_with_all_its_offspring_on_demand(start: Start, tmp_path: Path) -> None:
    guardian = start(guarded(os.getpid(), python(FAMILY, tmp_path)))
    child, grandchild = read_pid(tmp_path / "child"), read_pid(tmp_path / "grandchild")
    os.kill(child, signal.SIGSTOP)
    guardian.send_signal(KILL_ALL)
    assert guardian.wait(_WITHIN_S) == -signal.SIGKILL
    assert not alive(grandchild)


def test_a_killed_guardian_takes_the_command_with_it(start: Start, tmp_path: Path) -> None:
    guardian = start(guarded(os.getpid(), python(FAMILY, tmp_path)))
    child = read_pid(tmp_path / "child")
    grandchild = read_pid(tmp_path / "grandchild")
    guardian.kill()
    eventually(lambda: not alive(child), "the command ends")
    os.kill(grandchild, signal.SIGKILL)  # in a session of its own, so it is this test's to end


def test_a_killed_supervisor_takes_everything_with_it(start: Start, tmp_path: Path) -> None:
    supervisor_source = """
        import os, subprocess, sys, time
        from wan_diloco.cli.guardian import guarded
        guardian = subprocess.Popen(guarded(os.getpid(), sys.argv[1:]), start_new_session=True)
        time.sleep(600)
    """
    supervisor = start(python(supervisor_source, *python(FAMILY, tmp_path)))
    child, grandchild = read_pid(tmp_path / "child"), read_pid(tmp_path / "grandchild")
    guardian = psutil.Process(child).ppid()
    supervisor.kill()
    eventually(lambda: not any(map(alive, (guardian, child, grandchild))), "nothing is left")


def test_a_supervisor_that_is_gone_already_gets_no_process(start: Start) -> None:
    assert start(guarded(1, python("import time; time.sleep(600)"))).wait(_WITHIN_S) == -signal.SIGKILL
