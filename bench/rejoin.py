"""How long until a learner that was killed trains again? Over the bare transfer time of what it is owed.

    python bench/rejoin.py [--quick] [--json] [--kill 50]

Three learners of a model of 100 MB in f32 (25 MB with `--quick`), each of whose links is capped at 200 Mbit/s both
ways, train over loopback. One is killed, and started again with nothing of its own. It is owed the published bases, 4
bytes a parameter, and a peer's inner moments, 8 bytes a parameter; the bare time is that of these bytes at 200 Mbit/s.

- `rejoin_over_bare`: from its Hello to the beginning of its first step, over the bare time.
- `took_with_step_s`: up to the report of that step.
- `started_s`: before that, until Hello: an interpreter, torch, the model. Told, and not counted.
- with `--kill PERCENT`: its donor is killed when that share of the moments has left it; `killed_over_bare`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine
from rounds import show

from wan_diloco.clock import SystemClock
from wan_diloco.config import RunConfig, load_config
from wan_diloco.errors import TransportError
from wan_diloco.models import run_layout
from wan_diloco.transport.grpc_client import fetch_status

RATE_BYTES_PER_S = 200e6 / 8
BASES, MOMENTS = 4, 8
LAYERS, LAYERS_QUICK = 8, 2
NAMES = ("east", "north", "west")
LIMIT_S = 600.0
POLL_S = 0.1
CONFIG = """
[run]
name = "rejoin"
tokens = "10M"
[model]
dim = 512
layers = {layers}
heads = 8
sequence_length = 16
[data]
source = "text:{corpus}"
[inner]
batch_tokens = 16
[sync]
fragments = 24
period_steps = 24
[evaluation]
every_steps = 1000000
"""
REGION = """
[[regions]]
name = "{name}"
uplink = "{rate}"
downlink = "{rate}"
step_time_min = "1s"
"""


class Run:
    """Processes of a run, in a folder."""

    def __init__(self, folder: Path, layers: int, rate: str = "200mbit") -> None:
        """Write the configuration."""
        corpus = folder / "corpus.txt"
        corpus.write_text("".join(f"The {i}th day was much like the {i * i}th.\n\n" for i in range(2000)))
        self.path = folder / "run.toml"
        regions = "".join(REGION.format(name=name, rate=rate) for name in NAMES)
        self.path.write_text(CONFIG.format(layers=layers, corpus=corpus) + regions)
        self.folder = folder / "run"
        self.config: RunConfig = load_config([self.path], env={}).config
        self.parameters = sum(fragment.numel for fragment in run_layout(self.config).fragments)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.clock = SystemClock()

    def start(self, name: str) -> None:
        """Start a learner, or the syncer by the name of "syncer"."""
        command = ["syncer"] if name == "syncer" else ["learner", "--region", name, "--threads", "1"]
        arguments = [sys.executable, "-m", "wan_diloco", command[0], str(self.path), *command[1:]]
        with (self.folder.parent / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*arguments, "--run-folder", str(self.folder)], stdout=log, stderr=log, env=dict(os.environ)
            )

    def kill(self, name: str) -> None:
        """End a process without a word; a learner's uplink goes with it."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def stop(self) -> None:
        """End what is left."""
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)

    async def until(self, holds: Any) -> dict[str, Any]:
        """The first status for which this holds."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for name, process in self.processes.items():
                    if process.poll() not in (None, -signal.SIGKILL):
                        raise SystemExit(f"{name} ended: {(self.folder.parent / f'{name}.log').read_text()[-2000:]}")
                await asyncio.sleep(POLL_S)
                try:
                    status: dict[str, Any] = await fetch_status((self.folder / "address").read_text(), 5.0)
                except (TransportError, OSError):
                    continue
                if holds(status):
                    return status


def of(status: dict[str, Any], name: str) -> dict[str, Any]:
    """A learner's part of a status."""
    return next((each for each in status["learners"] if each["learner_id"] == name), {})


async def measure(run: Run, kill_percent: int | None) -> dict[str, Any]:
    """Play it once."""
    for name in ("syncer", *NAMES):
        run.start(name)
    # Everybody's contributions have been merged, so that whoever is asked is proven.
    await run.until(lambda status: all(of(status, name).get("merged_fresh", 0) >= 3 for name in NAMES))
    run.kill("east")
    life = of(await run.until(lambda status: not of(status, "east")["connected"]), "east")["incarnation"]
    # With a checkpoint of its own it would need no peer.
    shutil.rmtree(run.folder / "learners" / "east" / "checkpoint", ignore_errors=True)
    began_s = run.clock.now_s()
    run.start("east")
    before = await run.until(lambda status: of(status, "east")["incarnation"] > life)
    hello_s = run.clock.now_s()
    killed = None
    if kill_percent is not None:
        wanted = kill_percent / 100 * MOMENTS * run.parameters

        def donor(status: dict[str, Any]) -> str | None:
            sent = {
                name: status["traffic"][name]["uplink_bytes"] - before["traffic"][name]["uplink_bytes"]
                for name in NAMES[1:]
            }
            most = max(sent, key=lambda name: sent[name])
            return most if sent[most] >= wanted else None

        killed = donor(await run.until(donor))
        assert killed is not None, "somebody gave"
        run.kill(killed)
    after = await run.until(lambda status: of(status, "east")["local_step"] > 0)
    with_step_s = run.clock.now_s() - hello_s
    took_s = with_step_s - of(after, "east")["step_time_s"]
    bare_s = (BASES + MOMENTS) * run.parameters / RATE_BYTES_PER_S
    source = of(after, "east")["moments"]
    assert source in {f"peer of {name}" for name in NAMES[1:]}, source
    assert killed is None or killed not in source, "from another"
    return {
        "model_bytes": BASES * run.parameters,
        "owed_bytes": (BASES + MOMENTS) * run.parameters,
        "bare_s": round(bare_s, 2),
        "started_s": round(hello_s - began_s, 2),
        "took_s": round(took_s, 2),
        "took_with_step_s": round(with_step_s, 2),
        "over_bare": round(took_s / bare_s, 3),
        "moments": source,
    }


def once(layers: int, kill_percent: int | None) -> dict[str, Any]:
    """Measure in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="rejoin-") as scratch:
        run = Run(Path(scratch), layers)
        try:
            return asyncio.run(measure(run, kill_percent))
        finally:
            run.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kill", type=int, metavar="PERCENT", help="kill the donor, too, on the way")
    arguments = parser.parse_args()
    layers = LAYERS_QUICK if arguments.quick else LAYERS
    result: dict[str, Any] = {"machine": machine()}
    plain = once(layers, None)
    result |= {"rejoin": plain, "rejoin_over_bare": plain["over_bare"], "started_s": plain["started_s"]}
    if arguments.kill is not None:
        killed = once(layers, arguments.kill)
        result |= {"killed": killed, "killed_over_bare": killed["over_bare"]}
    if arguments.json:
        show(result, as_json=True)
    else:
        for key, value in result.items():
            print(f"{key:<20} {value}")


if __name__ == "__main__":
    main()
