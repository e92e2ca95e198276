"""Does the death of one region slow the others down? SIGKILL of one of four learners, again and again.

    python bench/kill_one.py [--quick] [--json] [--kills 20]

One run of deploy/demo.toml's model, whose steps are stretched so that two cores are at most 40 % busy and a death frees
nobody's processor. Each region's learner is killed in turn; the supervisor starts it again, and the next one is killed
when all four train.

- `others_after_over_before`: tokens a second of the three others in the window after a kill, over those in the window
  before it, of each kill; `mean` and the bounds in which it lies with 95 % (Student's t over the kills).
- `round_closed_after_s`: of the rounds that were open at a kill and waited for the victim, from the kill to their
  close, beyond the grace that they had; the longest of each kill, of which the longest is judged.
- `processor_share`: of all cores, by the whole machine, while nobody is killed.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from local_runs import DEMO, ROOT, command, metrics, stretched
from machine import machine
from rounds import note, show

REGIONS = ("us-east", "us-west", "eu-west", "ap-south")
STEP_S = 0.6
WINDOW_S = 10.0
PATIENCE_S = 180.0
# Two-sided 95 % of Student's t for so many kills, less one; a number between has that of the next lower: it is wider.
STUDENT_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05, 59: 2.00, 119: 1.98}


class Run:
    """The run under measurement."""

    def __init__(self, folder: Path) -> None:
        """Start it; it never ends by itself."""
        settings = [*stretched(REGIONS, f"{STEP_S}s"), "run.tokens=1G", "evaluation.every_steps=1000000"]
        with (folder.parent / "out").open("wb") as out:
            self._process = subprocess.Popen(command("run", DEMO, folder, settings), cwd=ROOT, stdout=out, stderr=out)
        self._folder = folder
        self._never = threading.Event()

    def end(self) -> None:
        """Let it write its state and go."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def wait(self, seconds: float) -> None:
        """Let it go on."""
        self._never.wait(seconds)

    def until(self, holds: Callable[[], bool]) -> None:
        """Let it go on until something holds.

        Raises:
            RuntimeError: It ended, or it takes too long.
        """
        end_s = time.monotonic() + PATIENCE_S  # noqa: TID251 - measuring is what this is for
        while not holds():
            if self._process.poll() is not None or time.monotonic() > end_s:  # noqa: TID251
                raise RuntimeError(f"the run came to nothing: {(self._folder.parent / 'out').read_text()[-800:]}")
            self.wait(0.2)

    def learners(self) -> dict[str, psutil.Process]:
        """The training processes that are there."""
        found = {}
        for child in psutil.Process(self._process.pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "learner" in words and "wan_diloco.cli.guardian" not in words:
                found[words[words.index("--region") + 1]] = child
        return found

    def steps(self, since_wall_s: float, to_wall_s: float) -> dict[str, float]:
        """Own steps a second of each region in a window, from its first record in it to its last."""
        seen: dict[str, list[tuple[float, int]]] = {}
        for record in metrics(self._folder, "learner"):
            if since_wall_s <= record["wall_s"] <= to_wall_s:
                seen.setdefault(record["region"], []).append((record["wall_s"], record["local_step"]))
        return {
            region: (found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0])
            for region, found in seen.items()
            if len(found) > 2
        }

    def all_train(self) -> bool:
        """Whether everybody stepped lately."""
        now_s = time.time()  # noqa: TID251
        return len(self.steps(now_s - 5.0, now_s)) == len(REGIONS)

    def waited(self, victim: str, killed_wall_s: float) -> list[float]:
        """How long until the rounds closed that a kill found open with the victim in them, less their grace."""
        waits = []
        for record in metrics(self._folder, "round"):
            # Elapsed and wall time differ by what they do in every record.
            killed_s = killed_wall_s - record["wall_s"] + record["elapsed_s"]
            if record["opened_s"] < killed_s < record["closed_s"] and victim in record["members"]:
                waits.append(record["closed_s"] - killed_s - record["grace_s"])
        return waits


def measure(kills: int) -> dict[str, Any]:
    """One run, so many kills."""
    result: dict[str, Any] = {"machine": machine(), "kills": kills, "step_s": STEP_S, "window_s": WINDOW_S}
    ratios, waits, shares = [], [], []
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(scratch) / "run")
        try:
            for number in range(kills):
                victim = REGIONS[number % len(REGIONS)]
                run.until(lambda: len(run.learners()) == len(REGIONS) and run.all_train())
                psutil.cpu_percent()
                # Also at any moment of a step.
                run.wait(WINDOW_S + STEP_S * rng.random())
                shares.append(psutil.cpu_percent() / 100)
                killed_s = time.time()  # noqa: TID251
                run.learners()[victim].kill()
                run.wait(WINDOW_S + 1.0)
                before, after = run.steps(killed_s - WINDOW_S, killed_s), run.steps(killed_s, killed_s + WINDOW_S)
                others = [region for region in REGIONS if region != victim and region in before]
                ratios.append(sum(after.get(region, 0.0) for region in others) / sum(before[name] for name in others))
                waits += [max(found)] if (found := run.waited(victim, killed_s)) else []
                print(f"{victim}: {ratios[-1]:.4f}, rounds {waits[-1:]}", file=sys.stderr)
        finally:
            run.end()
    note(result, "others_after_over_before", ratios)
    mean = statistics.mean(ratios)
    half = student_t(len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    result["others_after_over_before_mean"] = round(mean, 5)
    result["others_after_over_before_low"], result["others_after_over_before_high"] = mean - half, mean + half
    if waits:
        note(result, "round_closed_after_s", waits)
    result["rounds_found_open"] = len(waits)
    note(result, "processor_share", shares)
    return result


def student_t(degrees: int) -> float:
    """How many standard errors lie on each side of the mean, for so many degrees of freedom, of which there is one."""
    return STUDENT_T[max(bound for bound in STUDENT_T if bound <= degrees)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four kills")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--kills", type=int, default=20, help="two at least, for the bounds of the mean")
    chosen = parser.parse_args()
    show(measure(4 if chosen.quick else chosen.kills), as_json=chosen.json)


if __name__ == "__main__":
    main()
