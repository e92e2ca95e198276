"""Control messages on their way out: bounded, never blocking, and without outdated ones."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Outbox"]


class Outbox:
    """A queue between who says things and the one task that writes them.

    Owner: one event loop.

    Args:
        replaceable: A message of this type replaces an older one that has not left yet.
        length_max: How many may wait.
    """

    def __init__(self, replaceable: type, length_max: int) -> None:
        """Nothing waits."""
        self._replaceable = replaceable
        self._length_max = length_max
        self._queue: deque[tuple[object, bytes]] = deque()
        self._closed = False
        self._wake = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether nothing more goes in."""
        return self._closed

    def put(self, message: object, data: bytes) -> bool:
        """Queue a message; after `close` it is dropped.

        Args:
            message: What it is.
            data: Its bytes.

        Returns:
            False when there is no room: the far end doesn't read.
        """
        if self._closed:
            return True
        if isinstance(message, self._replaceable):
            self._queue = deque(entry for entry in self._queue if not isinstance(entry[0], self._replaceable))
        if len(self._queue) >= self._length_max:
            return False
        self._queue.append((message, data))
        self._wake.set()
        return True

    def close(self) -> None:
        """Let out what is in, and nothing after it; idempotent."""
        self._closed = True
        self._wake.set()

    async def get(self) -> bytes | None:
        """The next message to write; None when closed and empty. One task at a time."""
        while not self._queue:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()[1]
