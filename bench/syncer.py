"""What does the syncer cost? Its processor time, memory, event loop and traffic, with learners that train nothing.

    python bench/syncer.py [--quick] [--json] [--repeats N] [--case 4,profile]

The syncer is `run_syncer` in a process of its own, without an evaluator (which is another process anyway, and would
take the processor from it); another process has all learners, see `synthetic.py`. Everything goes over gRPC and to a
real disk. Learners step as fast as the syncer takes their contributions; each fragment is merged once a step, by all of
them. Payloads are int4 of Gaussian deltas with a scale for each row, packed once, before anything is measured. Figures
are of a window of time in the midst, after all fragments were merged twice: nothing of start and stop is in them.
The model has 24 fragments of 11M parameters, 4 MB on the wire (4 of 3M with --quick). No snapshot falls into the
window, but where that is said. Links have 4 Gbit/s, which allows messages of 512 KiB.

`--case` shows one case alone, `--case 4,profile` where its time goes. Processor time depends on what else the machine
does, by a factor of three: `reference_copy_cpu_s_per_gib` and `reference_python_ns_per_addition` say how fast it was.

- `cpu_s_per_gib_ingress`: processor time of the syncer's process a GiB of uplink: transport, checks, journal, merges,
  downlink; four learners, and the default configuration but for the links. `cpu_ms_per_contribution` is the same time,
  by contributions. Not with --quick: `_raw` and `_zstd` with `wire.zstd` off and on, `_200mbit` with the default links,
  for which messages are of 30 KB, `_snapshots` with one every three seconds.
- `cpu_per_byte_m16_over_m4` and `_m32_` (not with --quick): the same a byte, with more learners over 4.
- `loop_callback_cpu_ms_max`: the processor time of the longest callback on the syncer's event loop, on asyncio's own
  loop since uvloop's can't be looked into, four learners; `_p99` beside it.
- `peak_rss_m16_over_m2`: peak anonymous memory, 16 learners over 2. With --quick the model is small beside what is
  under way, of which sixteen learners have eight times as much.
- `bits_both_ways` (not with --quick): bits up and down a parameter merged, learner and round, on real deltas: of a
  short run of the demo's data and optimizer with a larger model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_profile import Profiler
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
fragments = {fragments}
period_steps = {fragments}
overlap_steps = 2
quorum = {learners}
membership_lease = "1h"
[wire]
zstd = {zstd}
[syncer]
snapshot_every = "{snapshot_every}"
{regions}
"""
SHOWN = 20
LINK = "4gbit"
SLOW_LINK = "200mbit"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    fragments: int
    dim: int
    layers: int
    vocab: int
    window_s: float


