"""How even one learner's uplink is over a period: real sizes, the real sender, synthetic bytes.

Not run by itself; `pacing.py` does. The schedule is played step by step: what falls due is sent at its step boundary,
spread over the uplink's share of the window, by `ClientConnection.upload` and `Pacer` to a real server. The small model
goes over the memory transport in virtual time, since a busy machine would move single messages from one step to the
next; the large one over gRPC on loopback, with steps that are much shorter than real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from pacing_ends import LEARNER, contribution, hello, noise
from taker import Taker

from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.config import RunConfig, load_config, parse_config
from wan_diloco.models import run_layout
from wan_diloco.protocol.pacing import UPLINK_SHARE
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.grpc_client import grpc_connection
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.transport.interface import Connection
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.pacer import Pacer, chunk_bytes_for
from wan_diloco.wire.frames import pack

ROOT = Path(__file__).resolve().parent.parent
# Of the windows that are looked at, this many begin within a step.
GRID = 64
UPLINK_BYTES_PER_S = 200e6 / 8
LIMITS = ServerLimits(hello_timeout_s=1e6)
# Dim 512 and a vocabulary of 32k, as small models of the usual kind have them.
LARGE: dict[str, Any] = {
    "run": {"tokens": "1G"},
    "model": {"dim": 512, "layers": 15, "heads": 8, "vocab": 32_000},
    "inner": {"batch_tokens": 4096},
    "sync": {"fragments": 24, "period_steps": 24, "overlap_steps": 2},
    "regions": [{"name": "a"}],
}


def demo() -> RunConfig:
    """The model that comes with the project."""
    return load_config([ROOT / "deploy" / "demo.toml"], env={}).config


def large() -> RunConfig:
    """About 64 million parameters."""
    return parse_config(LARGE)


def in_virtual_time(config: RunConfig) -> dict[str, float]:
    """A period of steps of a second."""

    async def main() -> list[tuple[float, int]]:
        async with MemoryNetwork(limits=LIMITS) as network:
            server = network.server(Taker())
            await server.start()
            found = await period(config, lambda pacer: network.connection(LEARNER, pacer), 1.0)
            await server.stop(0.0)
            return found

    return figures(config, run_virtual(main()), 1.0)


def over_grpc(config: RunConfig, step_s: float) -> dict[str, float]:
    """A period of such steps, over gRPC on loopback."""

    async def main() -> list[tuple[float, int]]:
        server = GrpcSyncerServer(Taker(), limits=LIMITS)
        address = await server.start()
        found = await period(config, lambda pacer: grpc_connection(address, pacer), step_s)
        await server.stop(0.0)
        return found

    return figures(config, uvloop.run(main()), step_s)


async def period(config: RunConfig, connect: Callable[[Pacer], Connection], step_s: float) -> list[tuple[float, int]]:
    """Play two periods; (time, bytes so far) over the second, when what overlaps from before it is there too."""
    layout, codec = run_layout(config), codec_by_name(config.wire.codec)
    schedule = Schedule(num_fragments=layout.num_fragments, period_steps=config.sync.period_steps)
    messages = []
    for fragment in layout.fragments:
        sizes = codec.sizes(build_block_table(fragment))
        chunk_bytes = chunk_bytes_for(UPLINK_BYTES_PER_S, config.wire.chunk_bytes)
        packed = pack(noise(sizes.codes_bytes), noise(sizes.scales_bytes), chunk_bytes=chunk_bytes, zstd=False)
        messages.append((sizes, packed))
    connection = connect(Pacer(UPLINK_BYTES_PER_S))
    await connection.connect()
    connection.send(hello())
    loop = asyncio.get_running_loop()
    spread_s = UPLINK_SHARE * config.sync.overlap_steps * step_s
    began_s, counted = loop.time(), []

    async def count() -> None:
        for index in range(2 * schedule.period_steps * GRID + 1):
            await asyncio.sleep(began_s + index * step_s / GRID - loop.time())
            counted.append((loop.time(), connection.counters.uplink_bytes))

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        for step in range(1, 2 * schedule.period_steps + 1):
            for fragment in schedule.due_at(step):
                sizes, packed = messages[fragment]
                header = contribution(fragment, step, sizes.codes_bytes, sizes.scales_bytes)
                group.create_task(connection.upload(header, packed, spread_s, unasked=True))
            await asyncio.sleep(began_s + step * step_s - loop.time())
        await counting
    await connection.close()
    return counted[schedule.period_steps * GRID :]


def figures(config: RunConfig, counted: list[tuple[float, int]], step_s: float) -> dict[str, float]:
    """The highest step's worth of bytes over the mean one, and what sending everything at once would be over it."""
    steps = config.sync.period_steps
    total = counted[-1][1] - counted[0][1]
    windows = [
        # A busy machine samples a little late or early: as rates, windows stay comparable.
        (later[1] - earlier[1]) / (later[0] - earlier[0]) * step_s
        for earlier, later in zip(counted, counted[GRID:], strict=False)
    ]
    return {
        "peak_over_mean": max(windows) / (total / steps),
        # All in the uplink's share of one window, which is UPLINK_SHARE * tau steps long.
        "peak_over_at_once": total / (UPLINK_SHARE * config.sync.overlap_steps) / max(windows),
        "bytes_a_period": float(total),
    }
