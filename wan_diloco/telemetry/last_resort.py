"""The end of a process that was told to end and doesn't: by force, with the right exit code.

Whatever is durable is so by then, or never was acknowledged: a process that hangs in a disk or in a step hasn't more to
save than one that is killed. It isn't left to who sent the signal to find that out.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Final, NoReturn

from wan_diloco.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from wan_diloco.telemetry.logs import Logger

__all__ = ["WITHIN_S", "LastResort", "leave_at_once"]

WITHIN_S: Final = 27.0
"""Since the signal; schedulers kill after 30 s by default, and then nobody says why."""

_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT})
# For last words, where nobody may read them any more.
_WORDS_S: Final = 1.0


class LastResort:
    """Ends the process by force when a signal told it to end and it is still there a while later.

    A thread of ours hears of each signal at once, through the interpreter's wakeup descriptor, whatever the main thread
    does: also while it is in a call that doesn't come back, where no handler of Python's runs. (Only a call that keeps
    the interpreter's lock for ever stops this thread too; torch's give it up.) There must be handlers of Python's for
    the signals; what they do is their owner's.

    Thread: made and called off on the main one.

    Args:
        logger: Told why.
        within_s: From the signal on.
    """

    def __init__(self, logger: Logger, within_s: float = WITHIN_S) -> None:
        """Begin to listen."""
        self._logger = logger
        self._within_s = within_s
        self._clock = SystemClock()
        self._heard, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._to: int | None = None
        self._over = False
        self._before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="last-resort", daemon=True)
        self._thread.start()

    def pass_on(self, descriptor: int) -> None:
        """Write each signal's number there too, as the interpreter would; until it is called off.

        Args:
            descriptor: Doesn't block; may be closed afterwards.
        """
        earlier, self._to = self._to, os.dup(descriptor)
        if earlier is not None:
            os.close(earlier)

    def stand_before_loop(self) -> None:
        """Be told before the event loop that runs, which has put its own descriptor in place of ours."""
        theirs = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if theirs not in (-1, self._wakeup.fileno()):
            self.pass_on(theirs)

    def call_off(self) -> None:
        """The process ends by itself, or what is left of it is somebody else's; idempotent."""
        if self._over:
            return
        self._over = True
        signal.set_wakeup_fd(self._before)
        self._wakeup.close()
        self._thread.join()
        self._heard.close()
        if self._to is not None:
            os.close(self._to)

    def _listen(self) -> None:
        number, until_s = 0, 0.0
        while True:
            left_s = max(0.0, until_s - self._clock.now_s()) if number else None
            if not select.select([self._heard], [], [], left_s)[0]:
                self._end(number)
            if not (numbers := self._heard.recv(64)):
                return
            if self._to is not None:
                # The loop may be closed by now, or have enough to read.
                with contextlib.suppress(OSError):
                    os.write(self._to, numbers)
            if not number and (number := next((each for each in numbers if each in _SIGNALS), 0)):
                until_s = self._clock.now_s() + self._within_s

    def _end(self, number: int) -> NoReturn:
        text = f"it was told to end {self._within_s:.0f} s ago, and is ended by force; what was durable is so still"
        leave_at_once(128 + number, lambda: self._logger.error("ended_by_force", detail=text))


def leave_at_once(exit_code: int, say: Callable[[], None] | None = None) -> NoReturn:
    """End the process without waiting for its threads, which may never end.

    Whoever should read its last words isn't waited for either, or not for long.

    Args:
        exit_code: To leave with.
        say: Says why.
    """

    def speak() -> None:
        # A disk that is full refuses, and so does a pipe that nobody has any more; a full pipe holds whoever writes.
        for word in (say, sys.stdout.flush, sys.stderr.flush):
            if word is not None:
                with contextlib.suppress(Exception):
                    word()

    try:
        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        speaker.join(_WORDS_S)
    finally:
        os._exit(exit_code)


def _forget_parent() -> None:
    # What a child's signals write would end its parent.
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_parent)