QUICK = Sizes(fragments=4, dim=512, layers=3, vocab=8_192, window_s=1.5)
FULL = Sizes(fragments=24, dim=1024, layers=18, vocab=32_768, window_s=8.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One syncer.

    Attributes:
        link: Rate of each learner's link, up and down; messages on slow links are small.
        snapshot_every: Far beyond what is measured, or short, so that several fall into it.
        watch: "callbacks" or "profile": what watches the syncer; it takes time of its own.
    """

    learners: int
    zstd: bool = True
    link: str = LINK
    snapshot_every: str = "1h"
    watch: str = ""


def write_config(folder: Path, case: Case, sizes: Sizes) -> Path:
    """A run that is far longer than what is measured."""
    path = folder / "run.toml"
    (folder / "corpus.txt").write_text("Nobody reads this.\n\n" * 100)
    path.write_text(
        CONFIG.format(
            fragments=sizes.fragments,
            dim=sizes.dim,
            layers=sizes.layers,
            vocab=sizes.vocab,
            tokens=10**6 * 1024 * case.learners,
            corpus=folder / "corpus.txt",
            learners=case.learners,
            snapshot_every=case.snapshot_every,
            zstd=str(case.zstd).lower(),
            regions="".join(
                f'[[regions]]\nname = "r{index}"\nuplink = "{case.link}"\ndownlink = "{case.link}"\n'
                for index in range(case.learners)
            ),
        )
    )
    return path


# ---- the syncer's process ------------------------------------------------------------------------


def serve(config_path: Path, run_folder: Path, watch: str) -> None:
    """`wan-diloco syncer` without its evaluator, and with somebody who watches it where wanted."""
    import torch  # noqa: PLC0415, F401 - the parent doesn't need it

    from wan_diloco.config import load_config  # noqa: PLC0415
    from wan_diloco.syncer import main  # noqa: PLC0415

    main._curve = lambda *_: None  # type: ignore[assignment]  # noqa: SLF001 - no setting does it
    if watch == "callbacks":
        main.uvloop.new_event_loop = asyncio.new_event_loop
    if watch:
        _on_signals(Callbacks() if watch == "callbacks" else Profiler(), run_folder / "watched")
    else:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    main.run_syncer(load_config([config_path], env={}).config, run_folder, resume=False)


class Callbacks:
    """How long each callback has the loop's thread, between `start` and `stop`; the names of the longest."""

    def __init__(self) -> None:
        """Be where all callbacks pass."""
        self._took: list[float] = []
        self._longest: list[tuple[float, str]] = []
        self._running = False
        original = asyncio.events.Handle._run  # noqa: SLF001

        def timed(handle: Any) -> None:
            if not self._running:
                original(handle)
                return
            callback = handle._callback  # noqa: SLF001
            owner = getattr(callback, "__self__", None)
            # Before it runs: afterwards the coroutine is at another place.
            coroutine = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
            frame = getattr(coroutine, "cr_frame", None)
            line = frame.f_lineno if frame is not None else 0
            began_s = time.thread_time()
            original(handle)
            self._note(time.thread_time() - began_s, coroutine, line)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]  # noqa: SLF001

    def _note(self, took_s: float, coroutine: Any, line: int) -> None:
        self._took.append(took_s)
        if len(self._longest) < SHOWN or took_s > self._longest[0][0]:
            heapq.heappush(self._longest, (took_s, f"{str(coroutine)[:100]} at {line}"))
            if len(self._longest) > SHOWN:
                heapq.heappop(self._longest)

    def start(self) -> None:
        """Begin."""
        self._running = True

    def stop(self) -> str:
        """End, and say what was seen."""
        self._running = False
        took = sorted(self._took)
        return json.dumps(
            {
                "loop_callback_cpu_ms_max": 1e3 * took[-1],
                "loop_callback_cpu_ms_p99": 1e3 * took[-1 - len(took) // 100],
                "longest": [(round(1e3 * took_s, 2), name) for took_s, name in sorted(self._longest, reverse=True)],
            }
        )


def _on_signals(watcher: Callbacks | Profiler, into: Path) -> None:
    """The first SIGUSR1 starts it, the second has it write what it saw."""
    begun: list[bool] = []

    def heard(*_: object) -> None:
        if begun:
            partial = into.with_suffix(".partial")
            partial.write_text(watcher.stop())
            partial.rename(into)
        else:
            begun.append(True)
            watcher.start()

    signal.signal(signal.SIGUSR1, heard)


# ---- measuring -----------------------------------------------------------------------------------


def run_case(case: Case, sizes: Sizes) -> dict[str, Any]:
    """One syncer and its learners, from start to end; all figures are of the time between two moments in the midst."""
    with tempfile.TemporaryDirectory(prefix="bench-syncer-") as name:
        folder = Path(name)
        config = write_config(folder, case, sizes)
        with (folder / "log").open("w") as log:
            syncer = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(config), str(folder / "run"), "--watch", case.watch],
                stdout=log,
                stderr=log,
            )
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
                    "pid": syncer.pid,
                    # Kernels are loaded, memory is taken, gRPC knows its windows.
                    "warm_up_rounds": 2 * sizes.fragments,
                    "window_s": sizes.window_s,
                }
                answer, _ = learning.communicate(json.dumps(task) + "\n")
                if learning.returncode != 0:
                    raise RuntimeError((folder / "log").read_text()[-4000:])
            finally:
                syncer.terminate()
                syncer.wait()
                learning.kill()
        figures: dict[str, Any] = json.loads(answer.splitlines()[-1])
        figures["cpu_s_per_gib"] = figures["cpu_s"] / (figures["uplink_bytes"] / GIB)
        figures["cpu_ms_per_contribution"] = 1e3 * figures["cpu_s"] / figures["contributions"]
        print(f"{case}: {json.dumps(figures)}", file=sys.stderr)
        if case.watch:
            watched = (folder / "run" / "watched").read_text()
            print(watched, file=sys.stderr)
            figures |= json.loads(watched) if case.watch == "callbacks" else {}
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


