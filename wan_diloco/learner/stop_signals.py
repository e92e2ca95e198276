"""SIGTERM and SIGINT as a wish that is seen between two steps, and waits that such a wish ends."""

from __future__ import annotations

import select
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["StopSignals", "stop_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Which signal came, if any; see `stop_signals`."""

    def __init__(self, wake: socket.socket) -> None:
        """None has come."""
        self._wake = wake
        self.received: signal.Signals | None = None

    def wait(self, timeout_s: float | None, *readable: int) -> None:
        """Wait until a descriptor can be read, a signal comes, or the time is over.

        Args:
            timeout_s: None waits without bound.
            readable: Descriptors.
        """
        if self.received is None:
            select.select([self._wake.fileno(), *readable], [], [], None if timeout_s is None else max(0.0, timeout_s))

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal; the same one once more ends the process at once, as it would by default."""
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Catch the signals that ask a process to end; main thread only."""
    wake, signalled = socket.socketpair()
    wake.setblocking(False)
    signalled.setblocking(False)
    signals = StopSignals(wake)
    handlers = {number: signal.signal(number, signals.handle) for number in _SIGNALS}
    # The interpreter writes a byte here from within the signal: so a select returns, whenever it was begun.
    wakeup_before = signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wake.close()
        signalled.close()
