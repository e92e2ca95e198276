"""What both gRPC ends share: channel options, and the border at which gRPC's errors become ours.

option                                value          why
max_send/receive_message_length       4 MiB          the default, stated so that nobody raises it
keepalive_time, keepalive_timeout     see below      a dead link is noticed within their sum, also while writing
keepalive_permit_without_calls        1              the download channel idles between updates
http2.max_pings_without_data          0              no limit: long waits between messages are normal here
http2.min_ping_interval_without_data  half the time  so that the server doesn't call our pings abuse
min/max_reconnect_backoff             0.2 s, 5 s     the default of 2 minutes keeps learners away
use_local_subchannel_pool             1              each channel is a TCP connection of its own
so_reuseport                          0              a port in use is an error, not shared silently
enable_retries                        0              a retry is our decision, never gRPC's
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Final, TypeVar

import grpc
import grpc.aio

from wan_diloco.errors import AuthError, DeadlineExceeded, PeerUnavailable, TransportError
from wan_diloco.protocol.deadlines import CONNECT_S, RECONNECT_MAX_S
from wan_diloco.transport.options import Keepalive
from wan_diloco.transport.streams import Metadata
from wan_diloco.wire.limits import MESSAGE_BYTES_MAX

__all__ = ["REASON_KEY", "channel_options", "guarded", "plain_metadata", "server_options", "translated"]

_Result = TypeVar("_Result")
# "-bin": a reason may hold any characters.
REASON_KEY: Final = "wd-reason-bin"
_INITIAL_BACKOFF_MS: Final = 200
_ATTEMPT_MS: Final = round(1000 * CONNECT_S)
_MAX_BACKOFF_MS: Final = round(1000 * RECONNECT_MAX_S)


def channel_options(keepalive: Keepalive) -> list[tuple[str, int]]:
    """Of a learner's channels."""
    return [
        *_both_ends(keepalive),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", _INITIAL_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", _ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS),
    ]


def server_options(keepalive: Keepalive) -> list[tuple[str, int]]:
    """Of the syncer's server."""
    return [
        *_both_ends(keepalive),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(keepalive.time_s / 2)),
    ]


def _both_ends(keepalive: Keepalive) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", _milliseconds(keepalive.time_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(keepalive.timeout_s)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(keepalive.timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _milliseconds(duration_s: float) -> int:
    return round(duration_s * 1000)


def translated(code: grpc.StatusCode | None, details: str | None) -> TransportError:
    """Our error for a status that isn't OK."""
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return PeerUnavailable(details or "nobody answers")
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return AuthError(details or "the peer refuses us")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(details or "the peer took too long")
        case grpc.StatusCode.ABORTED:
            return TransportError(details or "the peer ended the call")
        case _:
            return TransportError(f"{details or 'the call broke'} ({code.name if code else 'no status'})")


async def guarded(awaited: Awaitable[_Result]) -> _Result:
    """Await something of gRPC's, and translate what it raises.

    Raises:
        TransportError: The call broke, or is over.
    """
    try:
        return await awaited
    except grpc.aio.AioRpcError as problem:
        raise translated(problem.code(), problem.details()) from problem
    except asyncio.CancelledError as problem:
        if _being_cancelled():
            raise
        # gRPC says so when the call was cancelled, which is not the task's cancellation.
        raise TransportError("the call was cancelled") from problem
    except (asyncio.InvalidStateError, grpc.aio.BaseError) as problem:
        raise TransportError(f"the call is over: {problem}") from problem


def _being_cancelled() -> bool:
    # In a function of its own: a frame that holds its task and is held by the task's exception is a cycle,
    # and keeps sockets open until the garbage collector comes by.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def plain_metadata(found: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Text entries by key; the last of a key counts."""
    return {key: value for key, value in found or () if isinstance(value, str)}
