"""What a capped link really carries: the real client and server in two namespaces, counted at the interface.

Not run by itself; `pacing.py` does. Each process that it starts is this file with a role.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import uvloop
from pacing_ends import contribution, hello, noise
from taker import Taker

from wan_diloco.clock import SystemClock
from wan_diloco.errors import TransportError
from wan_diloco.lab.namespaces import Shaper, WirePair
from wan_diloco.protocol.messages import Hello, LearnerMessage, Pace, Report, SegmentKind, UpdateHeader, UpdateSegment
from wan_diloco.protocol.pacing import Cap
from wan_diloco.transport.allocator import keep_freed_memory
from wan_diloco.transport.grpc_client import grpc_connection
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.transport.interface import Connection, Session
from wan_diloco.transport.pacer import Pacer, chunk_bytes_for
from wan_diloco.units import Epoch, FragmentId, GlobalStep, LearnerId, LocalStep, Version
from wan_diloco.wire.frames import pack

ROOT = Path(__file__).resolve().parent.parent
CAP_BYTES_PER_S = 100e6 / 8
WINDOW_S = 0.1
SAMPLE_S = 0.004
PORT = 7400
CODES_BYTES = 16 * 2**20
HEARTBEAT_EVERY_S = 0.05
# Until the flow-control windows have grown, which is not what is measured.
SETTLE_S = 1.5
# What follows the last sample: bulk must not end before.
TAIL_S = 0.5
DOWN = LearnerId("down")


# ---- roles ---------------------------------------------------------------------------------------


class Peer(Taker):
    """Answers reports, and sends updates without end to whoever is called so."""

    def __init__(self, group: asyncio.TaskGroup, cap_bytes_per_s: float) -> None:
        """Pack once."""
        self._group = group
        self._cap_bytes_per_s = cap_bytes_per_s
        self._frames = frames(cap_bytes_per_s)

    def said(self, session: Session, message: LearnerMessage) -> None:
        """See the class."""
        if isinstance(message, Report):
            session.send(Pace(global_step=GlobalStep(message.local_step), anchor=0))
        elif isinstance(message, Hello) and message.learner_id == DOWN:
            session.set_downlink_rate(self._cap_bytes_per_s)
            for fragment in range(2):
                self._group.create_task(self._send(session, fragment))

    async def _send(self, session: Session, fragment: int) -> None:
        version = Version(Epoch(0), 1)
        segment = UpdateSegment(
            kind=SegmentKind.VALUE,
            from_version=version,
            to_version=version,
            digest="d",
            codec="f32",
            codes_bytes=CODES_BYTES,
            scales_bytes=0,
            merged=(),
        )
        header = UpdateHeader(fragment_id=FragmentId(fragment), resync=0, segments=(segment,))
        with contextlib.suppress(TransportError):
            while True:
                await session.send_update(header, [self._frames])


def frames(cap_bytes_per_s: float) -> list[bytes]:
    """A transfer's messages, as large as the cap lets them be."""
    return pack(noise(CODES_BYTES), noise(0), chunk_bytes=chunk_bytes_for(cap_bytes_per_s, 2**19), zstd=False)


async def serve(address: str, cap_bytes_per_s: float) -> None:
    """Be the syncer's end until killed."""
    async with asyncio.TaskGroup() as group:
        server = GrpcSyncerServer(Peer(group, cap_bytes_per_s), address, insecure=True)
        print(await server.start(), flush=True)
        await asyncio.Event().wait()


