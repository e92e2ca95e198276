"""The syncer's end over gRPC."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from wan_diloco.config.addresses import exposed
from wan_diloco.errors import ConfigError, DecodeError, PeerUnavailable, TransportError
from wan_diloco.protocol.link_plan import CHANNELS_MAX
from wan_diloco.transport.grpc_common import REASON_KEY, guarded, plain_metadata, server_options
from wan_diloco.transport.hub import SessionHub
from wan_diloco.transport.interface import SyncerHandler
from wan_diloco.transport.options import Keepalive, ServerLimits
from wan_diloco.transport.streams import Metadata, Method, ServerStream

__all__ = ["GrpcSyncerServer"]

_Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcSyncerServer:
    """Implements `interface.SyncerServer`; to be made and used on one event loop.

    Args:
        handler: Who is told.
        listen: "host:port"; port 0 takes a free one.
        insecure: Allow to listen beyond this machine without encryption.
        limits: How much peers may make us hold.
        keepalive: When a silent connection counts as dead.
        credentials: To encrypt with, and to know learners by; None for neither.
    """

    def __init__(
        self,
        handler: SyncerHandler,
        listen: str = "127.0.0.1:0",
        *,
        insecure: bool = False,
        limits: ServerLimits | None = None,
        keepalive: Keepalive | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Not listening yet."""
        self._listen = listen
        self._insecure = insecure
        self._credentials = credentials
        limits = limits or ServerLimits()
        self._hub = SessionHub(handler, limits, lambda: secrets.token_hex(16))
        self._server = grpc.aio.server(
            options=server_options(keepalive or Keepalive()),
            # A control, downloads and uploads of each session, over all their channels, and what a donor gives; and a
            # status call or two.
            maximum_concurrent_rpcs=limits.sessions_max * ((limits.uploads_max + 1) * CHANNELS_MAX + 6) + 16,
        )
        self._server.add_generic_rpc_handlers(_handlers(self._hub))

    async def start(self) -> str:
        """Begin to listen.

        Returns:
            The address bound, "host:port".

        Raises:
            ConfigError: The address can't be listened on, or must not without encryption.
        """
        host, _, port = self._listen.rpartition(":")
        refusal = exposed(self._listen, insecure=self._insecure or self._credentials is not None)
        if refusal is not None:
            raise refusal
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(self._listen)
            else:
                bound = self._server.add_secure_port(self._listen, self._credentials)
        except RuntimeError as problem:
            raise ConfigError(
                f"can't listen on {self._listen}",
                where="syncer.listen",
                hint=f"is port {port} in use, and {host} an address of this machine?",
            ) from problem
        await self._server.start()
        return f"{host}:{bound}"

    def set_rates(self, *, ingress_bytes_per_s: float | None, egress_bytes_per_s: float | None) -> None:
        """Cap what all sessions together receive and are sent, from now on; None for no cap."""
        self._hub.set_rates(ingress_bytes_per_s=ingress_bytes_per_s, egress_bytes_per_s=egress_bytes_per_s)

    async def stop(self, grace_s: float) -> None:
        """Close all sessions, giving what was queued that long to leave; every handler call is over after."""
        await self._hub.close(grace_s)
        await self._server.stop(grace=0.5)
        # Handlers that gRPC had to cancel end a little after.
        await self._hub.close(grace_s=5.0)


class _GrpcServerStream:
    """Implements `streams.ServerStream` over a call's context."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.peer = context.peer()
        self.metadata: Metadata = plain_metadata(context.invocation_metadata())

    async def accept(self, metadata: Metadata) -> None:
        await guarded(self._context.send_initial_metadata(tuple(metadata.items())))

    async def read(self) -> bytes | None:
        message: object = await guarded(self._context.read())
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes) -> None:
        await guarded(self._context.write(message))

    def say_why(self, reason: str) -> None:
        self._context.set_trailing_metadata(((REASON_KEY, reason.encode()),))


def _handlers(hub: SessionHub) -> tuple[grpc.GenericRpcHandler, ...]:
    async def status(request: bytes, context: _Context) -> bytes:  # noqa: ARG001 - the signature is gRPC's
        return hub.status()

    streams = (
        (Method.CONTROL, hub.control),
        (Method.UPLOAD, hub.upload),
        (Method.DOWNLOAD, hub.download),
        (Method.GIVE, hub.give),
        (Method.TAKE, hub.take),
    )
    found: list[tuple[Method, grpc.RpcMethodHandler[bytes, bytes]]] = [
        *((method, grpc.stream_stream_rpc_method_handler(_serving(serve))) for method, serve in streams),
        (Method.STATUS, grpc.unary_unary_rpc_method_handler(status)),
    ]
    return tuple(
        grpc.method_handlers_generic_handler(method.split("/")[1], {method.split("/")[2]: handler})
        for method, handler in found
    )


def _serving(serve: Callable[[ServerStream], Awaitable[None]]) -> Callable[[object, _Context], Awaitable[None]]:
    """A handler of gRPC's kind that ends a call by its status: aborting one isn't graceful while draining."""

    async def handler(requests: object, context: _Context) -> None:  # noqa: ARG001 - the signature is gRPC's
        try:
            await serve(_GrpcServerStream(context))
        except PeerUnavailable as problem:
            _end(context, grpc.StatusCode.UNAVAILABLE, problem)
        except TransportError as problem:
            _end(context, grpc.StatusCode.ABORTED, problem)
        except DecodeError as problem:
            _end(context, grpc.StatusCode.INVALID_ARGUMENT, problem)

    return handler


def _end(context: _Context, code: grpc.StatusCode, problem: Exception) -> None:
    context.set_code(code)
    context.set_details(str(problem))
