"""A learner's end over gRPC.

Control, updates and uploads have channels of their own, each a TCP connection: bulk can't delay control. Where one
connection's window is less than the link, updates and uploads have several.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.transport.connection import ClientConnection
from wan_diloco.transport.grpc_common import REASON_KEY, channel_options, guarded, plain_metadata, translated
from wan_diloco.transport.options import ConnectionOptions, Keepalive
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.streams import SESSION_KEY, ClientStream, Metadata, Method
from wan_diloco.wire.convert import decode_status

__all__ = ["fetch_status", "grpc_connection"]

_RawCall = grpc.aio.StreamStreamCall[bytes, bytes]
_RawMethod = grpc.aio.StreamStreamMultiCallable[bytes, bytes]


def grpc_connection(
    address: str,
    pacer: Pacer | None = None,
    *,
    options: ConnectionOptions | None = None,
    keepalive: Keepalive | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> ClientConnection:
    """A learner's end, to be connected. To be called, and used, on the event loop.

    Args:
        address: "host:port" of the syncer.
        pacer: Of the uplink; give the same one to each connection, so that its cap outlives them.
        options: Timeouts and limits.
        keepalive: When a silent connection counts as dead.
        credentials: To encrypt with, and to know the syncer by; None for neither.
    """
    dialer = _GrpcDialer(address, keepalive or Keepalive(), credentials)
    return ClientConnection(dialer, pacer or Pacer(), options or ConnectionOptions())


async def fetch_status(address: str, timeout_s: float) -> dict[str, object]:
    """What a syncer says about its run.

    Raises:
        TransportError: It doesn't answer, not in time, or not with a status.
    """
    async with grpc.aio.insecure_channel(address, options=channel_options(Keepalive())) as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Method.STATUS)
        answer = await guarded(ask(b"", timeout=timeout_s))
    try:
        return decode_status(answer)
    except DecodeError as problem:
        raise TransportError(f"no status of a syncer: {problem}") from problem


class _GrpcDialer:
    """Implements `streams.Dialer`; owns the channels."""

    def __init__(self, address: str, keepalive: Keepalive, credentials: grpc.ChannelCredentials | None) -> None:
        self._address = address
        self._options = channel_options(keepalive)
        self._credentials = credentials
        self._control = self._channel()
        self._bulk: dict[tuple[Method, int], grpc.aio.Channel] = {}

    def control(self, outgoing: AsyncIterator[bytes]) -> ClientStream:
        opening: _RawMethod = self._control.stream_stream(Method.CONTROL)
        return _SteadyStream(opening(outgoing))

    def call(self, method: Method, metadata: Metadata, channel: int = 0) -> ClientStream:
        if (method, channel) not in self._bulk:
            self._bulk[method, channel] = self._channel()
        opening: _RawMethod = self._bulk[method, channel].stream_stream(method)
        kind = _SteadyStream if method is Method.DOWNLOAD else _GrpcStream
        return kind(opening(metadata=tuple(metadata.items())))

    def _channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=self._options)

    async def close(self) -> None:
        for channel in (self._control, *self._bulk.values()):
            await channel.close()


class _GrpcStream:
    """Implements `streams.ClientStream` over a call."""

    def __init__(self, call: _RawCall) -> None:
        self._call = call
        self._reason = ""

    async def accepted(self) -> Metadata:
        metadata = plain_metadata(await guarded(self._call.initial_metadata()))
        if SESSION_KEY not in metadata:
            # A call that is refused ends without an answer; its status says why.
            raise translated(await guarded(self._call.code()), await guarded(self._call.details()))
        return metadata

    async def read(self) -> bytes | None:
        message = await guarded(self._call.read())
        if isinstance(message, bytes):
            return message
        for key, value in await guarded(self._call.trailing_metadata()) or ():
            if key == REASON_KEY and isinstance(value, bytes):
                self._reason = value.decode(errors="replace")
        return None

    async def write(self, message: bytes) -> None:
        await guarded(self._call.write(message))

    def reason(self) -> str:
        return self._reason

    def cancel(self) -> None:
        self._call.cancel()


class _SteadyStream(_GrpcStream):
    """One whose reader may be cancelled without ending the call, as gRPC's own may not.

    So that a driver may drop its readers, queue a last word, and close.
    """

    def __init__(self, call: _RawCall) -> None:
        super().__init__(call)
        self._pending: asyncio.Future[bytes | None] | None = None

    async def read(self) -> bytes | None:
        if self._pending is None:
            # No group could own it: it outlives its reader on purpose. `cancel` ends it.
            self._pending = asyncio.ensure_future(super().read())  # noqa: TID251
        pending = self._pending
        message = await guarded(asyncio.shield(pending))
        self._pending = None
        return message

    def cancel(self) -> None:
        super().cancel()
        if self._pending is not None:
            self._pending.cancel()
