"""What the end of a process means, and when it is started again: pure functions of exit codes and times."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import EXIT_AUTH, EXIT_CONFIG, EXIT_OK, EXIT_TEMPORARY, EXIT_USAGE
from wan_diloco.protocol.retry import RetryPolicy

if TYPE_CHECKING:
    import random

__all__ = ["Meaning", "RestartPolicy", "describe_exit", "meaning_of"]

_RETRY: Final = RetryPolicy(initial_s=0.5, max_s=10.0)
_HOPELESS: Final = frozenset({EXIT_USAGE, EXIT_AUTH, EXIT_CONFIG})


class Meaning(Enum):
    """What the end of a process asks for."""

    FINISHED = auto()
    RESTART = auto()
    HOPELESS = auto()


def meaning_of(exit_code: int) -> Meaning:
    """What an exit code asks for.

    Wrong words, a refused identity and a wrong configuration will be as wrong the next time. Everything else,
    crashes and kills included, is worth another try, since no state is lost by one; the policy bounds the tries.

    Args:
        exit_code: Of a process that nobody here told to end; negative for a signal.
    """
    if exit_code == EXIT_OK:
        return Meaning.FINISHED
    return Meaning.HOPELESS if exit_code in _HOPELESS else Meaning.RESTART


def describe_exit(exit_code: int) -> str:
    """An exit code for a person: "killed by SIGKILL", "asked to be restarted", "exit code 70"."""
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return "asked to be restarted" if exit_code == EXIT_TEMPORARY else f"exit code {exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a process may die early, and how long it stays down after each death.

    Attributes:
        retry: The delays.
        quick_s: A life shorter than this is a quick failure; a longer one makes good for all before it.
        quick_failures_max: At so many quick failures in a row the process is given up.
    """

    retry: RetryPolicy = _RETRY
    quick_s: float = 30.0
    quick_failures_max: int = 6

    def failures_after(self, failures: int, lived_s: float) -> int:
        """Quick failures in a row, this death included; one that came late counts as the first."""
        return failures + 1 if lived_s < self.quick_s else 1

    def delay_s(self, failures: int, rng: random.Random) -> float | None:
        """How long to wait before the next life; None to give up.

        Args:
            failures: Quick failures in a row, at least 1.
            rng: The jitter's chance.
        """
        return None if failures >= self.quick_failures_max else self.retry.delay_s(failures, rng)
