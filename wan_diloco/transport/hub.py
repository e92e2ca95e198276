"""All sessions of a syncer, whatever network carries them: who may come in, and who is meant by a call."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Final

from wan_diloco.errors import DecodeError, PeerUnavailable, TransportError
from wan_diloco.protocol.events import SessionId
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.transport.interface import SyncerHandler
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.paced_stream import PacedStream
from wan_diloco.transport.pacer import Total
from wan_diloco.transport.relay import Relay
from wan_diloco.transport.session import ServerSession
from wan_diloco.transport.streams import SESSION_KEY, STRIPE_KEY, TOKEN_KEY, ServerStream
from wan_diloco.transport.uploading import Partials, discard_upload, receive_stripe, receive_upload, refusal_of
from wan_diloco.wire.convert import encode_status

__all__ = ["SessionHub"]

# Of a session's number, which counts from 1. Python refuses to read some thousands of digits.
_DIGITS_MAX: Final = 18


class SessionHub:
    """Serves calls; a network calls `control`, `upload` and `download` once for each call that comes in.

    Owner: one event loop.

    Args:
        handler: Who is told.
        limits: How much peers may make us hold.
        make_token: A fresh secret at each call.
    """

    def __init__(self, handler: SyncerHandler, limits: ServerLimits, make_token: Callable[[], str]) -> None:
        """Nobody is here yet."""
        self._handler = handler
        self._limits = limits
        self._make_token = make_token
        self._ingress, self._egress = Total(), Total()
        self._sessions: dict[SessionId, ServerSession] = {}
        self._partials = Partials(limits)
        self._relay = Relay(handler)
        self._last_session = 0
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()

    async def control(self, stream: ServerStream) -> None:
        """Serve a control call: a session from its beginning to its end.

        Raises:
            PeerUnavailable: There is no room, or we are leaving.
            TransportError: The call broke before it was answered.
        """
        if self._closing:
            raise PeerUnavailable("the syncer is stopping")
        self._make_room(stream.peer)
        self._last_session += 1
        session = ServerSession(
            session=SessionId(self._last_session),
            token=self._make_token(),
            peer=stream.peer,
            handler=self._handler,
            limits=self._limits,
            ingress=self._ingress,
            egress=self._egress,
        )
        self._sessions[session.session] = session
        self._empty.clear()
        reason = "its connection broke"
        told = False
        try:
            with session.presence.bound():
                # The handler first: a bulk call may follow right behind the answer.
                self._handler.connected(session)
                told = True
                await stream.accept({SESSION_KEY: str(session.session), TOKEN_KEY: session.token})
                reason = await session.serve_control(stream)
        finally:
            reason = session.presence.reason or reason
            del self._sessions[session.session]
            session.end(reason)
            if told:
                self._handler.disconnected(session, reason)
            if not self._sessions:
                self._empty.set()

    async def upload(self, stream: ServerStream) -> None:
        """Serve an upload call.

        Raises:
            TransportError: It belongs to no session of ours, it broke, or its session ended.
            DecodeError: It doesn't begin with a header.
        """
        session = self._session_of(stream)
        if STRIPE_KEY in stream.metadata:
            with session.lifetime.bound():
                await stream.accept({})
                await receive_stripe(PacedStream(stream, session), session, self._limits, session.receiving)
            return
        if session.uploads >= self._limits.uploads_max:
            detail = f"this session has {self._limits.uploads_max} uploads under way already"
            session.refuse(RefusalReason.TOO_MANY_CALLS, detail)
            with session.lifetime.bound():
                await stream.accept({})
                await discard_upload(stream, session.counters)
            raise TransportError(detail)
        session.uploads += 1
        try:
            with session.lifetime.bound():
                await stream.accept({})
                paced = PacedStream(stream, session)
                await receive_upload(paced, session, self._handler, self._partials, self._limits, session.receiving)
        except DecodeError as problem:
            session.refuse(refusal_of(problem), str(problem))
            raise
        finally:
            session.uploads -= 1

    async def download(self, stream: ServerStream) -> None:
        """Serve a download call.

        Raises:
            TransportError: It belongs to no session of ours, or it broke.
        """
        session = self._session_of(stream)
        with session.lifetime.bound():
            await stream.accept({})
            if STRIPE_KEY in stream.metadata:
                await session.serve_download_stripe(stream)
            else:
                await session.serve_download(stream)

    async def give(self, stream: ServerStream) -> None:
        """Serve a donor's call.

        Raises:
            TransportError: It belongs to no session of ours, it broke, its session ended, or it has no such transfer.
            DecodeError: It doesn't begin as it should.
        """
        session = self._session_of(stream)
        with session.lifetime.bound():
            await stream.accept({})
            await self._relay.give(stream, session)

    async def take(self, stream: ServerStream) -> None:
        """Serve a joiner's call.

        Raises:
            TransportError: It belongs to no session of ours, it broke, its session ended, or it has no such transfer.
            DecodeError: It doesn't begin as it should.
        """
        session = self._session_of(stream)
        with session.lifetime.bound():
            await stream.accept({})
            await self._relay.take(stream, session)

    def set_rates(self, *, ingress_bytes_per_s: float | None, egress_bytes_per_s: float | None) -> None:
        """Cap what all sessions together receive and are sent; see `interface.SyncerServer`."""
        self._ingress.set_rate(ingress_bytes_per_s)
        self._egress.set_rate(egress_bytes_per_s)

    def status(self) -> bytes:
        """The answer to a status call."""
        return encode_status(self._handler.status())

    async def close(self, grace_s: float) -> None:
        """Let nobody in any more, close all sessions, and wait that long for their ends."""
        self._closing = True
        for session in self._sessions.values():
            session.close("the syncer is stopping")
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            return

    def _make_room(self, peer: str) -> None:
        """See that there is a place for one more.

        Raises:
            PeerUnavailable: There isn't: all are taken by learners that said Hello.
        """
        staying = [session for session in self._sessions.values() if session.presence.reason is None]
        if len(staying) < self._limits.sessions_max:
            return
        # Oldest first: who just came is about to say Hello.
        idle = next((session for session in staying if session.leaving or not session.greeted), None)
        if idle is None:
            detail = f"the syncer has {self._limits.sessions_max} sessions already"
            self._handler.refused(peer, RefusalReason.TOO_MANY_CALLS, detail)
            raise PeerUnavailable(detail)
        detail = "it says no Hello, and another needs its place"
        if not idle.leaving:
            idle.refuse(RefusalReason.NO_HELLO, detail)
        idle.presence.end(detail)

    def _session_of(self, stream: ServerStream) -> ServerSession:
        number = stream.metadata.get(SESSION_KEY, "")
        if not (number.isascii() and number.isdecimal() and len(number) <= _DIGITS_MAX):
            self._handler.refused(stream.peer, RefusalReason.GARBAGE, f"{number[:_DIGITS_MAX]!r} is no session")
            raise TransportError("no such session")
        session = self._sessions.get(SessionId(int(number)))
        if session is None:
            # Most likely one that just ended: the learner will find out by its control call.
            raise TransportError("no such session")
        if not hmac.compare_digest(stream.metadata.get(TOKEN_KEY, "").encode(), session.token.encode()):
            detail = "this session belongs to somebody else"
            self._handler.refused(stream.peer, RefusalReason.OTHER_LEARNER, detail)
            # Nothing that would be the same next time: a link that flips bits of a secret isn't refused for good.
            raise TransportError(detail)
        return session
