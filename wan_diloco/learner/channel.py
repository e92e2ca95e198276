"""Lines over a socket, for the side that must never wait: the training process.

Nothing here blocks. What the far end doesn't take waits in memory, and that stays bounded: a line that is only
the newest of its kind gives way to the next one as long as nothing of it has been sent.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import DecodeError

if TYPE_CHECKING:
    import socket

__all__ = ["LineChannel"]

_READ_BYTES: Final = 1 << 16
# The longest line is a start with its configuration and thousands of fragments; an endless one is no line.
_LINE_BYTES_MAX: Final = 1 << 26


@dataclass(slots=True)
class _Waiting:
    data: memoryview
    replaceable: bool


class LineChannel:
    """One end of a stream socket, in lines.

    Args:
        sock: Connected; made non-blocking and owned from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take the socket over."""
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._waiting: deque[_Waiting] = deque()
        self.ended = False
        """Whether the far end is gone: nothing more will come, and nothing more arrives there."""

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self._socket.fileno()

    @property
    def num_waiting(self) -> int:
        """Lines that the far end hasn't taken yet."""
        return len(self._waiting)

    def send(self, line: bytes, *, replaceable: bool = False) -> None:
        """Send a line after those before it, as soon as the far end takes it.

        Args:
            line: Without its end.
            replaceable: The next line may stand in for this one.
        """
        if self._waiting and self._waiting[-1].replaceable:
            self._waiting.pop()
        self._waiting.append(_Waiting(memoryview(line + b"\n"), replaceable))
        self.flush()

    def flush(self) -> None:
        """Send what the far end takes now."""
        while self._waiting and not self.ended:
            first = self._waiting[0]
            try:
                sent = self._socket.send(first.data)
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            if sent == len(first.data):
                self._waiting.popleft()
            else:
                # A line that has begun must be finished.
                first.data, first.replaceable = first.data[sent:], False

    def receive(self) -> list[bytes]:
        """The whole lines that are there, without their ends; `ended` is set when there will be no more.

        Raises:
            DecodeError: A line doesn't end.
        """
        while not self.ended:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._received += data
            if len(self._received) > _LINE_BYTES_MAX:
                raise DecodeError("garbage", "a line of the uplink doesn't end")
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        return lines

    def close(self) -> None:
        """End it; what waits is dropped."""
        self.ended = True
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self._socket.close()
