"""Learners that train nothing: they speak the protocol over gRPC, and answer every pull with bytes made beforehand.

Run as a program by `syncer.py`, with the configuration as its argument and, once the syncer listens, a task on its
standard input; its last line is what it counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop

from wan_diloco.algorithm.codec import Payload
from wan_diloco.algorithm.publication import digest
from wan_diloco.config import RunConfig, load_config
from wan_diloco.errors import TransportError
from wan_diloco.models import build_model, model_tensors, run_layout
from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    ContributionHeader,
    ContributionKey,
    Declined,
    DeclineReason,
    FragmentReport,
    Hello,
    Pull,
    Report,
    Start,
    UpdateReceived,
    Welcome,
)
from wan_diloco.syncer.fragments_store import FragmentStore, Maths
from wan_diloco.syncer.plan import run_maths
from wan_diloco.transport.allocator import keep_freed_memory
from wan_diloco.transport.grpc_client import grpc_connection
from wan_diloco.transport.interface import Connection, Frames
from wan_diloco.transport.pacer import chunk_bytes_for
from wan_diloco.units import Epoch, FragmentId, Incarnation, LearnerId, LocalStep, Version
from wan_diloco.wire.frames import pack

# Of the same fragment, so that learners differ without a payload for each of them.
VARIANTS = 2
SAMPLE_EVERY_S = 0.02


class Pool:
    """What all learners send."""

    def __init__(self, config: RunConfig) -> None:
        """Encode Gaussian deltas whose rows differ in scale, as real ones do; zstd then saves what it saves there."""
        self.config = config
        layout = run_layout(config)
        self.maths: Maths = run_maths(config, layout)
        store = FragmentStore.fresh(layout, model_tensors(build_model(config)))
        self.digests = tuple(digest(value.published_N) for value in store.values())
        self._noise_N = torch.randn(2**20, generator=torch.Generator().manual_seed(1))
        self.frames = [[self._frames(index, variant) for variant in range(VARIANTS)] for index in range(len(store))]
        self.sizes = [self.maths.codec.sizes(self.maths.table(FragmentId(index))) for index in range(len(store))]

    def _frames(self, index: int, variant: int) -> Frames:
        table = self.maths.table(FragmentId(index))
        # Of different fragments it is the same noise, from another place on: to draw it takes longer than to encode it.
        scale_B = torch.exp(self._noise_N[: table.numel // 512 + 1].roll(index)) * 1e-3
        noise_N = self._noise_N.roll(1000 * index + variant).repeat(table.numel // self._noise_N.numel() + 1)
        delta_N = noise_N[: table.numel] * scale_B.repeat_interleave(512)[: table.numel]
        payload: Payload = self.maths.codec.encode(delta_N, table)
        wire = self.config.wire
        uplink_bytes_per_s = min(region.uplink_bytes_per_s for region in self.config.regions)
        chunk_bytes = chunk_bytes_for(uplink_bytes_per_s, wire.chunk_bytes)
        return pack(payload.codes, payload.scales, chunk_bytes=chunk_bytes, zstd=wire.zstd)


class Learner:
    """One of them. It takes a step when the round before is done, so that as much is under way as may be."""

    def __init__(self, pool: Pool, name: str, variant: int, connection: Connection) -> None:
        """Not connected yet."""
        self._pool = pool
        self._name = LearnerId(name)
        self._variant = variant
        self.connection = connection
        self._versions = [Version(Epoch(0), 0)] * len(pool.frames)
        self._lows = [0] * len(pool.frames)
        self._incarnation = Incarnation(0)
        self.local_step = 0
        self.installed = 0
        self.contributed = 0

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Until the connection ends."""
        await self.connection.connect()
        config = self._pool.config
        self.connection.send(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                run=config.run.name,
                learner_id=self._name,
                incarnation=Incarnation(0),
                layout=self._pool.maths.layout.lines(),
                settings=config.agreement(),
                initial_digests=self._pool.digests,
                local_step=LocalStep(0),
                tokens=0,
            )
        )
        group.create_task(_ignoring(self._receive()))
        await _ignoring(self._listen(group))

    def _step(self) -> None:
        # Two rounds may be in flight.
        self.local_step = max(self.local_step, self.installed + self._pool.config.sync.overlap_steps)
        self._report()

    def _report(self) -> None:
        tokens = self._pool.config.inner.batch_tokens
        self.connection.send(
            Report(
                local_step=LocalStep(self.local_step),
                tokens=self.local_step * tokens,
                step_time_s=0.05,
                loss=2.0,
                learning_rate=1e-3,
                fragments=tuple(
                    FragmentReport(
                        fragment_id=FragmentId(index),
                        version=version,
                        pending=None,
                        resync=0,
                        step_lo=LocalStep(low),
                        tokens_lo=low * tokens,
                    )
                    for index, (version, low) in enumerate(zip(self._versions, self._lows, strict=True))
                ),
            )
        )

    async def _listen(self, group: asyncio.TaskGroup) -> None:
        async for message in self.connection.messages():
            match message:
                case Welcome():
                    self._incarnation = message.incarnation
                    # Who steps before all are there would be ahead of them for ever.
                    self._report()
                    if message.started:
                        self._step()
                case Start():
                    self._step()
                case Pull():
                    group.create_task(_ignoring(self._answer(message)))
                case _:
                    pass

    async def _answer(self, pull: Pull) -> None:
        index = pull.fragment_id
        low, high, tokens = self._lows[index], self.local_step, self._pool.config.inner.batch_tokens
        if high == low:
            reason = DeclineReason.ZERO_STEPS
            self.connection.send(
                Declined(round_id=pull.round_id, attempt=pull.attempt, fragment_id=index, reason=reason)
            )
            return
        header = ContributionHeader(
            key=ContributionKey(
                learner_id=self._name,
                incarnation=self._incarnation,
                fragment_id=index,
                step_lo=LocalStep(low),
            ),
            round_id=pull.round_id,
            attempt=pull.attempt,
            base=self._versions[index],
            step_hi=LocalStep(high),
            tokens_lo=low * tokens,
            tokens_hi=high * tokens,
            unit_hi=high,
            codec=self._pool.config.wire.codec,
            codes_bytes=self._pool.sizes[index].codes_bytes,
            scales_bytes=self._pool.sizes[index].scales_bytes,
        )
        await self.connection.upload(header, self._pool.frames[index][self._variant], 0.0, unasked=True)
        self.contributed += 1

    async def _receive(self) -> None:
        async for header, _ in self.connection.updates():
            self._versions[header.fragment_id] = header.to_version
            self._lows[header.fragment_id] = self.local_step
            self.connection.send(
                UpdateReceived(fragment_id=header.fragment_id, version=header.to_version, resync=header.resync)
            )
            self.installed += 1
            self._step()


