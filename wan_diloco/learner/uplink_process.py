"""The training process's end of its uplink: starts it, starts it again, and never waits for it.

The uplink is spawned, not forked: nothing of it is in the training process, and its death costs a reconnect.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final, Self, cast

from wan_diloco.errors import EXIT_AUTH, EXIT_CONFIG, AuthError, ConfigError, TransportError
from wan_diloco.learner.channel import LineChannel
from wan_diloco.learner.ipc import Command, Leaving, UplinkChanged, UplinkStart
from wan_diloco.protocol import serial
from wan_diloco.protocol.deadlines import GOODBYE_S, UPLINK_DYING_S, UPLINK_RESTART

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from types import TracebackType

    from wan_diloco.clock import Clock
    from wan_diloco.learner.slots import FragmentSlots
    from wan_diloco.protocol.events import BoundaryPassed

__all__ = ["UplinkProcess"]

# An uplink that lives so long was not born ill: its death begins a new count.
_HEALTHY_LIFE_S: Final = 60.0
# In a row; with the delays between them about half a minute.
_DEATHS_MAX: Final = 10
# For what no descriptor tells: a process that is about to end or to be started, a socket that was full.
_POLL_S: Final = 0.05
# A union is no class for the type checker, but it is what `serial.loads` takes.
_COMMAND: Final = cast("Any", Command)


class UplinkProcess:
    """The uplink, whichever process it is at the moment.

    Owner: the training thread.

    Args:
        slots: The shared memory, which the process is given.
        start: What a process must know that is started now.
        clock: For the pauses between deaths.
        rng: For their jitter.
        report: Told in one sentence that an uplink died.
    """

    def __init__(
        self,
        slots: FragmentSlots,
        start: Callable[[], UplinkStart],
        clock: Clock,
        rng: random.Random,
        report: Callable[[str], None],
    ) -> None:
        """Start the first one."""
        self._slots = slots
        self._start = start
        self._clock = clock
        self._rng = rng
        self._report = report
        self._deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: LineChannel | None = None
        self._started_s = clock.now_s()
        self._due_s = 0.0
        self._spawn()

    def __enter__(self) -> Self:
        """The uplink itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close("the learner stops" if error is None else "the training process failed")

    @property
    def pid(self) -> int | None:
        """Of the process that lives; None between two."""
        return None if self._process is None else self._process.pid

    @property
    def readable(self) -> tuple[int, ...]:
        """What to select on for the next command."""
        return () if self._channel is None else (self._channel.fileno(),)

    @property
    def look_again_s(self) -> float | None:
        """After how long `receive` should be called also when there is nothing to read; None for never."""
        if self._channel is None or self._channel.num_waiting:
            return _POLL_S
        return None

    def receive(self) -> list[Command]:
        """Commands that are there, without waiting; what a dying uplink still said is among them.

        A dead one is replaced, by this or a later call.

        Raises:
            TransportError: One after the other dies; or AuthError or ConfigError if one said so by its exit code.
        """
        if self._channel is not None:
            self._channel.flush()
            commands: list[Command] = [serial.loads(_COMMAND, line) for line in self._channel.receive()]
            if self._channel.ended:
                self._channel.close()
                self._channel = None
                self._due_s = self._clock.now_s() + UPLINK_DYING_S
            return commands
        if self._process is not None:
            self._bury(self._process)
        elif self._clock.now_s() >= self._due_s:
            self._spawn()
        return []

    def passed(self, boundary: BoundaryPassed) -> None:
        """Tell of a boundary; without installs and snapshots a later one may take its place."""
        if self._channel is not None:
            self._channel.send(serial.dumps(boundary), replaceable=not boundary.carries_more)

    def set_rate(self, rate_bytes_per_s: float) -> None:
        """Tell of another cap; a process that is started later is told at its start."""
        if self._channel is not None:
            self._channel.send(serial.dumps(UplinkChanged(rate_bytes_per_s=rate_bytes_per_s)))

    def close(self, reason: str) -> None:
        """Let it say goodbye, for a bounded time, and end it."""
        if self._channel is not None and self._process is not None:
            self._channel.send(serial.dumps(Leaving(reason=reason)))
            try:
                self._process.wait(GOODBYE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._channel.close()
        elif self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._slots.descriptor)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wan_diloco.learner.uplink", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            # A terminal's interrupt is for the training process, which tells the uplink in its own time.
            start_new_session=True,
        )
        theirs.close()
        self._channel = LineChannel(ours)
        self._channel.send(serial.dumps(self._start()))
        self._started_s = self._clock.now_s()

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        """Wait, step by step, until it is gone: it must not write to the shared memory when the next one starts."""
        now_s = self._clock.now_s()
        code = process.poll()
        if code is None:
            if now_s >= self._due_s:
                process.kill()
            return
        self._process = None
        self._deaths = 1 if now_s - self._started_s >= _HEALTHY_LIFE_S else self._deaths + 1
        if code == EXIT_AUTH:
            raise AuthError("the uplink process was refused")
        if code == EXIT_CONFIG:
            raise ConfigError("the uplink process can't use its configuration")
        if self._deaths >= _DEATHS_MAX:
            raise TransportError(f"the uplink process died {self._deaths} times in a row, at last with code {code}")
        self._due_s = now_s + UPLINK_RESTART.delay_s(self._deaths, self._rng)
        self._report(f"the uplink process ended with code {code}; training goes on, another is started")
