"""All sessions of a syncer, whatever network carries them: who may come in, and who is meant by a call."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from wan_diloco.errors import AuthError, PeerUnavailable, TransportError
from wan_diloco.protocol.events import SessionId
from wan_diloco.transport.interface import SyncerHandler
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.session import ServerSession
from wan_diloco.transport.streams import SESSION_KEY, TOKEN_KEY, Metadata, ServerStream
from wan_diloco.transport.uploading import Decode, Partials, discard_upload, receive_upload
from wan_diloco.wire.convert import encode_status

__all__ = ["SessionHub"]


class SessionHub:
    """Serves calls; a network calls `control`, `upload` and `download` once for each call that comes in.

    Owner: one event loop.

    Args:
        handler: Who is told.
        limits: How much peers may make us hold.
        make_token: A fresh secret at each call.
        decode: How bulk messages are decoded.
    """

    def __init__(
        self, handler: SyncerHandler, limits: ServerLimits, make_token: Callable[[], str], decode: Decode
    ) -> None:
        """Nobody is here yet."""
        self._handler = handler
        self._limits = limits
        self._make_token = make_token
        self._decode = decode
        self._sessions: dict[SessionId, ServerSession] = {}
        self._partials = Partials(limits)
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
        if len(self._sessions) >= self._limits.sessions_max:
            raise PeerUnavailable(f"the syncer has {self._limits.sessions_max} sessions already")
        self._last_session += 1
        session = ServerSession(
            session=SessionId(self._last_session),
            token=self._make_token(),
            peer=stream.peer,
            handler=self._handler,
            limits=self._limits,
        )
        self._sessions[session.session] = session
        self._empty.clear()
        reason = "its connection broke"
        told = False
        try:
            # The handler first: a bulk call may follow right behind the answer.
            self._handler.connected(session)
            told = True
            await stream.accept({SESSION_KEY: str(session.session), TOKEN_KEY: session.token})
            reason = await session.serve_control(stream)
        finally:
            del self._sessions[session.session]
            session.end(reason)
            if told:
                self._handler.disconnected(session, reason)
            if not self._sessions:
                self._empty.set()

    async def upload(self, stream: ServerStream) -> None:
        """Serve an upload call.

        Raises:
            AuthError: It belongs to no session of ours.
            TransportError: It broke, or its session ended.
            DecodeError: It doesn't begin with a header.
        """
        session = self._session_of(stream.metadata)
        if session.uploads >= self._limits.uploads_max:
            with session.lifetime.bound():
                await stream.accept({})
                await discard_upload(stream, session.counters)
            raise TransportError(f"this session has {self._limits.uploads_max} uploads under way already")
        session.uploads += 1
        try:
            with session.lifetime.bound():
                await stream.accept({})
                await receive_upload(stream, session, self._handler, self._partials, self._limits, self._decode)
        finally:
            session.uploads -= 1

    async def download(self, stream: ServerStream) -> None:
        """Serve a download call.

        Raises:
            AuthError: It belongs to no session of ours.
            TransportError: It broke.
        """
        session = self._session_of(stream.metadata)
        with session.lifetime.bound():
            await stream.accept({})
            await session.serve_download(stream)

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

    def _session_of(self, metadata: Metadata) -> ServerSession:
        number = metadata.get(SESSION_KEY, "")
        session = self._sessions.get(SessionId(int(number))) if number.isascii() and number.isdecimal() else None
        if session is None:
            # Most likely one that just ended: the learner will find out by its control call.
            raise TransportError("no such session")
        if not hmac.compare_digest(metadata.get(TOKEN_KEY, "").encode(), session.token.encode()):
            raise AuthError("this session belongs to somebody else")
        return session
