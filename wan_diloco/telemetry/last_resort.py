"""The end of a process that was told to end and doesn't: by force, with the right exit code.

Whatever is durable is so by then, or never was acknowledged: a process that hangs in a disk or in a step hasn't more to
save than one that is killed. It isn't left to who sent the signal to find that out.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from wan_diloco.telemetry.logs import Logger

__all__ = ["WITHIN_S", "LastResort", "leave_at_once"]

WITHIN_S: Final = 27.0
"""Since the signal; schedulers kill after 30 s by default, and then nobody says why."""


class LastResort:
    """Ends the process by force when its time is over, unless it is called off.

    Thread: one of its own, that runs whatever the others do.

    Args:
        exit_code: To leave with.
        logger: Told why.
        within_s: From now on.
    """

    def __init__(self, exit_code: int, logger: Logger, within_s: float = WITHIN_S) -> None:
        """Begin to wait."""
        self._exit_code = exit_code
        self._logger = logger
        self._within_s = within_s
        self._timer = threading.Timer(within_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def call_off(self) -> None:
        """The process ends by itself; idempotent."""
        self._timer.cancel()

    def _end(self) -> None:
        text = f"it was told to end {self._within_s:.0f} s ago, and is ended by force; what was durable is so still"
        self._logger.error("ended_by_force", detail=text)
        leave_at_once(self._exit_code)


def leave_at_once(exit_code: int) -> NoReturn:
    """End the process without waiting for its threads, which may never end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)