async def _ignoring(work: Any) -> None:
    with contextlib.suppress(TransportError):
        await work


class Sampler:
    """Watches the syncer's memory."""

    def __init__(self, pid: int) -> None:
        """Nothing was seen yet."""
        self._status = Path(f"/proc/{pid}/status")
        self.peak_bytes = 0

    async def run(self) -> None:
        """Look again and again."""
        while True:
            for line in self._status.read_text().splitlines():
                if line.startswith("RssAnon"):
                    self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) * 1024)
            await asyncio.sleep(SAMPLE_EVERY_S)


async def measure(pool: Pool, task: dict[str, Any]) -> dict[str, float]:
    """Warm up, then let some time pass, and say what it cost the syncer."""
    syncer = psutil.Process(task["pid"])
    sampler = Sampler(task["pid"])
    names = [region.name for region in pool.config.regions]
    learners = [
        Learner(pool, name, index % VARIANTS, grpc_connection(task["address"])) for index, name in enumerate(names)
    ]

    def cpu_s() -> float:
        times = syncer.cpu_times()
        return times.user + times.system

    def seen() -> dict[str, float]:
        traffic = [learner.connection.counters for learner in learners]
        return {
            "cpu_s": cpu_s(),
            "wall_s": asyncio.get_running_loop().time(),
            "uplink_bytes": sum(each.uplink_bytes for each in traffic),
            "downlink_bytes": sum(each.downlink_bytes for each in traffic),
            "rounds": min(learner.installed for learner in learners),
            "contributions": sum(learner.contributed for learner in learners),
        }

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(learner.run(group)) for learner in learners]
        while min(learner.installed for learner in learners) < task["warm_up_rounds"]:  # noqa: ASYNC110 - costs nothing
            await asyncio.sleep(0.01)
        # Whoever watches it begins, and ends, with us.
        syncer.send_signal(signal.SIGUSR1)
        watching = group.create_task(sampler.run())
        before = seen()
        await asyncio.sleep(task["window_s"])
        after = seen()
        syncer.send_signal(signal.SIGUSR1)
        watching.cancel()
        for learner in learners:
            await learner.connection.close()
        await asyncio.wait(running)
    return {key: after[key] - before[key] for key in before} | {"peak_anonymous_bytes": sampler.peak_bytes}


def main() -> None:
    """Read the task, measure, print."""
    torch.set_num_threads(1)
    keep_freed_memory()
    pool = Pool(load_config([Path(sys.argv[1])], env={}).config)
    task = json.loads(sys.stdin.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(pool, task))))


if __name__ == "__main__":
    main()
