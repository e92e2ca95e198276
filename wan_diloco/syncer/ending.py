"""Signals that ask a syncer to end, from its first moment to its last.

Before it serves there is nothing to finish: such a signal ends what it is doing, by an exception. While it serves, the
service is told. After that it only has its summary to write, and a signal changes nothing. At no moment does it hang:
see `last_resort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wan_diloco.clock import SystemClock
from wan_diloco.telemetry.last_resort import WITHIN_S, LastResort
from wan_diloco.telemetry.logs import get_logger

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["EndedEarly", "Ending", "ending_signals"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class EndedEarly(SystemExit):
    """A signal to end came before the syncer served; the process leaves with its exit code unless it is caught."""


class Ending:
    """What is known of the process's end; see `ending_signals`.

    Owner: the main thread.

    Attributes:
        received: The signal that asked for it; None before.
    """

    def __init__(self) -> None:
        """Nobody has asked."""
        self.received: signal.Signals | None = None
        self._clock = SystemClock()
        self._received_s = 0.0
        self._tell: Callable[[], None] | None = None
        self._early = True
        self._last_resort: LastResort | None = None

    @property
    def exit_code(self) -> int:
        """Of a process that the signal ended."""
        assert self.received is not None, "nobody has asked for the end"
        return 128 + self.received

    def left_s(self, most_s: float, *, spare_s: float) -> float:
        """How long something at the end may take.

        Args:
            most_s: Where nobody waits for the end.
            spare_s: What comes after it takes that long, and the process is to end by itself.
        """
        if self.received is None:
            return most_s
        return max(0.0, min(most_s, WITHIN_S - spare_s - (self._clock.now_s() - self._received_s)))

    def serve(self, tell: Callable[[], None]) -> None:
        """From now on, on the loop that runs, whoever serves is told."""
        loop = asyncio.get_running_loop()
        self._early, self._tell = False, tell
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.signalled, number)

    def served(self) -> None:
        """Nobody is told any more.

        Ordering: on the loop. It takes its handlers with it when it is closed; what comes in between waits for `hold`.
        """
        self._tell = None
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def hold(self) -> None:
        """A signal from now on is noted, and the process goes on to its end, which is near."""
        self._early = False
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def signalled(self, number: int) -> None:
        """A signal came."""
        if self.received is None:
            self.received = signal.Signals(number)
            self._received_s = self._clock.now_s()
            self._last_resort = LastResort(self.exit_code, get_logger("syncer"))
        if self._tell is not None:
            self._tell()

    def call_off(self) -> None:
        """The process, or what is left of it, is somebody else's."""
        if self._last_resort is not None:
            self._last_resort.call_off()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.signalled(number)
        if self._early:
            # Once: what is done on the way out must not be ended as well.
            self._early = False
            raise EndedEarly(self.exit_code)


@contextmanager
def ending_signals() -> Iterator[Ending]:
    """Catch the signals that ask the process to end; main thread only."""
    ending = Ending()
    before = {number: signal.signal(number, ending._handle) for number in _SIGNALS}  # noqa: SLF001 - its maker
    try:
        yield ending
    finally:
        ending.call_off()
        with contextlib.suppress(TypeError):  # a handler that isn't Python's can't be put back
            for number, handler in before.items():
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
