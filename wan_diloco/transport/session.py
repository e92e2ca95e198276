"""The syncer's end of one learner's connection, whatever network carries it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.events import SessionId
from wan_diloco.protocol.link_plan import CHANNELS_MAX
from wan_diloco.protocol.messages import (
    Goodbye,
    Hello,
    LearnerMessage,
    Pace,
    RefusalReason,
    Stop,
    SyncerMessage,
    UpdateHeader,
)
from wan_diloco.transport.interface import Counters, Frames, SyncerHandler
from wan_diloco.transport.lifetime import Lifetime
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.outbox import Outbox
from wan_diloco.transport.pacer import Pacer, Total
from wan_diloco.transport.streams import ServerStream
from wan_diloco.transport.update_sender import UpdateQueue
from wan_diloco.transport.uploading import Uploads, refusal_of
from wan_diloco.wire.convert import decode_learner, encode_syncer

__all__ = ["ServerSession"]

# What a stranger sent ends up in logs; as much of it as a line can take.
_DETAIL_CHARS_MAX: Final = 500


class ServerSession:
    """Implements `interface.Session`; owned by the hub that made it, on one event loop.

    Args:
        session: Its number.
        token: The secret that bulk calls must present.
        peer: Where the learner is.
        handler: Who is told what it says.
        limits: How much it may make us hold.
        ingress, egress: What it shares with all other sessions.

    Attributes:
        inbound: Of what comes from the learner.
    """

    def __init__(
        self,
        *,
        session: SessionId,
        token: str,
        peer: str,
        handler: SyncerHandler,
        limits: ServerLimits,
        ingress: Total,
        egress: Total,
    ) -> None:
        """Not served yet."""
        self.token = token
        self.lifetime = Lifetime()
        # Of the control call alone; it ends when another session needs its place.
        self.presence = Lifetime()
        self.uploads = 0
        self.receiving: Uploads = {}
        self._hello_timeout_s = limits.hello_timeout_s
        self._greeted = False
        self._stopped = False
        self._session = session
        self._peer = peer
        self._handler = handler
        self._counters = Counters()
        self._pacer = Pacer(total=egress)
        self.inbound = Pacer(total=ingress)
        self._outbox = Outbox(Pace, limits.outbox_max)
        self._updates = UpdateQueue(self._pacer, self._counters, limits.updates_max)
        self._downloading = False
        self._stripes = 0
        # Why it closes: what is said first counts.
        self._reason: str | None = None

    @property
    def session(self) -> SessionId:
        """Never used again, also not by the same learner."""
        return self._session

    @property
    def peer(self) -> str:
        """Where the learner is, for logs."""
        return self._peer

    @property
    def counters(self) -> Counters:
        """What this session moved so far."""
        return self._counters

    @property
    def outbound(self) -> Pacer:
        """Of what goes to the learner."""
        return self._pacer

    @property
    def greeted(self) -> bool:
        """Whether it said Hello."""
        return self._greeted

    @property
    def leaving(self) -> bool:
        """Whether it was closed, and only what is queued still leaves."""
        return self._reason is not None

    def refuse(self, reason: RefusalReason, detail: str) -> None:
        """Tell the handler that something of this peer's is refused."""
        self._handler.refused(self._peer, reason, detail[:_DETAIL_CHARS_MAX])

    def set_downlink_rate(self, rate_bytes_per_s: float | None) -> None:
        """Cap the updates of this session; None for no cap."""
        self._pacer.set_rate(rate_bytes_per_s)

    def set_round_trip(self, rtt_s: float) -> None:
        """How long a round trip takes; 0 when nobody knows."""
        self._updates.rtt_s = rtt_s

    def send(self, message: SyncerMessage) -> None:
        """Queue a control message; never blocks."""
        self._stopped = self._stopped or isinstance(message, Stop)
        if not self._outbox.put(message, encode_syncer(message)):
            self.close("it doesn't read what it is told")

    async def send_update(self, header: UpdateHeader, segments: Sequence[Frames], spread_s: float = 0.0) -> None:
        """Send an update; returns when its last byte was handed to the network.

        Raises:
            TransportError: The session ended before.
        """
        await self._updates.send(header, segments, spread_s)

    def acknowledge(self, message_bytes: int) -> None:
        """Note what goes down because a message of bulk came up."""
        self._pacer.acknowledge(message_bytes)

    def close(self, reason: str) -> None:
        """End the session after the control messages queued so far have left; idempotent."""
        if self._reason is None:
            self._reason = reason
        self._outbox.close()

    async def serve_control(self, stream: ServerStream) -> str:
        """Run the control call until either end closes it.

        Returns:
            Why it ended.
        """
        timer = asyncio.get_running_loop().call_later(self._hello_timeout_s, self._demand_hello)
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._listen(stream))
                try:
                    while (data := await self._outbox.get()) is not None:
                        self._counters.control_bytes += len(data)
                        self._pacer.spend(len(data))
                        await stream.write(data)
                except TransportError as problem:
                    self.close(str(problem))
                reading.cancel()
        finally:
            timer.cancel()
        reason = self._reason or "closed"
        stream.say_why(reason)
        return reason

    async def serve_download(self, stream: ServerStream) -> None:
        """Run the download call until the session ends; its loss ends the session.

        Raises:
            TransportError: It broke, or there is one already.
        """
        if self._downloading:
            raise TransportError("this session has its download call already")
        self._downloading = True
        try:
            await self._updates.serve(stream, is_first=True)
        finally:
            self.close("its download stream broke")

    async def serve_download_stripe(self, stream: ServerStream) -> None:
        """Run another download call, that carries a part of what the first one announces.

        Raises:
            TransportError: It broke, or there are too many.
        """
        if self._stripes >= CHANNELS_MAX - 1:
            raise TransportError("this session has enough download calls already")
        self._stripes += 1
        try:
            await self._updates.serve(stream, is_first=False)
        finally:
            self._stripes -= 1

    def end(self, reason: str) -> None:
        """Take along everything that works for this session; idempotent."""
        self._outbox.close()
        self._updates.end(reason)
        self.lifetime.end(reason)

    def _demand_hello(self) -> None:
        if not self._greeted and not self.leaving:
            detail = f"no Hello within {self._hello_timeout_s:g} s"
            self.refuse(RefusalReason.NO_HELLO, detail)
            self.close(detail)

    def _hear(self, message: LearnerMessage) -> None:
        if isinstance(message, Hello):
            self._greeted = True
        elif not self._greeted and not isinstance(message, Goodbye):  # one that stops at once may leave so
            self.refuse(RefusalReason.GARBAGE, f"a {type(message).__name__} before any Hello")
        self._handler.said(self, message)

    async def _listen(self, stream: ServerStream) -> None:
        goodbye = ""
        try:
            while (data := await stream.read()) is not None:
                self._counters.control_bytes += len(data)
                self.inbound.spend(len(data))
                if not self._outbox.closed:
                    message = decode_learner(data)
                    goodbye = "goodbye" if isinstance(message, Goodbye) else ""
                    self._hear(message)
            # The process that talks to us also closes properly when the one that trains was killed.
            self.close(goodbye or ("it was told to stop" if self._stopped else "it went without a goodbye"))
        except DecodeError as problem:
            self.refuse(refusal_of(problem), str(problem))
            self.close(f"it said something that makes no sense: {problem}")
        except TransportError as problem:
            self.close(str(problem))
