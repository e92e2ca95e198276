"""Counts and logs what is refused; both stay bounded, however much is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from wan_diloco.clock import Clock
from wan_diloco.protocol.events import SendToLearner, SessionId, SyncerEffect, SyncerEvent, UploadFailed
from wan_diloco.protocol.messages import ContributionRefused, RefusalReason, Refused

__all__ = ["Refusals"]

# Of the same reason, one in so many seconds becomes a line.
_SILENCE_S: Final = 10.0


class Refusals:
    """What was refused lately.

    The machine counts what it refuses itself; what the transport refuses is collected here, and told to the machine
    once in a while, so that a flood of garbage is no flood of events.

    Owner: the event loop.

    Args:
        clock: As the service's.
        tell: Takes an event's name and its detail.
    """

    def __init__(self, clock: Clock, tell: Callable[[str, str], None]) -> None:
        """Nothing was refused yet."""
        self._clock = clock
        self._tell = tell
        self._calls: Counter[RefusalReason] = Counter()
        self._silent_until_s: dict[tuple[str, RefusalReason], float] = {}
        self._unsaid: Counter[tuple[str, RefusalReason]] = Counter()

    def call(self, peer: str, reason: RefusalReason, detail: str) -> None:
        """The transport refused something."""
        self._calls[reason] += 1
        self._say("call_refused", peer, reason, detail)

    def take(self) -> list[tuple[RefusalReason, int]]:
        """What the transport refused since the last time."""
        taken = sorted(self._calls.items())
        self._calls.clear()
        return taken

    def decided(self, event: SyncerEvent, effects: Iterable[SyncerEffect], peer_of: Callable[[SessionId], str]) -> None:
        """The machine handled an event: log what it refused."""
        if isinstance(event, UploadFailed):
            # Its sender may be gone; nobody is told then, but it happened.
            self._say("contribution_rejected", event.header.key.learner_id, event.reason, event.detail)
            return
        for effect in effects:
            if not isinstance(effect, SendToLearner):
                continue
            message, peer = effect.message, peer_of(effect.session)
            if isinstance(message, ContributionRefused):
                self._say("contribution_rejected", peer, message.reason, message.detail)
            elif isinstance(message, Refused):
                self._say("learner_refused", peer, message.reason, message.detail)

    def _say(self, name: str, who: str, reason: RefusalReason, detail: str) -> None:
        kind, now_s = (name, reason), self._clock.now_s()
        if now_s < self._silent_until_s.get(kind, now_s):
            self._unsaid[kind] += 1
            return
        self._silent_until_s[kind] = now_s + _SILENCE_S
        unsaid = self._unsaid.pop(kind, 0)
        more = f" (and {unsaid} more of its kind before)" if unsaid else ""
        self._tell(name, f"{who}: {reason}: {detail}{more}")
