"""The processes of a run as faults see them: which one it is now, to be signalled, and how it fares.

A process is known by its pid and when it began, so that no signal reaches another that was given the same pid.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import Final

import psutil

__all__ = ["Condition", "Victim", "command_of", "uplink_of"]

_UPLINK: Final = "wan_diloco.learner.uplink"
_FROZEN: Final = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})
_DEAD: Final = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What can be seen of a process at a moment.

    Attributes:
        runs: It is there and not stopped.
        processor_s: Time that it has used.
    """

    runs: bool
    processor_s: float


class Victim:
    """A process that lives, or lived."""

    def __init__(self, process: psutil.Process) -> None:
        """Signal nothing yet."""
        self._process = process

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def __eq__(self, other: object) -> bool:
        """Whether it is the very same process."""
        return isinstance(other, Victim) and self._process == other._process

    def __hash__(self) -> int:
        """By process."""
        return hash(self._process)

    def send(self, number: signal.Signals) -> bool:
        """Signal it; False when it is gone, or not ours to signal."""
        try:
            self._process.send_signal(number)
        except psutil.Error:
            return False
        return True

    def condition(self) -> Condition | None:
        """How it is; None when it is gone, or can't be looked at."""
        try:
            # The only question that asks for more than the pid, which another may have by now.
            if not self._process.is_running():
                return None
            with self._process.oneshot():
                status = self._process.status()
                times = self._process.cpu_times()
        except psutil.Error:
            return None
        if status in _DEAD:
            return None
        return Condition(runs=status not in _FROZEN, processor_s=times.user + times.system)


def command_of(guardian_pid: int | None) -> Victim | None:
    """The process below a guardian; None while there is none."""
    if guardian_pid is None:
        return None
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(guardian_pid).children():
            # Orphans of the command are the guardian's children too, for a moment.
            if _UPLINK not in child.cmdline() and child.status() not in _DEAD:
                return Victim(child)
    return None


def uplink_of(learner: Victim | None) -> Victim | None:
    """The uplink of a learner; None while there is none."""
    if learner is None:
        return None
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(learner.pid).children():
            if _UPLINK in child.cmdline() and child.status() not in _DEAD:
                return Victim(child)
    return None
