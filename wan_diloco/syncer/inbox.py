"""What waits to be handled by the machine: in order, bounded, a newer report in place of an older one."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from wan_diloco.protocol.events import LearnerSaid, SessionId, SyncerEvent
from wan_diloco.protocol.messages import Report

__all__ = ["Inbox"]

# Far beyond what an honest learner says between two visits of the loop; also while a full disk is waited out,
# since reports replace each other and all else waits for an answer.
_WAITING_MAX: Final = 1000


class Inbox:
    """A queue of events.

    Owner: the event loop.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._events: dict[int, SyncerEvent] = {}
        self._reports: dict[SessionId, int] = {}
        self._said: Counter[SessionId] = Counter()
        self._next = 0
        self.wake = asyncio.Event()

    def __len__(self) -> int:
        """How many events wait."""
        return len(self._events)

    def put(self, event: SyncerEvent) -> bool:
        """Add an event.

        Returns:
            False for a message too many of one session: it isn't taken, and the session should end.
        """
        if isinstance(event, LearnerSaid):
            if self._said[event.session] >= _WAITING_MAX:
                return False
            if isinstance(event.message, Report):
                older = self._reports.pop(event.session, None)
                if older is not None:
                    del self._events[older]
                    self._said[event.session] -= 1
                self._reports[event.session] = self._next
            self._said[event.session] += 1
        self._events[self._next] = event
        self._next += 1
        self.wake.set()
        return True

    def take(self) -> list[SyncerEvent]:
        """All that waits, oldest first; nothing waits after."""
        events = list(self._events.values())
        self._events.clear()
        self._reports.clear()
        self._said.clear()
        self.wake.clear()
        return events

    async def wait(self, timeout_s: float | None) -> None:
        """Until something waits, `wake` is set otherwise, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wake.wait()
        except TimeoutError:
            pass
