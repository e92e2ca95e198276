"""The serving end of an upload call that is read no faster than all sessions together may receive.

What isn't read stays in the sender's flow-control window: so a peer that takes more than it was granted is slowed down.
"""

from __future__ import annotations

from wan_diloco.transport.session import ServerSession
from wan_diloco.transport.streams import Metadata, ServerStream

__all__ = ["PacedStream"]


class PacedStream:
    """Implements `streams.ServerStream` over another.

    Args:
        stream: What is read.
        session: Whose it is.
    """

    def __init__(self, stream: ServerStream, session: ServerSession) -> None:
        """Nothing is read yet."""
        self._stream = stream
        self._session = session
        self._transfer = session.inbound.transfer()

    @property
    def peer(self) -> str:
        """Where the client is."""
        return self._stream.peer

    @property
    def metadata(self) -> Metadata:
        """What the client presented."""
        return self._stream.metadata

    async def accept(self, metadata: Metadata) -> None:
        """Answer the call."""
        await self._stream.accept(metadata)

    async def read(self) -> bytes | None:
        """The next message, after as long as it should have taken to come; None at the end."""
        message = await self._stream.read()
        if message:
            self._session.acknowledge(len(message))
            await self._transfer.wait(len(message))
        return message

    async def write(self, message: bytes) -> None:
        """Send a message."""
        await self._stream.write(message)

    def say_why(self, reason: str) -> None:
        """What the client will see as the reason when the call ends well."""
        self._stream.say_why(reason)
