"""What the logic of both ends asks of a network: streams of messages with a little metadata.

gRPC and the memory network implement this; everything above it is shared, so that tests in process
exercise what runs in production.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import Final, Protocol

__all__ = [
    "END_MARK",
    "SESSION_KEY",
    "STRIPE_KEY",
    "TOKEN_KEY",
    "WINDOW_KEY",
    "ClientStream",
    "Dialer",
    "Metadata",
    "Method",
    "ServerStream",
]

Metadata = Mapping[str, str]
SESSION_KEY: Final = "wd-session"
TOKEN_KEY: Final = "wd-token"  # noqa: S105 - the name of a field
# How many bytes the sender may have unacknowledged; the receiver says how far it has come four times as often.
WINDOW_KEY: Final = "wd-window"
# Marks a call that carries a part of what another one of the same session began.
STRIPE_KEY: Final = "wd-stripe"
# Says in an upload that what was asked for has been sent.
END_MARK: Final = b""


class Method(StrEnum):
    """The calls there are, by their names in gRPC."""

    CONTROL = "/wan_diloco.v1.SyncerService/Control"
    UPLOAD = "/wan_diloco.v1.BulkService/Upload"
    DOWNLOAD = "/wan_diloco.v1.BulkService/Download"
    GIVE = "/wan_diloco.v1.BulkService/Give"
    TAKE = "/wan_diloco.v1.BulkService/Take"
    STATUS = "/wan_diloco.v1.AdminService/GetStatus"


class ServerStream(Protocol):
    """The serving end of a call. The call ends when the function that serves it returns or raises."""

    @property
    def peer(self) -> str:
        """Where the client is."""
        ...

    @property
    def metadata(self) -> Metadata:
        """What the client presented."""
        ...

    async def accept(self, metadata: Metadata) -> None:
        """Answer the call; must come before the first write."""
        ...

    async def read(self) -> bytes | None:
        """The next message; None at the end.

        Raises:
            TransportError: The call broke.
        """
        ...

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the network took it.

        Raises:
            TransportError: The call broke.
        """
        ...

    def say_why(self, reason: str) -> None:
        """What the client will see as the reason when the call ends well."""
        ...


class ClientStream(Protocol):
    """The calling end of a call."""

    async def accepted(self) -> Metadata:
        """Wait for the server to answer the call.

        Raises:
            TransportError: It didn't, or not in time.
        """
        ...

    async def read(self) -> bytes | None:
        """The next message; None when the server ended the call well.

        Raises:
            TransportError: The call broke, or was refused.
        """
        ...

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the network took it.

        Raises:
            TransportError: The call is over; `read` may know more.
        """
        ...

    def reason(self) -> str:
        """What the server said by `say_why`, once `read` has returned None."""
        ...

    def cancel(self) -> None:
        """End the call; does nothing when it is over already."""
        ...


class Dialer(Protocol):
    """Opens calls to one server."""

    def control(self, outgoing: AsyncIterator[bytes]) -> ClientStream:
        """Open a control call that sends what the iterator gives, and closes its half when that ends."""
        ...

    def call(self, method: Method, metadata: Metadata, channel: int = 0) -> ClientStream:
        """Open a bulk call.

        Args:
            method: Which.
            metadata: To present.
            channel: Over which connection of that method's; one that isn't there is opened.
        """
        ...

    async def close(self) -> None:
        """End all calls and let go of everything; idempotent."""
        ...
