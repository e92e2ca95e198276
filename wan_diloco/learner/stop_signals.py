"""Signals as wishes that are seen between two steps, and waits that such a wish ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wan_diloco.telemetry.last_resort import LastResort
from wan_diloco.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["StopSignals", "stop_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Which signal came, if any; see `stop_signals`.

    Attributes:
        received: The one that asks to end.
    """

    def __init__(self, wake: socket.socket) -> None:
        """None has come."""
        self._wake = wake
        self.received: signal.Signals | None = None
        self._reload = False
        self._pid = os.getpid()

    def fileno(self) -> int:
        """The descriptor that a signal makes readable."""
        return self._wake.fileno()

    def wait(self, timeout_s: float | None, *readable: int) -> None:
        """Wait until a descriptor can be read, a signal comes, or the time is over.

        Args:
            timeout_s: None waits without bound.
            readable: Descriptors.
        """
        if self.received is None:
            select.select([self._wake.fileno(), *readable], [], [], None if timeout_s is None else max(0.0, timeout_s))

    def take_reload(self) -> bool:
        """Whether SIGHUP came since this was asked last."""
        if not self._reload:
            return False
        self._reload = False
        # Waits would end at once from now on. What a signal to stop wrote isn't missed: `received` is there.
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(64):
                pass
        return True

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal; the same one to stop once more ends the process at once, as it would by default."""
        if os.getpid() != self._pid:
            # A fork of the process, which nobody asks what it wishes.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if number == signal.SIGHUP:
            self._reload = True
            return
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Catch the signals that ask a process to end, or to read its configuration again; main thread only.

    A step may take longer than anybody waits for a process that was told to end: then it is ended by force.
    """
    wake, signalled = socket.socketpair()
    wake.setblocking(False)
    signalled.setblocking(False)
    signals = StopSignals(wake)
    handlers = {number: signal.signal(number, signals.handle) for number in _SIGNALS}
    last_resort = LastResort(get_logger("learner"))
    # So a select returns, whenever it was begun, and whichever thread the signal came to.
    last_resort.pass_on(signalled.fileno())
    # Who started us may have it wait until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    try:
        yield signals
    finally:
        last_resort.call_off()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wake.close()
        signalled.close()
