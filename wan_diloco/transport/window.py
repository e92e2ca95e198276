"""How much a stream's sender has written that the far end's application hasn't acknowledged.

"Written" never means that bytes have left: gRPC, the kernels and the far end may hold them. So the application itself
says how far it has come; that bounds what a stuck peer can make anybody hold, and it is what a deadline goes by.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from wan_diloco.errors import DeadlineExceeded
from wan_diloco.protocol.link_plan import progress_timeout_s, window_bytes

__all__ = ["Receipts", "SendWindow", "WindowPlan"]

_What = TypeVar("_What")
_STEPS: Final = 4
_SAY_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """How a stream is sent.

    Attributes:
        limit_bytes: May be written and not acknowledged.
        progress_timeout_s: After that long without an acknowledgement the stream is broken off.
    """

    limit_bytes: int
    progress_timeout_s: float

    @classmethod
    def of(cls, rate_bytes_per_s: float | None, rtt_s: float, message_bytes: int, lanes: int = 1) -> WindowPlan:
        """What a link's rate and round trip lead to.

        Args:
            rate_bytes_per_s: None if nobody knows.
            rtt_s: 0 if nobody knows.
            message_bytes: The longest message.
            lanes: Streams that share the link.
        """
        whole = window_bytes(rate_bytes_per_s, rtt_s, message_bytes)
        return cls(
            limit_bytes=window_bytes(rate_bytes_per_s, rtt_s, message_bytes, lanes),
            progress_timeout_s=progress_timeout_s(rate_bytes_per_s, rtt_s, whole, message_bytes),
        )


class Receipts:
    """The far end of a `SendWindow`: says how far the receiving application has come, four times a window.

    And each second, on a link that takes longer for a quarter: it is slow, but no deadline must take it for dead.

    Args:
        window_bytes: The sender's; 0 if it wants to hear nothing.
        say: Sends how much has come since the stream's beginning.
    """

    def __init__(self, window_bytes: int, say: Callable[[int], Awaitable[None]]) -> None:
        """Nothing has come."""
        self.window_bytes = window_bytes
        self._say = say
        self._received_bytes = self._said_bytes = 0
        self._said_s = _now_s()

    async def set_window(self, window_bytes: int) -> None:
        """The sender's window is another from now on; what is due by it is said at once."""
        self.window_bytes = window_bytes
        await self.took(0)

    async def took(self, message_bytes: int) -> None:
        """A message has been dealt with."""
        self._received_bytes += message_bytes
        is_due = _now_s() - self._said_s >= _SAY_EVERY_S
        is_full = self._received_bytes - self._said_bytes >= self.window_bytes / _STEPS
        if self.window_bytes and (is_full or is_due):
            await self.flush()

    async def flush(self) -> None:
        """Say it now."""
        self._said_s = _now_s()
        if self._received_bytes > self._said_bytes:
            self._said_bytes = self._received_bytes
            await self._say(self._received_bytes)


class SendWindow(Generic[_What]):
    """Of one stream.

    The deadline is for what the far end owes: a word for each quarter of a window, and the last one when everything
    has been sent. Less than a quarter it may keep to itself; so a transfer that is spread over a long time isn't taken
    for a stuck one.

    Owner: one event loop.

    Args:
        plan: In force from the beginning; may be replaced.
    """

    def __init__(self, plan: WindowPlan) -> None:
        """Nothing was written yet."""
        self.plan = plan
        self._written_bytes = 0
        self._acknowledged_bytes = 0
        # What was written, and up to which byte; the oldest first.
        self._under_way: deque[tuple[int, _What]] = deque()
        self._progress_s = 0.0
        self._ended = False
        self._owed_bytes = 0
        self._changed = asyncio.Event()

    @property
    def unacknowledged(self) -> list[_What]:
        """What was written and may not have arrived, in the order written."""
        return [what for _, what in self._under_way]

    async def room(self, message_bytes: int) -> None:
        """Wait until a message of that length may be written."""
        while self._under_way and self._open_bytes + message_bytes > self.plan.limit_bytes:
            await self._change()

    def wrote(self, what: _What, message_bytes: int) -> None:
        """A message is about to be written."""
        was_owed = self._is_owed
        self._written_bytes += message_bytes
        self._under_way.append((self._written_bytes, what))
        if not was_owed:
            self._progress()

    def flushed(self) -> None:
        """The far end owes a word on everything that was written so far, without a quarter being full."""
        self._owed_bytes = self._written_bytes
        self._progress()

    def ended(self) -> None:
        """Everything was written: the far end owes its last word."""
        self._ended = True
        self._progress()

    def answered(self) -> None:
        """The far end said that word: it has dealt with everything that was written."""
        self._ended = False
        self.acknowledged(self._written_bytes)

    def acknowledged(self, received_bytes: int) -> list[_What]:
        """The far end's application has that much, counted since the stream's beginning.

        Returns:
            What has arrived by that.
        """
        arrived: list[_What] = []
        if received_bytes <= self._acknowledged_bytes:
            return arrived
        self._acknowledged_bytes = min(received_bytes, self._written_bytes)
        while self._under_way and self._under_way[0][0] <= self._acknowledged_bytes:
            arrived.append(self._under_way.popleft()[1])
        self._progress()
        return arrived

    async def watch(self) -> None:
        """Wait for as long as the far end says what it owes.

        Raises:
            DeadlineExceeded: It doesn't.
        """
        self._progress()
        while True:
            if not self._is_owed:
                await self._change()
                continue
            left_s = self._progress_s + self.plan.progress_timeout_s - _now_s()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"{self._open_bytes} bytes weren't acknowledged within {self.plan.progress_timeout_s:.1f} s"
                )
            await asyncio.sleep(left_s)

    @property
    def _is_owed(self) -> bool:
        is_flushed = self._acknowledged_bytes < self._owed_bytes
        return self._ended or is_flushed or self._open_bytes >= max(1, self.plan.limit_bytes / _STEPS)

    def _progress(self) -> None:
        self._progress_s = _now_s()
        self._changed.set()

    @property
    def _open_bytes(self) -> int:
        return self._written_bytes - self._acknowledged_bytes

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
