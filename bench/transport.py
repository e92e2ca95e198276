"""How fast does bulk go, and what does it cost? Our uploads over gRPC, plain and encrypted, beside bare TCP.

    python bench/transport.py [--quick] [--json] [--chunk-bytes 1048576] [--size-mib 256] [--rounds 5]

Two processes a kind, a sender and a receiver, over loopback and on uvloop as in production. All kinds are there from
the beginning and take turns, so that what they are compared by was measured within the same seconds. Figures are
medians over the rounds, with the extremes beside them.

- `raw_tcp`: asyncio's BufferedProtocol takes the same bytes in writes of the same length, and does nothing with them.
- `plain`: frames with checksums, sent by `Connection.upload`, checked and put together by `GrpcSyncerServer`.
- `tls`: the same with certificates on both sides.
- `bare_grpc`, `bare_tls`: grpc.aio takes the same messages in one call and does nothing with them: what is left when
  all that is ours is taken away.
- `plain_default_allocator`: the same as plain, without what `keep_freed_memory` does at the process's start.

Processor time is of both processes, between the first byte and the acknowledgement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import trustme
import uvloop
from machine import machine
from taker import Taker

from wan_diloco.protocol.messages import ContributionHeader, ContributionKey
from wan_diloco.transport.allocator import keep_freed_memory
from wan_diloco.transport.grpc_client import grpc_connection
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.transport.options import ServerLimits
from wan_diloco.units import Epoch, FragmentId, Incarnation, LearnerId, LocalStep, RoundId, Version
from wan_diloco.wire.frames import CHUNK_BYTES_DEFAULT, pack

KINDS = ("raw_tcp", "bare_grpc", "bare_tls", "plain", "tls", "plain_default_allocator")
BARE_METHOD = "/bench.Bare/Take"
MIB = 2**20


# ---- a sender or a receiver, one a process -------------------------------------------------------


class BareReceiver(grpc.GenericRpcHandler):
    """Takes all messages of a call."""

    def service(self, handler_call_details: Any) -> Any:  # noqa: ARG002 - there is one
        """The one method."""
        return grpc.stream_unary_rpc_method_handler(self.take)

    async def take(self, messages: Any, context: Any) -> bytes:  # noqa: ARG002 - grpc's
        """Let go of each."""
        async for _ in messages:
            pass
        return b"!"


class RawReceiver(asyncio.BufferedProtocol):
    """Takes bytes, and says when a transfer has come whole: after as many as its first eight say."""

    def __init__(self) -> None:
        """Nothing came yet."""
        self.buffer = bytearray(MIB)
        self.left = 0
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Keep it for the answer."""
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - asyncio's
        """Always the same."""
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Count, and answer at the end."""
        if not self.left:
            self.left = int.from_bytes(self.buffer[:8], "little") + 8
        self.left -= nbytes
        if not self.left:
            self.transport.write(b"!")


def frames_of(size_bytes: int, chunk_bytes: int) -> tuple[ContributionHeader, list[bytes]]:
    """A contribution of int4 codes that look like noise, and its messages."""
    codes = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    scales = np.random.default_rng(1).integers(0, 256, size_bytes // 32 // 2 * 2, dtype=np.uint8)
    header = ContributionHeader(
        key=ContributionKey(
            learner_id=LearnerId("us-east"), incarnation=Incarnation(1), fragment_id=FragmentId(0), step_lo=LocalStep(0)
        ),
        round_id=RoundId(0),
        attempt=1,
        base=Version(Epoch(0), 0),
        step_hi=LocalStep(10),
        tokens_lo=0,
        tokens_hi=10,
        unit_hi=1,
        codec="int4",
        codes_bytes=codes.size,
        scales_bytes=scales.size,
    )
    return header, pack(codes, scales, chunk_bytes=chunk_bytes)


async def receive(arguments: argparse.Namespace, secrets: dict[str, str]) -> None:
    """Listen until stdin ends; answer each line on it with the processor time so far."""
    if arguments.kind == "raw_tcp":
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(RawReceiver, "127.0.0.1", 0)
        answer(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        await each_line(lambda: answer(spent()))
        listening.close()
        return
    credentials = None
    if arguments.kind.endswith("tls"):
        pair = (secrets["key"].encode(), secrets["certificate"].encode())
        credentials = grpc.ssl_server_credentials(
            [pair], root_certificates=secrets["root"].encode(), require_client_auth=True
        )
    if arguments.kind.startswith("bare"):
        bare = grpc.aio.server(handlers=(BareReceiver(),))
        port = (
            bare.add_secure_port("127.0.0.1:0", credentials) if credentials else bare.add_insecure_port("127.0.0.1:0")
        )
        await bare.start()
        answer(f"127.0.0.1:{port}")
        await each_line(lambda: answer(spent()))
        await bare.stop(1.0)
        return
    # Nobody says Hello here.
    server = GrpcSyncerServer(Taker(), limits=ServerLimits(hello_timeout_s=1e6), credentials=credentials)
    answer(await server.start())
    await each_line(lambda: answer(spent()))
    await server.stop(1.0)


async def send(arguments: argparse.Namespace, secrets: dict[str, str], address: str) -> None:
    """Send once for each line on stdin; answer with the time it took and the processor time so far."""
    header, frames = frames_of(arguments.size_mib * MIB, arguments.chunk_bytes)
    host, _, port = address.rpartition(":")
    if arguments.kind == "raw_tcp":
        reader, writer = await asyncio.open_connection(host, int(port))
        total = sum(map(len, frames))

        async def once() -> None:
            writer.write(total.to_bytes(8, "little"))
            for frame in frames:
                writer.write(frame)
                await writer.drain()
            await reader.readexactly(1)

        await each_line(lambda: timed(once))
        return
    credentials = None
    if arguments.kind.endswith("tls"):
        credentials = grpc.ssl_channel_credentials(*(secrets[name].encode() for name in ("root", "key", "certificate")))
    if arguments.kind.startswith("bare"):
        channel = grpc.aio.secure_channel(address, credentials) if credentials else grpc.aio.insecure_channel(address)

        async def call() -> None:
            under_way = channel.stream_unary(BARE_METHOD)()
            for frame in frames:
                await under_way.write(frame)
            await under_way.done_writing()
            await under_way

        await each_line(lambda: timed(call))
        await channel.close()
        return
    connection = grpc_connection(address, credentials=credentials)
    await connection.connect()

    async def upload() -> None:
        if not await connection.upload(header, frames, 0.0, unasked=True):
            raise AssertionError("refused")

    await each_line(lambda: timed(upload))
    await connection.close()


async def timed(work: Any) -> None:
    """Do it, and answer with its times."""
    began = (time.perf_counter(), spent())  # noqa: TID251 - measuring is what this is for
    await work()
    answer([time.perf_counter() - began[0], spent() - began[1]])  # noqa: TID251


def spent() -> float:
    """Processor time of this process so far, in seconds."""
    times = os.times()
    return times.user + times.system


def answer(value: object) -> None:
    """To whoever started this process."""
    print(json.dumps(value), flush=True)


async def each_line(work: Any) -> None:
    """Do something for each line on stdin."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        waited = work()
        if waited is not None:
            await waited