async def send(address: str, cap_bytes_per_s: float, direction: str, seconds: float) -> None:
    """Be the learner's end: bulk in one direction, and heartbeats, whose round trips are printed."""
    connection = grpc_connection(address, Pacer(cap_bytes_per_s))
    await connection.connect()
    connection.send(hello(LearnerId(direction)))
    round_trips_s: list[float] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(beat(connection, round_trips_s))]
        if direction == DOWN:
            tasks.append(group.create_task(drain(connection)))
        else:
            messages = frames(cap_bytes_per_s)
            tasks += [group.create_task(upload(connection, messages, fragment)) for fragment in range(2)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
    await connection.close()
    print(json.dumps(round_trips_s), flush=True)


async def beat(connection: Connection, round_trips_s: list[float]) -> None:
    """Small messages there and back."""
    loop, number = asyncio.get_running_loop(), 0
    answers = connection.messages()
    while True:
        number += 1
        began_s = loop.time()
        connection.send(
            Report(local_step=LocalStep(number), tokens=0, step_time_s=0.1, loss=1.0, learning_rate=0.1, fragments=())
        )
        await anext(answers)
        round_trips_s.append(loop.time() - began_s)
        await asyncio.sleep(max(0.0, HEARTBEAT_EVERY_S - (loop.time() - began_s)))


async def drain(connection: Connection) -> None:
    """Take updates."""
    async for _ in connection.updates():
        pass


async def upload(connection: Connection, messages: list[bytes], fragment: int) -> None:
    """One contribution after the other."""
    number = 0
    while True:
        number += 1
        await connection.upload(contribution(fragment, number, CODES_BYTES, 0), messages, 0.0, unasked=True)


def sample(interface: str, seconds: float) -> None:
    """Print (time, bytes sent, bytes received) of an interface every few milliseconds."""
    folder, clock, pause = Path("/sys/class/net") / interface / "statistics", SystemClock(), threading.Event()
    with (folder / "tx_bytes").open("rb", buffering=0) as sent, (folder / "rx_bytes").open("rb", buffering=0) as got:
        rows, end_s = [], clock.now_s() + seconds
        while clock.now_s() < end_s:
            sent.seek(0)
            got.seek(0)
            # The reading lies between the two; the earlier one makes windows longer, the later one shorter.
            before_s, sent_bytes, after_s = clock.now_s(), int(sent.read()), clock.now_s()
            rows.append((before_s, after_s, sent_bytes, int(got.read())))
            pause.wait(SAMPLE_S)
    print(json.dumps(rows), flush=True)


# ---- around the processes ------------------------------------------------------------------------


def one(direction: str, seconds: float, *, shaped: bool, cap_bytes_per_s: float = CAP_BYTES_PER_S) -> dict[str, float]:
    """One transfer: what the interface of its sender carried, and how the heartbeats did.

    Args:
        direction: "up" or "down"; the bulk's.
        seconds: How long.
        shaped: Whether a shaper of the kernel's stands behind our cap, at the same rate.
        cap_bytes_per_s: Ours.
    """
    shaper = Shaper(rate_bytes_per_s=cap_bytes_per_s) if shaped else None
    cap = str(cap_bytes_per_s)
    with WirePair("wdp", left=shaper, right=shaper) as pair, contextlib.ExitStack() as stack:
        address = f"{pair.right_address}:{PORT}"
        server = stack.enter_context(role(pair.command(pair.right, *own("serve", address, cap))))
        assert server.stdout is not None
        server.stdout.readline()
        at = pair.left if direction == "up" else pair.right
        words = own("send", address, cap, direction, str(SETTLE_S + seconds + TAIL_S))
        client = stack.enter_context(role(pair.command(pair.left, *words)))
        threading.Event().wait(SETTLE_S)
        sampler = stack.enter_context(role(pair.command(at, *own("sample", at, str(seconds)))))
        rows = json.loads(sampler.communicate(timeout=seconds + 60)[0])
        round_trips_s = sorted(json.loads(client.communicate(timeout=60)[0]))
    return {
        "mean_over_cap": rate(rows, 2) / cap_bytes_per_s,
        "window_over_allowed_max": worst_window(rows, Cap.of(cap_bytes_per_s)),
        "acknowledgements_over_cap": rate(rows, 3) / cap_bytes_per_s,
        "heartbeat_p99_ms": 1000 * round_trips_s[int(0.99 * len(round_trips_s))],
    }


def rate(rows: list[list[float]], column: int) -> float:
    """Bytes a second over all."""
    return (rows[-1][column] - rows[0][column]) / (rows[-1][0] - rows[0][0])


def worst_window(rows: list[list[float]], cap: Cap) -> float:
    """The most of what is allowed that any window carried that is at least WINDOW_S long."""
    worst, last = 0.0, 0
    for row in rows:
        while last < len(rows) and rows[last][0] - row[1] < WINDOW_S:
            last += 1
        if last == len(rows):
            break
        # As long as it can have been.
        window_s = rows[last][1] - row[0]
        worst = max(worst, (rows[last][2] - row[2]) / (cap.rate_bytes_per_s * window_s + cap.burst_bytes))
    return worst


def own(*words: str) -> list[str]:
    """The command line of a role."""
    return [sys.executable, str(Path(__file__).resolve()), *words]


@contextlib.contextmanager
def role(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main(words: list[str]) -> None:
    """Play a role."""
    keep_freed_memory()
    match words:
        case ["serve", address, cap]:
            uvloop.run(serve(address, float(cap)))
        case ["send", address, cap, direction, seconds]:
            uvloop.run(send(address, float(cap), direction, float(seconds)))
        case ["sample", interface, seconds]:
            sample(interface, float(seconds))
        case _:
            sys.exit("pacing.py runs this")


if __name__ == "__main__":
    main(sys.argv[1:])
