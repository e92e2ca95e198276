"""Links and calls of the memory network."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from wan_diloco.errors import PeerUnavailable, TransportError
from wan_diloco.transport.lifetime import Lifetime
from wan_diloco.transport.streams import Metadata

__all__ = ["Call", "Line", "Link"]

# Messages on their way or not yet read, per direction of a call: stands for flow control.
_WINDOW_MESSAGES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One learner's way to the syncer.

    Attributes:
        delay_s: Each way.
        jitter_s: Added to the delay of each message, uniform between 0 and this; order is kept within a call.
        uplink_bytes_per_s, downlink_bytes_per_s: Of bulk; None for no limit.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no link does."""
        rates = (self.uplink_bytes_per_s, self.downlink_bytes_per_s)
        if min(self.delay_s, self.jitter_s) < 0 or any(rate is not None and rate <= 0 for rate in rates):
            raise ValueError(f"no link is like this: {self}")


class Line:
    """The state of a link: whether it is up, when it is free, and the calls over it.

    Owner: the network.
    """

    def __init__(self, link: Link, rng: random.Random) -> None:
        """Up, and idle."""
        self.link = link
        # Asked for each control message: (by the learner, its bytes) -> lose it?
        self.drops: list[Callable[[bool, bytes], bool]] = []
        self._rng = rng
        self._up = True
        self._free_s = {True: 0.0, False: 0.0}
        # A dict for its order.
        self._calls: dict[Call, None] = {}

    @property
    def up(self) -> bool:
        """Whether anything gets through."""
        return self._up

    def cut(self, noticed_after_s: float) -> None:
        """Lose what is under way; break the calls after a while."""
        self._up = False
        for call in list(self._calls):
            call.silence()
        asyncio.get_running_loop().call_later(noticed_after_s, self._break_all, list(self._calls), "the link is cut")

    def restore(self) -> None:
        """Let things through again."""
        self._up = True

    def break_calls(self, reason: str, *, finished_too: bool = True) -> None:
        """Break all calls at both ends, now; those that the server has finished only if wished."""
        self._break_all([call for call in self._calls if finished_too or not call.finished], reason)

    def join(self, call: Call) -> None:
        """A call begins; when the link is down, it breaks before it gets anywhere."""
        self._calls[call] = None
        if not self._up:
            asyncio.get_running_loop().call_later(self.link.delay_s, call.break_off, "the link is cut")

    def leave(self, call: Call) -> None:
        """A call is over."""
        self._calls.pop(call, None)

    def after_delay(self, call: Call, action: Callable[[], None]) -> None:
        """Do something at the far end, if the call lives until then."""

        def arrive() -> None:
            if self._up and not call.over:
                action()

        asyncio.get_running_loop().call_later(self.link.delay_s, arrive)

    def times(self, message_bytes: int, *, request: bool, control: bool) -> tuple[float, float]:
        """When a message will have left, and when it arrives.

        Control has a connection of its own: it never waits behind bulk.
        """
        now_s = asyncio.get_running_loop().time()
        rate = self.link.uplink_bytes_per_s if request else self.link.downlink_bytes_per_s
        took_s = 0.0 if rate is None else message_bytes / rate
        jitter_s = self._rng.uniform(0.0, self.link.jitter_s) if self.link.jitter_s else 0.0
        if control:
            return now_s, now_s + took_s + self.link.delay_s + jitter_s
        left_s = max(now_s, self._free_s[request]) + took_s
        self._free_s[request] = left_s
        return left_s, left_s + self.link.delay_s + jitter_s

    @staticmethod
    def _break_all(calls: list[Call], reason: str) -> None:
        for call in calls:
            call.break_off(reason)


def _nothing() -> None:
    pass


