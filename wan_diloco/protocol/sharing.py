"""Who goes next where several transfers share a link, and several links share a total: fair queueing, told the time.

Start-time fair queueing (Goyal, Vin, Cheng 1996) at two levels. Each message carries the tag at which its service
should start; the smallest tag goes first, and moves on by bytes / weight. Who was idle begins at the tag of now: it has
no claim on the past.

Among the links of a trunk weights are equal: a greedy or slow peer takes nothing from the others. Among the transfers
of a link the one that is due first weighs more, since what is merged late is worth less, and no other ever waits for
more than that: `docs/adr/0008-who-goes-first-on-a-link.md`.

Law: what leaves over a link, and over a trunk, keeps `TokenBucket`'s law.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wan_diloco.protocol.pacing import TICK_S, Cap, TokenBucket

__all__ = ["Flow", "SharedLink", "Trunk"]

Ticket = TypeVar("Ticket")

# Of the transfer that is due first, where each other one has 1. Of two on a link that is too narrow for both, the first
# takes an eighth longer than alone, instead of twice as long.
_FIRST_WEIGHT = 8.0


@dataclass(slots=True, eq=False)
class Flow(Generic[Ticket]):
    """One transfer's messages.

    Attributes:
        due_s, order: When its last byte should have left; among those due at the same time, the lower goes first.
        tag: Where its next message stands in the order.
        waiting: Messages that ask to leave, in order, as (bytes, ticket).
    """

    due_s: float
    order: int = 0
    tag: float = 0.0
    waiting: deque[tuple[int, Ticket]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class SharedLink(Generic[Ticket]):
    """One peer's link; made by `Trunk.link`.

    Attributes:
        bucket: None lets everything through.
        tag: Where its next message stands in the order of the trunk.
        clock: The tag of its last message: where who was idle begins.
        flows: Those with a message that waits.
    """

    bucket: TokenBucket | None
    tag: float = 0.0
    clock: float = 0.0
    flows: list[Flow[Ticket]] = field(default_factory=list)

    def next(self) -> Flow[Ticket]:
        """Whose message is next; some must wait."""
        return min(self.flows, key=lambda flow: (flow.tag, flow.due_s, flow.order))

    def wait_s(self, now_s: float) -> float:
        """How long its own cap lets the next message wait."""
        return 0.0 if self.bucket is None else self.bucket.wait_s(self.next().waiting[0][0], now_s)

    def pop(self) -> tuple[int, Ticket]:
        """Take the next message, and move its flow's tag on."""
        flow = self.next()
        is_first = flow is min(self.flows, key=lambda other: (other.due_s, other.order))
        amount_bytes, ticket = flow.waiting.popleft()
        self.clock = flow.tag
        flow.tag += amount_bytes / (_FIRST_WEIGHT if is_first else 1.0)
        if not flow.waiting:
            self.flows.remove(flow)
        return amount_bytes, ticket


class Trunk(Generic[Ticket]):
    """Links under one total; with a single link it is that link's queue.

    Owner: one pacer. Call `release` whenever something was asked or withdrawn, a cap changed, or `wait_s` is over.

    Args:
        cap: Of all links together; None for none.
    """

    def __init__(self, cap: Cap | None = None) -> None:
        """No link yet."""
        self._bucket = None if cap is None else TokenBucket(cap)
        self._links: list[SharedLink[Ticket]] = []
        self._clock = 0.0

    @property
    def cap(self) -> Cap | None:
        """Of all links together."""
        return None if self._bucket is None else self._bucket.cap

    def set_cap(self, cap: Cap | None, now_s: float) -> None:
        """Change the total from now on."""
        self._bucket = _changed(self._bucket, cap, now_s)

    def set_link_cap(self, link: SharedLink[Ticket], cap: Cap | None, now_s: float) -> None:
        """Change a link's own cap from now on."""
        link.bucket = _changed(link.bucket, cap, now_s)

    def ask(self, link: SharedLink[Ticket], flow: Flow[Ticket], amount_bytes: int, ticket: Ticket) -> None:
        """A message of a flow asks to leave over a link."""
        if not link.flows:
            link.tag = max(link.tag, self._clock)
            self._links.append(link)
        if not flow.waiting:
            flow.tag = max(flow.tag, link.clock)
            link.flows.append(flow)
        flow.waiting.append((amount_bytes, ticket))

    def withdraw(self, link: SharedLink[Ticket], flow: Flow[Ticket], ticket: Ticket) -> None:
        """A message doesn't want to leave any more; one that has left stays spent."""
        kept = [entry for entry in flow.waiting if entry[1] is not ticket]
        if len(kept) == len(flow.waiting):
            return
        flow.waiting = deque(kept)
        if not kept:
            link.flows.remove(flow)
            self._forget_idle(link)

    def spend(self, link: SharedLink[Ticket], amount_bytes: int, now_s: float) -> None:
        """Note bytes that left over a link without asking."""
        for bucket in (link.bucket, self._bucket):
            if bucket is not None:
                bucket.take(amount_bytes, now_s)

    def release(self, now_s: float) -> list[Ticket]:
        """Let go of all that may leave now, in order."""
        released: list[Ticket] = []
        while (link := self._next(now_s)) is not None and self._total_wait_s(link, now_s) <= TICK_S:
            self._clock = link.tag
            amount_bytes, ticket = link.pop()
            link.tag += amount_bytes
            self._forget_idle(link)
            self.spend(link, amount_bytes, now_s)
            released.append(ticket)
        return released

    def wait_s(self, now_s: float) -> float | None:
        """After how long `release` may let go of something; None when nothing asks."""
        link = self._next(now_s)
        if link is not None:
            return self._total_wait_s(link, now_s)
        return min((link.wait_s(now_s) for link in self._links), default=None)

    def _next(self, now_s: float) -> SharedLink[Ticket] | None:
        """The link whose message is next at the total, among those whose own caps are content.

        It is chosen before it is asked whether the total has room: small messages would else always find room first.
        """
        best: SharedLink[Ticket] | None = None
        best_tag = math.inf
        for link in self._links:
            if link.tag < best_tag and link.wait_s(now_s) <= TICK_S:
                best, best_tag = link, link.tag
        return best

    def _total_wait_s(self, link: SharedLink[Ticket], now_s: float) -> float:
        return 0.0 if self._bucket is None else self._bucket.wait_s(link.next().waiting[0][0], now_s)

    def _forget_idle(self, link: SharedLink[Ticket]) -> None:
        if not link.flows:
            self._links.remove(link)


def _changed(bucket: TokenBucket | None, cap: Cap | None, now_s: float) -> TokenBucket | None:
    if cap is None:
        return None
    if bucket is None:
        return TokenBucket(cap)
    bucket.set_cap(cap, now_s)
    return bucket