def measure_speed() -> dict[str, float]:
    """How fast the machine is just now, by processor time."""
    source, times = bytearray(64 * 2**20), 16
    target = bytearray(len(source))
    began_s = time.process_time()
    for _ in range(times):
        target[:] = source
    copied_s = time.process_time()
    total = 0
    for number in range(10**6):
        total += number
    added_s = time.process_time()
    return {
        "reference_copy_cpu_s_per_gib": (copied_s - began_s) / (times * len(source) / GIB),
        "reference_python_ns_per_addition": 1e9 * (added_s - copied_s) / 10**6,
    }


def measure_bits() -> dict[str, float]:
    """A short real run, as a user would start it; its own figures say what a parameter cost."""
    overrides = {
        "model.dim": 192,
        "model.layers": 4,
        "run.tokens": 600_000,
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


def measure_quick() -> dict[str, float]:
    """Three cases; the event loop is watched in the one of which the time is told, which costs some percent."""
    default = run_case(Case(4, watch="callbacks"), QUICK)
    # Of these only the memory is told, so they may take each other's time.
    with ThreadPoolExecutor() as side_by_side:
        found = side_by_side.map(lambda learners: run_case(Case(learners), QUICK), (2, 16))
    peaks = [figures["peak_anonymous_bytes"] for figures in found]
    return measure_speed() | costs_of(default) | loop_of(default) | memory_of(*peaks)


def measure_full() -> dict[str, float]:
    """All cases."""
    found = measure_speed()
    default, raw, few, several = Case(4), Case(4, zstd=False), Case(2), Case(16)
    many, slow, snapshots = Case(32), Case(4, link=SLOW_LINK), Case(4, snapshot_every="3s")
    cases = {case: run_case(case, FULL) for case in (default, raw, few, several, many, slow, snapshots)}
    cost = {case: figures["cpu_s_per_gib"] for case, figures in cases.items()}
    found |= costs_of(cases[default])
    found |= {f"cpu_per_byte_m{case.learners}_over_m4": cost[case] / cost[default] for case in (several, many)}
    named = {"raw": raw, "zstd": default, "200mbit": slow, "snapshots": snapshots}
    found |= {f"cpu_s_per_gib_ingress_{name}": cost[case] for name, case in named.items()}
    found |= memory_of(cases[few]["peak_anonymous_bytes"], cases[several]["peak_anonymous_bytes"])
    return found | loop_of(run_case(Case(4, watch="callbacks"), FULL)) | measure_bits()


def costs_of(figures: dict[str, Any]) -> dict[str, float]:
    """Processor time."""
    return {
        "cpu_s_per_gib_ingress": figures["cpu_s_per_gib"],
        "cpu_ms_per_contribution": figures["cpu_ms_per_contribution"],
    }


def loop_of(figures: dict[str, Any]) -> dict[str, float]:
    """The event loop's longest callbacks."""
    return {key: figures[key] for key in ("loop_callback_cpu_ms_max", "loop_callback_cpu_ms_p99")}


def memory_of(few_bytes: int, several_bytes: int) -> dict[str, float]:
    """Peak memory with 2 learners and with 16."""
    return {
        "peak_rss_m16_over_m2": several_bytes / few_bytes,
        "peak_anonymous_mib_m2": few_bytes / 2**20,
        "peak_anonymous_mib_m16": several_bytes / 2**20,
    }


def measure(sizes: Sizes, *, repeats: int) -> dict[str, Any]:
    """All cases in turn, several times; medians and extremes."""
    measure_once = measure_quick if sizes is QUICK else measure_full
    runs = [measure_once() for _ in range(repeats)]
    result: dict[str, Any] = {"machine": machine(), "quick": sizes is QUICK, "repeats": repeats}
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
    parser.add_argument(
        "--case", metavar="LEARNERS[,raw][,slow][,snapshots][,callbacks][,profile]", help="one case only"
    )
    parser.add_argument("--serve", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watch", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(*chosen.serve, chosen.watch)
        return
    sizes = QUICK if chosen.quick else FULL
    if chosen.case:
        learners, *words = chosen.case.split(",")
        watch = next((word for word in words if word in ("callbacks", "profile")), "")
        case = Case(
            int(learners),
            zstd="raw" not in words,
            link=SLOW_LINK if "slow" in words else LINK,
            snapshot_every="3s" if "snapshots" in words else "1h",
            watch=watch,
        )
        run_case(case, sizes)
        return
    result = measure(sizes, repeats=chosen.repeats or (1 if chosen.quick else 3))
    print(json.dumps(result, indent=2) if chosen.json else f"{json.dumps(result['machine'])}\n\n{table(result)}")


if __name__ == "__main__":
    main()
