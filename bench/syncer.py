"""What does the syncer cost? Its processor time, memory, event loop and traffic, with learners that train nothing.

    python bench/syncer.py [--quick] [--json] [--learners 2,4,16,32] [--keep-profile FILE]

The syncer is `run_syncer` in a process of its own, without an evaluator (which is another process anyway, and would
take the processor from it); another process has all learners, see `synthetic.py`. Everything goes over gRPC and to a
real disk. The model has 67M parameters in 24 fragments (10M with --quick); every fragment is merged once a step, by
all learners. Payloads are int4 of Gaussian deltas with a scale for each row.

- `cpu_s_per_gib_ingress`: processor time of the syncer's process a GiB of uplink, merges, journal, snapshots and
  downlink included, four learners, the default configuration; `_raw` and `_zstd` with `wire.zstd` off and on.
- `cpu_per_byte_m32_over_m4`: the same a byte, 32 learners over 4.
- `loop_callback_cpu_ms_max`: the processor time of the longest callback on the syncer's event loop, on asyncio's own
  loop since uvloop's can't be looked into; `_p99` beside it.
- `peak_rss_m16_over_m2`: peak anonymous memory, 16 learners over 2.
- `bits_both_ways`: bits up and down a parameter merged, learner and round, on real deltas: of a short run of the demo's
  data and optimizer with a larger model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30

CONFIG = """
[run]
name = "bench"
tokens = {tokens}
[model]
dim = {dim}
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
[wire]
zstd = {zstd}
{regions}
"""
MODELS = {True: {"dim": 256, "layers": 7, "vocab": 16_384}, False: {"dim": 512, "layers": 16, "vocab": 32_768}}


def write_config(folder: Path, *, learners: int, zstd: bool, quick: bool) -> Path:
    """A run that is far longer than what is measured."""
    path = folder / "run.toml"
    (folder / "corpus.txt").write_text("Nobody reads this.\n\n" * 100)
    path.write_text(
        CONFIG.format(
            **MODELS[quick],
            tokens=10**6 * 1024 * learners,
            corpus=folder / "corpus.txt",
            learners=learners,
            zstd=str(zstd).lower(),
            regions="".join(f'[[regions]]\nname = "r{index}"\n' for index in range(learners)),
        )
    )
    return path


# ---- the syncer's process ------------------------------------------------------------------------


def serve(config_path: Path, run_folder: Path, callbacks: Path | None) -> None:
    """`wan-diloco syncer` without its evaluator, and with a stopwatch on its loop where wanted."""
    import torch  # noqa: PLC0415, F401 - the parent doesn't need it

    from wan_diloco.config import load_config  # noqa: PLC0415
    from wan_diloco.syncer import main  # noqa: PLC0415

    main._curve = lambda *_: None  # type: ignore[assignment]  # noqa: SLF001 - no setting does it
    with _timed_callbacks(main, callbacks) if callbacks is not None else contextlib.nullcontext():
        main.run_syncer(load_config([config_path], env={}).config, run_folder, resume=False)


@contextlib.contextmanager
def _timed_callbacks(main: Any, into: Path) -> Iterator[None]:
    """Note how long each callback has the loop's thread; the names of the longest go to the file."""
    took: list[tuple[float, float, str]] = []
    original = asyncio.events.Handle._run  # noqa: SLF001 - where all callbacks pass

    def timed(handle: Any) -> None:
        callback = handle._callback  # noqa: SLF001
        owner = getattr(callback, "__self__", None)
        # Before it runs: afterwards the coroutine is at another place.
        name = repr(owner.get_coro())[:160] if isinstance(owner, asyncio.Task) else repr(callback)[:160]
        began_s = time.thread_time()
        original(handle)
        took.append((asyncio.get_running_loop().time(), time.thread_time() - began_s, name))

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]  # noqa: SLF001
    main.uvloop.new_event_loop = asyncio.new_event_loop
    try:
        yield
    finally:
        asyncio.events.Handle._run = original  # type: ignore[method-assign]  # noqa: SLF001
        # Starting and stopping aren't merging.
        begin_s, end_s = took[0][0], took[-1][0]
        kept = sorted([(cpu_s, name) for at_s, cpu_s, name in took if begin_s + 2.0 < at_s < end_s - 2.0], reverse=True)
        into.write_text(
            json.dumps(
                {
                    "loop_callback_cpu_ms_max": 1e3 * kept[0][0],
                    "loop_callback_cpu_ms_p99": 1e3 * kept[len(kept) // 100][0],
                    "longest": [(round(1e3 * cpu_s, 2), name) for cpu_s, name in kept[:20]],
                }
            )
        )


# ---- measuring -----------------------------------------------------------------------------------


def run_case(*, learners: int, zstd: bool, quick: bool, callbacks: bool = False, prefix: list[str]) -> dict[str, Any]:
    """One syncer and its learners, from start to end."""
    with tempfile.TemporaryDirectory(prefix="bench-syncer-") as name:
        folder = Path(name)
        config = write_config(folder, learners=learners, zstd=zstd, quick=quick)
        command = [*prefix, sys.executable, __file__, "--serve", str(config), str(folder / "run")]
        if callbacks:
            command += ["--callbacks", str(folder / "callbacks.json")]
        with (folder / "log").open("w") as log:
            syncer = subprocess.Popen(command, stdout=log, stderr=log)
            # Both take long to begin, so they do it side by side.
            learning = subprocess.Popen(
                [sys.executable, str(ROOT / "bench" / "synthetic.py"), str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                task = {
                    "address": _address(syncer, folder),
                    "pid": int((folder / "run" / "pid").read_text()),
                    "warm_up_rounds": 24,
                    "rounds": max(12, (96 if quick else 192) // learners),
                }
                answer, _ = learning.communicate(json.dumps(task) + "\n")
                if learning.returncode != 0:
                    raise RuntimeError((folder / "log").read_text()[-4000:])
            finally:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    # Not the profiler that it may run under.
                    os.kill(int((folder / "run" / "pid").read_text()), signal.SIGTERM)
                syncer.wait()
                learning.kill()
        figures: dict[str, Any] = json.loads(answer.splitlines()[-1])
        figures["cpu_s_per_gib"] = figures["cpu_s"] / (figures["uplink_bytes"] / GIB)
        if callbacks:
            figures |= json.loads((folder / "callbacks.json").read_text())
        print(f"{learners} learners, zstd {zstd}: {json.dumps(figures)[:1500]}", file=sys.stderr)
        return figures


def _address(syncer: subprocess.Popen[bytes], folder: Path) -> str:
    path = folder / "run" / "address"
    while not path.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            syncer.wait(0.05)
            break
    else:
        return path.read_text().strip()
    raise RuntimeError(f"the syncer ended: {(folder / 'log').read_text()[-2000:]}")


def measure_bits(quick: bool) -> dict[str, float]:
    """A short real run, as a user would start it; its own figures say what a parameter cost."""
    overrides = {
        "model.dim": 128 if quick else 192,
        "model.layers": 3 if quick else 4,
        "run.tokens": 100_000 if quick else 600_000,
        "inner.lr": 3e-3,
        "inner.warmup_steps": 10,
        "evaluation.every_steps": 1_000_000,
        "sync.period_steps": 12,
        "sync.fragments": 12,
    }
    with tempfile.TemporaryDirectory(prefix="bench-bits-") as name:
        command = [sys.executable, "-m", "wan_diloco", "run", str(ROOT / "deploy" / "demo.toml"), "--json"]
        command += ["--run-folder", str(Path(name) / "run")]
        for key, value in overrides.items():
            command += ["--set", f"{key}={value}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        summary = json.loads((Path(name) / "run" / "summary.json").read_text())
    up, down = summary["uplink_bits_per_parameter"], summary["downlink_bits_per_parameter"]
    print(f"bits a parameter: {up} up, {down} down, {summary['rounds']} rounds", file=sys.stderr)
    return {"bits_both_ways": up + down, "bits_up": up, "bits_down": down}


def measure(*, quick: bool, repeats: int, prefix: list[str]) -> dict[str, Any]:
    """All cases in turn, several times; medians and extremes."""
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        found: dict[str, float] = {}
        cases = {
            (learners, zstd): run_case(learners=learners, zstd=zstd, quick=quick, prefix=prefix)
            for learners, zstd in ((4, True), (4, False), (2, True), (16, True), (32, True))
        }
        cost = {case: figures["cpu_s_per_gib"] for case, figures in cases.items()}
        peak = {case: figures["peak_anonymous_bytes"] for case, figures in cases.items()}
        found["cpu_s_per_gib_ingress"] = found["cpu_s_per_gib_ingress_zstd"] = cost[4, True]
        found["cpu_s_per_gib_ingress_raw"] = cost[4, False]
        found["cpu_per_byte_m32_over_m4"] = cost[32, True] / cost[4, True]
        found["peak_rss_m16_over_m2"] = peak[16, True] / peak[2, True]
        found["peak_anonymous_mib_m2"] = peak[2, True] / 2**20
        found["peak_anonymous_mib_m16"] = peak[16, True] / 2**20
        timed = run_case(learners=4, zstd=True, quick=quick, callbacks=True, prefix=prefix)
        found |= {key: timed[key] for key in ("loop_callback_cpu_ms_max", "loop_callback_cpu_ms_p99")}
        found |= measure_bits(quick)
        runs.append(found)
    result: dict[str, Any] = {"machine": machine(), "quick": quick, "repeats": repeats}
    for key in runs[0]:
        values = [run[key] for run in runs]
        result |= {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}
    return result


def table(result: dict[str, Any]) -> str:
    """For people."""
    keys = [key for key in result if f"{key}_min" in result]
    rows = [f"| {key} | {result[key]:.3g} ({result[f'{key}_min']:.3g}-{result[f'{key}_max']:.3g}) |" for key in keys]
    return "\n".join(["| | median (extremes) |", "|---|---|", *rows])


def main() -> None:
    """Measure and print; or be the syncer that is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, each case once")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--repeats", type=int, default=0, help="how often; 3, or 1 with --quick")
    parser.add_argument("--case", metavar="LEARNERS[,raw][,callbacks]", help="one case only")
    parser.add_argument("--prefix", default="", help="a command to run the syncer under, such as a profiler")
    parser.add_argument("--serve", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--callbacks", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        config, folder = chosen.serve
        folder.mkdir(parents=True)
        (folder / "pid").write_text(str(os.getpid()))
        serve(config, folder, chosen.callbacks)
        return
    prefix = chosen.prefix.split()
    if chosen.case:
        learners, *words = chosen.case.split(",")
        run_case(
            learners=int(learners),
            zstd="raw" not in words,
            quick=chosen.quick,
            callbacks="callbacks" in words,
            prefix=prefix,
        )
        return
    result = measure(quick=chosen.quick, repeats=chosen.repeats or (1 if chosen.quick else 3), prefix=prefix)
    print(json.dumps(result, indent=2) if chosen.json else f"{json.dumps(result['machine'])}\n\n{table(result)}")


if __name__ == "__main__":
    main()