class _Pipe:
    """One direction of a call: messages in order, then an end or an error."""

    def __init__(self, line: Line, *, request: bool, control: bool) -> None:
        self._line = line
        self._request = request
        self._control = control
        self._coming: deque[tuple[bytes | None, TransportError | None]] = deque()
        self._here: deque[bytes] = deque()
        self._latest_s = 0.0
        self._ended = False
        self._problem: TransportError | None = None
        self._finished = False
        self._silent = False
        self._changed = asyncio.Event()
        self._when_over: Callable[[], None] = _nothing

    async def write(self, message: bytes) -> None:
        self._refuse_if_over()
        while len(self._coming) + len(self._here) >= _WINDOW_MESSAGES:
            self._changed.clear()
            await self._changed.wait()
            self._refuse_if_over()
        for drop in self._line.drops if self._control else ():
            if drop(self._request, message):
                self._line.drops.remove(drop)
                return
        left_s, arrives_s = self._line.times(len(message), request=self._request, control=self._control)
        self._send(arrives_s, message, None)
        loop = asyncio.get_running_loop()
        if left_s > loop.time():
            await asyncio.sleep(left_s - loop.time())

    def finish(self, problem: TransportError | None, when_over: Callable[[], None] = _nothing) -> None:
        """End this direction behind what was written; do something when the end arrives."""
        if not self._finished:
            self._finished = True
            self._when_over = when_over
            now_s = asyncio.get_running_loop().time()
            self._send(now_s + self._line.link.delay_s, None, problem)
            self._changed.set()

    async def read(self) -> bytes | None:
        while not self._here:
            if self._problem is not None:
                raise self._problem
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._here.popleft()
        self._changed.set()
        return message

    def break_off(self, problem: TransportError) -> None:
        """Lose everything not yet read; both sides of this direction are told."""
        self._coming.clear()
        self._here.clear()
        self._finished = True
        if not self._ended and self._problem is None:
            self._problem = problem
        self._changed.set()

    def silence(self) -> None:
        """Lose what is under way and what comes after, without telling anybody."""
        self._silent = True
        self._coming.clear()

    def _refuse_if_over(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self._finished:
            raise TransportError("the call is over")

    def _send(self, arrives_s: float, message: bytes | None, problem: TransportError | None) -> None:
        if self._silent or not self._line.up:
            return
        # Timers that are due together fire in any order: each delivers the head of the queue.
        self._latest_s = max(self._latest_s, arrives_s)
        self._coming.append((message, problem))
        asyncio.get_running_loop().call_at(self._latest_s, self._arrive)

    def _arrive(self) -> None:
        if not self._coming:
            return
        message, problem = self._coming.popleft()
        if message is not None:
            self._here.append(message)
        elif problem is not None:
            self._problem = problem
        else:
            self._ended = True
        self._changed.set()
        if message is None:
            self._when_over()


class Call:
    """A call: implements `streams.ClientStream`; its `server` implements `streams.ServerStream`."""

    def __init__(self, line: Line, metadata: Metadata, *, peer: str, control: bool) -> None:
        """On its way to the server."""
        self._line = line
        self._up = _Pipe(line, request=True, control=control)
        self._down = _Pipe(line, request=False, control=control)
        self._answer: Metadata | None = None
        self._answered = asyncio.Event()
        self._problem: TransportError | None = None
        self._lifetime = Lifetime()
        self._reason = ""
        # The server is done with it; what it wrote may still be on its way.
        self.finished = False
        self.over = False
        self.server = _ServerEnd(self, self._up, self._down, metadata, peer)
        line.join(self)

    async def accepted(self) -> Metadata:
        """Wait for the server to answer the call."""
        await self._answered.wait()
        if self._answer is None:
            raise self._problem or PeerUnavailable("the call broke before it was answered")
        return self._answer

    async def read(self) -> bytes | None:
        """The next message; None when the server ended the call well."""
        return await self._down.read()

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the link took it."""
        await self._up.write(message)

    def reason(self) -> str:
        """What the server said by `say_why`."""
        return self._reason

    def cancel(self) -> None:
        """End the call; the server's end notices a delay later."""
        if self.over:
            return
        self._down.break_off(TransportError("cancelled"))
        self._line.after_delay(self, lambda: self.break_off("the learner's connection broke"))

    async def pump(self, outgoing: AsyncIterator[bytes]) -> None:
        """Write what the iterator gives until it ends or the call does."""
        try:
            with self._lifetime.bound():
                async for message in outgoing:
                    await self._up.write(message)
                self._up.finish(None)
        except TransportError:
            # Whoever reads is told the same.
            return

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serve the call as long as it lives."""
        with self._lifetime.bound():
            yield

    def answer(self, metadata: Metadata) -> None:
        """The server accepts; the client hears of it a delay later."""

        def arrive() -> None:
            self._answer = metadata
            self._answered.set()

        self._line.after_delay(self, arrive)

    def say_why(self, reason: str) -> None:
        """The reason that the client will see."""
        self._reason = reason

    def finish(self, problem: TransportError | None) -> None:
        """The server is done with it: well, or with an error."""
        self.finished = True

        def arrive() -> None:
            self._problem = problem
            self._up.break_off(TransportError("the call is over"))
            self._end("the call is over")

        self._down.finish(problem, arrive)

    def break_off(self, reason: str) -> None:
        """Break both directions, now."""
        problem = PeerUnavailable(reason)
        self._problem = self._problem or problem
        self._up.break_off(problem)
        self._down.break_off(problem)
        self._end(reason)

    def silence(self) -> None:
        """Lose everything without telling anybody."""
        self._up.silence()
        self._down.silence()

    def _end(self, reason: str) -> None:
        self.over = True
        self._answered.set()
        self._lifetime.end(reason)
        self._line.leave(self)


class _ServerEnd:
    """Implements `streams.ServerStream`."""

    def __init__(self, call: Call, up: _Pipe, down: _Pipe, metadata: Metadata, peer: str) -> None:
        self._call = call
        self._up = up
        self._down = down
        self.metadata = metadata
        self.peer = peer

    async def accept(self, metadata: Metadata) -> None:
        self._call.answer(metadata)

    async def read(self) -> bytes | None:
        return await self._up.read()

    async def write(self, message: bytes) -> None:
        await self._down.write(message)

    def say_why(self, reason: str) -> None:
        self._call.say_why(reason)
