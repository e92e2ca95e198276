"""The parent of one supervised process: nothing of it outlives the supervisor, however that one ends.

`python -m wan_diloco.cli.guardian SUPERVISOR_PID COMMAND...` runs the command, hands signals on to it, and
leaves as it left: with its exit code, or by its signal. Whatever the command started and left behind (a
learner's uplink, torchrun's ranks) is killed then. When the supervisor is gone, killed ones included, the
command is told to drain and later killed. When the guardian is killed, the kernel kills the command.

One thread, the standard library, and no signal handlers: signals are blocked and waited for, so that none can
come at a bad moment. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from wan_diloco.clock import SystemClock

__all__ = ["KILL_ALL", "guarded", "main"]

KILL_ALL: Final = signal.SIGQUIT
"""Sent to a guardian, it kills the command and all its offspring at once."""

# How long a command whose supervisor is gone may take to drain: a snapshot and a goodbye.
_ORPHAN_GRACE_S: Final = 20.0
_SUPERVISOR_GONE: Final = signal.SIGUSR1
_HANDED_ON: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_SIGNALS: Final = _HANDED_ON | {signal.SIGCHLD, KILL_ALL, _SUPERVISOR_GONE}
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_EXEC_FAILED: Final = 127


def guarded(supervisor_pid: int, command: Sequence[str]) -> list[str]:
    """The command line that runs a command under a guardian.

    Args:
        supervisor_pid: The process whose death ends the command; it must be the one that starts this.
        command: What to run; its first word is a path.
    """
    return [sys.executable, "-m", "wan_diloco.cli.guardian", str(supervisor_pid), *command]


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a command to its end.

    Args:
        arguments: The supervisor's pid, then the command.

    Raises:
        SystemExit: With the command's exit code.
    """
    supervisor_pid, command = int(arguments[0]), list(arguments[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_PDEATHSIG, _SUPERVISOR_GONE)
    # Orphans of the command become our children, which are ours to kill without a doubt about their pid.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guardian_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, guardian_pid)
    code = _watch(pid, supervisor_pid)
    _sweep()
    _leave_like(code)


def _become(command: list[str], guardian_pid: int) -> NoReturn:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It asks to read the configuration again: it waits until the command can do so, and neither ends it nor is lost.
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGHUP])
    # The guardian may have died before the kernel was told what to do then.
    if os.getppid() == guardian_pid:
        with contextlib.suppress(OSError):
            os.execv(command[0], command)  # noqa: S606 - the very command that the supervisor gave
        os.write(2, f"wan-diloco: can't run {command[0]}\n".encode())
    os._exit(_EXEC_FAILED)


def _watch(pid: int, supervisor_pid: int) -> int:
    """Hand signals on until the command has ended; its exit code, negative for a signal."""
    clock = SystemClock()
    deadline_s: float | None = None
    if os.getppid() != supervisor_pid:
        os.kill(pid, signal.SIGKILL)
    while True:
        wait_s = 3600.0 if deadline_s is None else max(0.0, deadline_s - clock.now_s())
        caught = signal.sigtimedwait(_SIGNALS, wait_s)
        number = None if caught is None else caught.si_signo
        if number == signal.SIGCHLD:
            ended = _reap()
            if pid in ended:
                return ended[pid]
        elif number in _HANDED_ON:
            os.kill(pid, number)
        elif number == _SUPERVISOR_GONE:
            # The kernel tells when the *thread* that started us ends, so ask whether the process did.
            if os.getppid() != supervisor_pid:
                os.kill(pid, signal.SIGTERM)
                deadline_s = clock.now_s() + _ORPHAN_GRACE_S
        elif number == KILL_ALL or deadline_s is not None:
            os.kill(pid, signal.SIGKILL)
            deadline_s = None


def _reap() -> dict[int, int]:
    """The children that have ended, and how."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _sweep() -> None:
    """Kill what the command left behind; each death may hand us further orphans."""
    while left := _children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    me = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid ...", where the name may hold spaces and parentheses
                fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == me:
                    found.append(int(entry.name))
    return found


def _leave_like(code: int) -> NoReturn:
    if code < 0:
        # The command has dumped its core already, where it was to.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
        # Only where the signal didn't end us: what a shell would say.
        code = 128 - code
    sys.exit(code)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    main(sys.argv[1:])
