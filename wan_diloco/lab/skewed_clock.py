"""Processes whose clock begins elsewhere: a time namespace of Linux, in which monotonic time is ahead.

It is the clock that decisions rest on. Nobody can have a wall clock of its own, and nothing rests on that one.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["skewed", "why_no_skew"]

_COMMAND_S: Final = 20.0
_TRIED_S: Final = 3600.0


def skewed(offset_s: float) -> tuple[str, ...]:
    """What to put before a command, whose first word is a path, so that its monotonic clock is ahead.

    Args:
        offset_s: By how much; whole seconds count.
    """
    ahead = str(round(offset_s))
    return (shutil.which("unshare") or "unshare", "--time", "--monotonic", ahead, "--boottime", ahead, "--")


def why_no_skew() -> str:
    """Why no process can have such a clock here; empty when one can."""
    if shutil.which("unshare") is None or shutil.which("cat") is None:
        return "there is no unshare command"
    now_s, ahead_s = _uptime_s(()), _uptime_s(skewed(_TRIED_S))
    if now_s is None or ahead_s is None or not 0.5 * _TRIED_S < ahead_s - now_s < 1.5 * _TRIED_S:
        return "the system gives nobody a time namespace here"
    return ""


def _uptime_s(before: Sequence[str]) -> float | None:
    words = [*before, shutil.which("cat") or "cat", "/proc/uptime"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    return float(done.stdout.split()[0]) if done.returncode == 0 and done.stdout.split() else None