def child(arguments: argparse.Namespace) -> None:
    """Run as one of the two processes of a kind."""
    if arguments.kind not in {"raw_tcp", "plain_default_allocator"}:
        problem = keep_freed_memory()
        if problem:
            print(f"the allocator isn't set up: {problem}", file=sys.stderr)
    # Unbuffered: what follows on the pipe is for the event loop.
    secrets = json.loads(sys.stdin.buffer.raw.readline())
    work = send(arguments, secrets, arguments.address) if arguments.address else receive(arguments, secrets)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


# ---- who starts them and compares ----------------------------------------------------------------


@dataclass
class Pair:
    """Sender and receiver of a kind."""

    sender: subprocess.Popen[str]
    receiver: subprocess.Popen[str]

    def once(self) -> tuple[float, float]:
        """Send once.

        Returns:
            Seconds it took, and processor seconds of both.
        """
        before = ask(self.receiver)
        wall_s, sender_s = ask(self.sender)
        return wall_s, sender_s + ask(self.receiver) - before

    def peak_mib(self) -> float:
        """The most memory that either took, in MiB; a sender holds what it sends."""
        return max(
            int(line.split()[1]) / 1024
            for process in (self.receiver,)
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )

    def end(self) -> None:
        """Let both go."""
        for process in (self.sender, self.receiver):
            process.communicate()


