"""Signals that ask a syncer to end, from its first moment to its last.

Before it serves there is nothing to finish: such a signal ends what it is doing, by an exception. While it serves, the
service is told. After that it only has its summary to write, and a signal changes nothing. The handlers stay the same
all the time, so that a signal never does what it does by default. Whatever hangs, `last_resort` ends it.
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
        within_s: How long the process may last after it.
    """

    def __init__(self, last_resort: LastResort | None = None, within_s: float = WITHIN_S) -> None:
        """Nobody has asked.

        Args:
            last_resort: Ends the process by force; None where nobody does.
            within_s: After which it does, from the signal on.
        """
        self.received: signal.Signals | None = None
        self._last_resort = last_resort
        self.within_s = within_s
        self._clock = SystemClock()
        self._received_s = 0.0
        self._tell: Callable[[], None] | None = None
        self._early = True

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
        return max(0.0, min(most_s, self.within_s - spare_s - (self._clock.now_s() - self._received_s)))

    def serve(self, tell: Callable[[], None]) -> None:
        """From now on, on the loop that runs, whoever serves is told."""
        loop = asyncio.get_running_loop()

        def tell_loop() -> None:
            with contextlib.suppress(RuntimeError):  # it is closed: nobody serves any more
                loop.call_soon_threadsafe(tell)

        self._early, self._tell = False, tell_loop
        if self._last_resort is not None:
            self._last_resort.stand_before_loop()

    def served(self) -> None:
        """Nobody is told any more: a signal from now on is noted, and the process goes on to its end, which is near."""
        self._early, self._tell = False, None

    def signalled(self, number: int) -> None:
        """A signal came."""
        if self.received is None:
            self.received = signal.Signals(number)
            self._received_s = self._clock.now_s()
        if self._tell is not None:
            self._tell()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.signalled(number)
        if self._early:
            # Once: what is done on the way out must not be ended as well.
            self._early = False
            raise EndedEarly(self.exit_code)


@contextmanager
def ending_signals(within_s: float = WITHIN_S) -> Iterator[Ending]:
    """Catch the signals that ask the process to end; main thread only.

    Args:
        within_s: How long after such a signal the process may last.
    """
    last_resort = LastResort(get_logger("syncer"), within_s)
    ending = Ending(last_resort, within_s)
    before = {number: signal.signal(number, ending._handle) for number in _SIGNALS}  # noqa: SLF001 - its maker
    try:
        yield ending
    finally:
        last_resort.call_off()
        with contextlib.suppress(TypeError):  # a handler that isn't Python's can't be put back
            for number, handler in before.items():
                signal.signal(number, handler)
