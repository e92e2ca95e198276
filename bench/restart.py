"""How long is a run without its syncer? One with a 100 MB model is killed in the midst and started again.

    python bench/restart.py [--quick] [--json] [--repeats N]

The syncer is `wan-diloco syncer` with its evaluator, in processes of their own; eight learners, here, speak the
protocol and train nothing (`synthetic.py`). When all fragments were merged several times it gets SIGKILL, and is
started again at once with --resume: what a supervisor waits in between (half a second at the first time) isn't part.
The model has 27M parameters, 109 MB in f32 (12M with --quick); a snapshot is written every ten seconds, so that there
is a journal to be replayed: `rounds_replayed`.

- `serves_again_s`: from the start of the new process until it answers a status call: the interpreter, torch, the
  snapshot, the merges behind it. `serves_again_cpu_s` is the processor time of that, which tells how much of it was
  waiting for a processor on a machine that does something else.
- `reconnect_s_max`: from the moment at which its port is open until the last of the learners, which have knocked all
  the while as often as the product's policy lets them, is welcome; `reconnect_s_median` beside it.
- `reconnected_at_once_max`: the share of them that are welcome within the same 100 ms: what jitter is for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import rounds
import synthetic
from machine import machine

from wan_diloco.clock import SystemClock
from wan_diloco.config import load_config
from wan_diloco.errors import TransportError
from wan_diloco.protocol.messages import PROTOCOL_VERSION, Hello, Welcome
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.transport.grpc_client import fetch_status, grpc_connection
from wan_diloco.units import Incarnation, LearnerId, LocalStep

ROOT = Path(__file__).resolve().parent.parent
LEARNERS = 8
BIN_S = 0.1
CONFIG = """
[run]
name = "bench"
tokens = {tokens}
[model]
dim = 512
layers = {layers}
heads = 8
vocab = {vocab}
[data]
source = "text:{corpus}"
[inner]
batch_tokens = 1024
[outer]
merge = "rda"
lr = 0.7
momentum = 0.6
[sync]
fragments = 24
period_steps = 24
overlap_steps = 2
quorum = {learners}
membership_lease = "1h"
[syncer]
listen = "127.0.0.1:{port}"
snapshot_every = "10s"
[evaluation]
every_steps = 1000000
tokens = 1024
{regions}
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model, and how often each fragment is merged before the kill."""

    layers: int
    vocab: int
    merges: int


QUICK = Sizes(layers=3, vocab=4_096, merges=2)
FULL = Sizes(layers=6, vocab=16_384, merges=4)


def write_config(folder: Path, sizes: Sizes, port: int) -> Path:
    """A run that is far longer than what is measured."""
    words = [" ".join(f"word{(7 * line + index) % 997}" for index in range(12)) for line in range(4000)]
    (folder / "corpus.txt").write_text("\n\n".join(words))
    path = folder / "run.toml"
    path.write_text(
        CONFIG.format(
            tokens=10**6 * 1024 * LEARNERS,
            layers=sizes.layers,
            vocab=sizes.vocab,
            corpus=folder / "corpus.txt",
            learners=LEARNERS,
            port=port,
            regions="".join(
                f'[[regions]]\nname = "r{index}"\nuplink = "4gbit"\ndownlink = "4gbit"\n' for index in range(LEARNERS)
            ),
        )
    )
    return path


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Syncer:
    """A syncer's process, begun anew as often as wished."""

    def __init__(self, folder: Path, config: Path, port: int) -> None:
        """Not started yet."""
        self._folder = folder
        self._command = [sys.executable, "-m", "wan_diloco", "syncer", str(config), "--run-folder", str(folder / "run")]
        self._port = port
        self.address = f"127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        """Begin a life."""
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*self._command, *arguments], cwd=ROOT, stdout=log, stderr=log)

    async def listens(self) -> None:
        """Wait until the port is open."""
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.close()
                return
            self.check()
            await asyncio.sleep(0.01)

    async def status(self) -> dict[str, Any]:
        """Its first answer."""
        while True:
            with contextlib.suppress(TransportError):
                return await fetch_status(self.address, 5.0)
            self.check()
            await asyncio.sleep(0.01)

    def check(self) -> None:
        """See that it lives."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the syncer ended: {(self._folder / 'log').read_text()[-2000:]}")

    def cpu_s(self) -> float:
        """Processor time of this life so far, without its evaluator's."""
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def end(self, number: signal.Signals) -> None:
        """Signal it, and wait for its end."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()


async def train(pool: synthetic.Pool, syncer: Syncer, least: int) -> None:
    """Merge for a while, and have the syncer killed in the midst of it."""
    names = [region.name for region in pool.config.regions]
    learners = [
        synthetic.Learner(pool, name, index % synthetic.VARIANTS, grpc_connection(syncer.address))
        for index, name in enumerate(names)
    ]
    async with asyncio.TaskGroup() as group:
        for learner in learners:
            group.create_task(learner.run(group))
        while min(learner.installed for learner in learners) < least:
            syncer.check()
            await asyncio.sleep(0.02)
        syncer.end(signal.SIGKILL)
        for learner in learners:
            await learner.connection.close()


async def knock(pool: synthetic.Pool, name: str, address: str, clock: SystemClock) -> float:
    """A learner that has lost its syncer: it tries again and again. When it was welcome."""
    policy, rng, failures = RetryPolicy(), random.Random(name), 0
    while True:
        await asyncio.sleep(policy.delay_s(failures, rng))
        failures += 1
        connection = grpc_connection(address)
        try:
            await connection.connect()
            connection.send(
                Hello(
                    protocol_version=PROTOCOL_VERSION,
                    run=pool.config.run.name,
                    learner_id=LearnerId(name),
                    incarnation=Incarnation(1),
                    layout=pool.maths.layout.lines(),
                    settings=pool.config.agreement(),
                    initial_digests=pool.digests,
                    local_step=LocalStep(0),
                    tokens=0,
                )
            )
            async for message in connection.messages():
                if isinstance(message, Welcome):
                    return clock.now_s()
        except TransportError:
            pass
        finally:
            await connection.close()


def fullest_bin(times_s: list[float]) -> int:
    """The most of these times that lie within a tenth of a second."""
    return max(sum(first <= other < first + BIN_S for other in times_s) for first in times_s)


async def killed(sizes: Sizes, folder: Path) -> dict[str, float]:
    """One kill."""
    port, clock = free_port(), SystemClock()
    config_path = write_config(folder, sizes, port)
    syncer = Syncer(folder, config_path, port)
    syncer.start()
    try:
        pool = synthetic.Pool(load_config([config_path], env={}).config)
        await syncer.listens()
        await train(pool, syncer, sizes.merges * len(pool.frames))
        began_s = clock.now_s()
        syncer.start("--resume")
        names = [region.name for region in pool.config.regions]
        async with asyncio.TaskGroup() as group:
            knocking = [group.create_task(knock(pool, name, syncer.address, clock)) for name in names]
            await syncer.listens()
            open_s = clock.now_s()
            status = await syncer.status()
            served_s = clock.now_s()
            cpu = syncer.cpu_s()
        waits_s = [task.result() - open_s for task in knocking]
    finally:
        syncer.end(signal.SIGKILL)
    snapshots = (folder / "run" / "state" / "snapshots").glob("state-*/manifest.json")
    newest = max((json.loads(path.read_text())["values"]["state"]["totals"]["rounds"] for path in snapshots), default=0)
    return {
        "serves_again_s": served_s - began_s,
        "serves_again_cpu_s": cpu,
        "reconnect_s_max": max(waits_s),
        "reconnect_s_median": statistics.median(waits_s),
        "reconnected_at_once_max": fullest_bin(waits_s) / len(waits_s),
        "rounds_replayed": status["rounds"] - newest,
        "model_mb": pool.config.model.num_parameters * 4 / 1e6,
    }


def measure(sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Several kills, each of a run of its own."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="bench-restart-") as name:
            found.append(asyncio.run(killed(sizes, Path(name))))
    result: dict[str, Any] = {"machine": machine(), "quick": sizes is QUICK, "repeats": repeats}
    for key in found[0]:
        rounds.note(result, key, [each[key] for each in found])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, once")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--repeats", type=int, default=0, help="how often; 3, or 1 with --quick")
    chosen = parser.parse_args()
    result = measure(QUICK if chosen.quick else FULL, chosen.repeats or (1 if chosen.quick else 3))
    rounds.show(result, as_json=chosen.json)


if __name__ == "__main__":
    main()