def ask(process: subprocess.Popen[str]) -> Any:
    """A line to a child, and its answer."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def start(kind: str, arguments: argparse.Namespace, secrets: str, address: str = "") -> subprocess.Popen[str]:
    """A child, told its secrets."""
    command = [sys.executable, __file__, "--kind", kind, "--address", address]
    command += ["--size-mib", str(arguments.size_mib), "--chunk-bytes", str(arguments.chunk_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    process.stdin.write(secrets + "\n")
    process.stdin.flush()
    return process


def start_pair(kind: str, arguments: argparse.Namespace, secrets: str) -> Pair:
    """Both of a kind."""
    receiver = start(kind, arguments, secrets)
    assert receiver.stdout
    return Pair(start(kind, arguments, secrets, json.loads(receiver.stdout.readline())), receiver)


def certificates() -> str:
    """What both ends need, as JSON: an authority, and one certificate for either end."""
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    return json.dumps(
        {
            "root": authority.cert_pem.bytes().decode(),
            "key": leaf.private_key_pem.bytes().decode(),
            "certificate": b"".join(blob.bytes() for blob in leaf.cert_chain_pems).decode(),
        }
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All kinds in turn, and what follows from them."""
    result: dict[str, Any] = {
        "machine": machine(),
        "chunk_bytes": arguments.chunk_bytes,
        "size_mib": arguments.size_mib,
        "rounds": arguments.rounds,
    }
    secrets = certificates()
    gib = arguments.size_mib / 1024 * 33 / 32
    pairs = {kind: start_pair(kind, arguments, secrets) for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for pair in pairs.values():  # connects, and touches what it will need
        pair.once()
    for _ in range(arguments.rounds):
        for kind, pair in pairs.items():
            wall_s, processor_s = pair.once()
            rates[kind].append(gib / wall_s)
            costs[kind].append(processor_s / gib)
    result["receiver_peak_mib"] = {kind: round(pair.peak_mib(), 1) for kind, pair in pairs.items()}
    for pair in pairs.values():
        pair.end()
    for kind in KINDS:
        note(result, f"{kind}_gib_per_s", rates[kind])
    note(result, "grpc_over_raw_tcp", ratios(rates["plain"], rates["raw_tcp"]))
    note(result, "grpc_over_bare_grpc", ratios(rates["plain"], rates["bare_grpc"]))
    note(result, "bare_grpc_over_raw_tcp", ratios(rates["bare_grpc"], rates["raw_tcp"]))
    note(result, "tls_over_plain", ratios(rates["tls"], rates["plain"]))
    note(result, "bare_tls_over_bare_grpc", ratios(rates["bare_tls"], rates["bare_grpc"]))
    note(result, "cpu_s_per_gib", costs["plain"])
    note(result, "tls_cpu_s_per_gib", costs["tls"])
    note(result, "cpu_s_per_gib_default_allocator", costs["plain_default_allocator"])
    note(result, "raw_tcp_cpu_s_per_gib", costs["raw_tcp"])
    note(result, "bare_grpc_cpu_s_per_gib", costs["bare_grpc"])
    note(result, "bare_tls_cpu_s_per_gib", costs["bare_tls"])
    return result


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Round by round."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def note(result: dict[str, Any], key: str, values: list[float]) -> None:
    """Median and extremes."""
    result[key] = round(statistics.median(values), 4)
    result[f"{key}_min"], result[f"{key}_max"] = round(min(values), 4), round(max(values), 4)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES_DEFAULT)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        child(arguments)
        return
    if arguments.quick:
        arguments.size_mib, arguments.rounds = 128, 5
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"on {result['machine']}, {arguments.size_mib} MiB a transfer, chunks of {arguments.chunk_bytes} bytes")
    for key, value in result.items():
        if f"{key}_min" in result:
            print(f"{key:35} {value:8.3f}  ({result[f'{key}_min']:.3f} to {result[f'{key}_max']:.3f})")
    print(f"receivers' peak, MiB: {result['receiver_peak_mib']}")


if __name__ == "__main__":
    main()
