"""What only real sockets can show: who may listen, who may call, dead links, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from tests.support.transport import RecordingHandler, contribution, hello, poll, random_buffers, same, within
from wan_diloco.errors import AuthError, ConfigError, PeerUnavailable, TransportError
from wan_diloco.lab.links import GOOD, Passage
from wan_diloco.lab.proxy import LinkProxy
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.transport.allocator import keep_freed_memory
from wan_diloco.transport.connection import ClientConnection
from wan_diloco.transport.grpc_client import fetch_status, grpc_connection
from wan_diloco.transport.grpc_common import translated
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.transport.options import ConnectionOptions, Keepalive
from wan_diloco.transport.streams import END_MARK, SESSION_KEY, TOKEN_KEY, Method
from wan_diloco.wire.convert import encode_contribution, encode_learner
from wan_diloco.wire.frames import pack

QUICK = Keepalive(time_s=0.5, timeout_s=0.5)


class Servers(contextlib.AsyncExitStack):
    """Starts servers, and stops them whatever happens: gRPC complains at those that are left running."""

    async def start(self, handler: RecordingHandler, listen: str = "127.0.0.1:0", **options: Any) -> str:
        server = GrpcSyncerServer(handler, listen, **options)
        self.push_async_callback(lambda: within(server.stop(1.0)))
        return await server.start()


def run(main: Callable[[Servers], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        async with Servers() as servers:
            await main(servers)

    asyncio.run(inside())


async def connected(servers: Servers) -> tuple[RecordingHandler, str, ClientConnection]:
    """A syncer, where it is, and a session with it."""
    handler = RecordingHandler()
    address = await servers.start(handler)
    connection = grpc_connection(address)
    await within(connection.connect())
    return handler, address, connection


async def raw_call(address: str, method: Method, metadata: dict[str, str], *messages: bytes) -> grpc.StatusCode:
    """Say anything to a server, and see what status it ends the call with."""
    async with grpc.aio.insecure_channel(address) as channel:
        opening: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        call = opening(iter(messages), metadata=tuple(metadata.items()))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await within(drain(call))
        return await within(call.code())


async def drain(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
    async for _ in call:
        pass


def test_a_port_in_use_is_a_configuration_error() -> None:
    async def main(servers: Servers) -> None:
        address = await servers.start(RecordingHandler())
        with pytest.raises(ConfigError, match="in use"):
            await servers.start(RecordingHandler(), address)

    run(main)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "example.org:0", ":0"])
def test_listening_beyond_this_machine_needs_an_explicit_word(listen: str) -> None:
    async def main(servers: Servers) -> None:
        with pytest.raises(ConfigError, match="encrypted"):
            await servers.start(RecordingHandler(), listen)

    run(main)


def test_with_that_word_it_listens() -> None:
    async def main(servers: Servers) -> None:
        address = await servers.start(RecordingHandler(), "0.0.0.0:0", insecure=True)
        port = address.rpartition(":")[2]
        assert await within(fetch_status(f"127.0.0.1:{port}", 10.0)) == {"heard": 0}

    run(main)


def test_it_listens_on_ipv6() -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no ::1")

    async def main(servers: Servers) -> None:
        handler = RecordingHandler()
        address = await servers.start(handler, "[::1]:0")
        assert address.startswith("[::1]:")
        connection = grpc_connection(address)
        await within(connection.connect())
        connection.send(hello())
        await within(handler.until(lambda: bool(handler.heard)))
        assert await within(fetch_status(address, 10.0)) == {"heard": 1}
        await within(connection.close())

    run(main)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("method", [Method.UPLOAD, Method.DOWNLOAD])
def test_bulk_calls_need_the_number_and_the_secret_of_a_session(method: Method) -> None:
    async def main(servers: Servers) -> None:
        handler, address, connection = await connected(servers)
        number = str(handler.sessions[0].session)
        for metadata, status in [
            ({}, grpc.StatusCode.ABORTED),
            ({SESSION_KEY: "99", TOKEN_KEY: "x"}, grpc.StatusCode.ABORTED),
            ({SESSION_KEY: "-1"}, grpc.StatusCode.ABORTED),
            ({SESSION_KEY: "1e3"}, grpc.StatusCode.ABORTED),
            ({SESSION_KEY: "9" * 5000}, grpc.StatusCode.ABORTED),
            ({SESSION_KEY: number}, grpc.StatusCode.ABORTED),
            ({SESSION_KEY: number, TOKEN_KEY: "0" * 32}, grpc.StatusCode.ABORTED),
        ]:
            # Nothing is said: gRPC loses the status of a call that ends while something is being written.
            assert await raw_call(address, method, metadata) is status
        assert handler.offered == []
        reasons = [reason for reason, _ in handler.refusals]
        assert reasons == [RefusalReason.GARBAGE] * 4 + [RefusalReason.OTHER_LEARNER] * 2
        assert max(len(detail) for _, detail in handler.refusals) < 100
        await within(connection.close())

    run(main)


def test_garbage_ends_its_own_call_only() -> None:
    async def main(servers: Servers) -> None:
        handler, address, connection = await connected(servers)
        # What a hostile learner with a session of its own could send.
        credentials = dict(connection._credentials)
        assert await raw_call(address, Method.UPLOAD, credentials, b"\xff" * 50) is grpc.StatusCode.INVALID_ARGUMENT
        first = encode_contribution(contribution())
        assert await raw_call(address, Method.UPLOAD, credentials, first) is grpc.StatusCode.ABORTED
        garbage = [*[b"not a frame"] * 20, END_MARK]
        assert await raw_call(address, Method.UPLOAD, credentials, first, *garbage) is grpc.StatusCode.OK
        assert [reason for reason, _ in handler.failed] == ["bad_checksum"]
        assert await raw_call(address, Method.DOWNLOAD, credentials) is grpc.StatusCode.ABORTED
        assert await raw_call(address, Method.CONTROL, {}, b"\xff" * 50) is grpc.StatusCode.OK
        assert await raw_call(address, Method.UPLOAD, credentials, bytes(5 * 2**20)) is not grpc.StatusCode.OK
        assert [reason for reason, _ in handler.refusals] == [RefusalReason.GARBAGE] * 2, "an upload and a call"
        connection.send(hello())
        await within(handler.until(lambda: bool(handler.heard)))
        assert handler.heard == [hello()]
        await within(connection.close())

    run(main)


def flipped(message: bytes) -> bytes:
    """With one other bit in its middle."""
    middle = len(message) // 2
    return message[:middle] + bytes([message[middle] ^ 1]) + message[middle + 1 :]


def test_a_message_that_the_link_spoilt_ends_its_call_and_refuses_nobody() -> None:
    async def main(servers: Servers) -> None:
        handler, address, connection = await connected(servers)
        credentials = dict(connection._credentials)
        assert await raw_call(address, Method.CONTROL, {}, flipped(encode_learner(hello()))) is grpc.StatusCode.OK
        spoilt = flipped(encode_contribution(contribution()))
        assert await raw_call(address, Method.UPLOAD, credentials, spoilt) is grpc.StatusCode.INVALID_ARGUMENT
        assert [reason for reason, _ in handler.refusals] == [RefusalReason.BAD_CHECKSUM] * 2
        assert (handler.heard, handler.offered) == ([], []), "nobody acts on it"
        # What such a link makes of a session's secret is no reason to give up for good: the next has another.
        secret = {**credentials, TOKEN_KEY: credentials[TOKEN_KEY][::-1]}
        with pytest.raises(TransportError) as caught:
            await within(connection._dialer.call(Method.DOWNLOAD, secret).accepted())
        assert not isinstance(caught.value, AuthError)
        connection.send(hello())
        await within(handler.until(lambda: bool(handler.heard)))
        await within(connection.close())

    run(main)


@pytest.mark.parametrize(
    ("keepalive", "channels"),
    [(QUICK, 1), (QUICK, 3), pytest.param(Keepalive(time_s=5.0, timeout_s=5.0), 3, marks=pytest.mark.slow)],
)
def test_a_link_that_goes_silent_while_writing_is_noticed_by_both_ends_and_the_upload_goes_on_after(
    keepalive: Keepalive, channels: int
) -> None:
    options = ConnectionOptions(channels=channels)

    async def main(servers: Servers) -> None:
        handler = RecordingHandler()
        address = await servers.start(handler, keepalive=keepalive)
        buffers = random_buffers(8_000_000, 0)
        frames = pack(buffers.codes, buffers.scales, chunk_bytes=100_000)
        header = contribution(8_000_000, 0)
        async with LinkProxy(lambda: address, random.Random(0)) as proxy:
            connection = grpc_connection(proxy.address, keepalive=keepalive, options=options)
            await within(connection.connect())
            connection.set_round_trip(0.05)
            # Spread, so that it is in the middle when the link dies; then it writes hard.
            async with asyncio.TaskGroup() as group:
                uploading = group.create_task(fails(connection.upload(header, frames, 4.0)))
                listening = group.create_task(fails(anext(connection.messages())))
                await within(poll(lambda: proxy.counts.up_bytes >= 1_000_000))
                proxy.change(GOOD.having(passage=Passage.HELD))
                # Without keepalive this takes a quarter of an hour.
                await within(uploading, 20.0)
                await within(listening, 20.0)
                await within(handler.until(lambda: bool(handler.ended)), 20.0)
            await connection.close()
            proxy.change(GOOD)
            again = grpc_connection(proxy.address, keepalive=keepalive, options=options)
            await within(again.connect(), 10.0)
            again.set_round_trip(0.05)
            assert await within(again.upload(header, frames, 0.0))
            assert again.counters.uplink_bytes < 7_500_000
            ((_, payload, _),) = handler.complete
            assert same(payload, buffers)
            await within(again.close())

    run(main)


async def fails(work) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TransportError):
        await work


def test_connecting_to_a_silent_host_gives_up_in_time() -> None:
    async def main(servers: Servers) -> None:
        handler = RecordingHandler()
        address = await servers.start(handler)
        async with LinkProxy(lambda: address, random.Random(0)) as proxy:
            proxy.change(GOOD.having(passage=Passage.HELD))
            connection = grpc_connection(proxy.address, options=ConnectionOptions(connect_timeout_s=0.5))
            with pytest.raises(PeerUnavailable, match=r"0\.5 s"):
                await within(connection.connect())
            with pytest.raises(TransportError):
                await within(fetch_status(proxy.address, 0.5))

    run(main)


def test_a_syncer_that_comes_back_on_its_port_is_found_at_once() -> None:
    async def main(servers: Servers) -> None:
        async with Servers() as before:
            address = await before.start(RecordingHandler())
        for _ in range(20):
            with pytest.raises(PeerUnavailable):
                await within(grpc_connection(address).connect())
        assert await servers.start(RecordingHandler(), address) == address
        connection = grpc_connection(address)
        await within(connection.connect())
        await within(connection.close())

    run(main)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("warm_up", "cycles"), [(20, 60), pytest.param(50, 250, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_interrupted_uploads_and_failed_attempts_leave_nothing_behind(warm_up: int, cycles: int) -> None:
    async def interrupt(address: str, frames: list[bytes], cycle: int) -> None:
        connection = grpc_connection(address)
        await within(connection.connect())
        async with asyncio.TaskGroup() as group:
            # Another contribution each time: the syncer keeps the broken ones, but not for ever.
            header = contribution(2**21, 0, step_hi=200 + cycle)
            uploading = group.create_task(connection.upload(header, frames, 100.0))
            listening = group.create_task(ignore(anext(connection.messages())))
            await within(poll(lambda: connection.counters.uplink_bytes >= 1000))
            uploading.cancel()
            listening.cancel()
        await within(connection.close())

    async def fail_to_connect() -> None:
        with pytest.raises(PeerUnavailable):
            await within(grpc_connection("127.0.0.1:1").connect())

    # As the processes do that move bulk; without it glibc's heaps crumble a little more with each burst.
    keep_freed_memory()

    async def main(servers: Servers) -> None:
        address = await servers.start(RecordingHandler())
        buffers = random_buffers(2**21, 0)
        frames = pack(buffers.codes, buffers.scales)
        for cycle in range(warm_up):
            await interrupt(address, frames, cycle)
        process = psutil.Process()
        await asyncio.sleep(0.5)
        before = (process.memory_info().rss, open_files(), len(asyncio.all_tasks()))
        for cycle in range(cycles):
            await interrupt(address, frames, warm_up + cycle)
            await fail_to_connect()
        await within(poll(lambda: open_files() <= before[1] + 2))
        assert process.memory_info().rss - before[0] < 20 * 2**20
        assert len(asyncio.all_tasks()) <= before[2] + 1

    run(main)


async def ignore(work) -> None:  # type: ignore[no-untyped-def]
    with contextlib.suppress(TransportError):
        await work


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, PeerUnavailable),
        (grpc.StatusCode.PERMISSION_DENIED, AuthError),
        (grpc.StatusCode.UNAUTHENTICATED, AuthError),
        (grpc.StatusCode.ABORTED, TransportError),
        (grpc.StatusCode.INTERNAL, TransportError),
        (None, TransportError),
    ],
)
def test_statuses_become_our_errors(code: grpc.StatusCode | None, kind: type[TransportError]) -> None:
    assert type(translated(code, "why")) is kind
    assert "why" in str(translated(code, "why"))
    assert str(translated(code, None))
