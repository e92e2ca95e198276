"""What do slow regions cost? Two of four learners three times slower, against four that are equally fast.

    python bench/slow_regions.py [--quick] [--json] [--seeds 1,2,3] [--steps 600]

Runs of deploy/demo.toml whose steps are stretched: the fast regions' to the same time in both runs. The run of equals
is given so many tokens that as many are merged as in the other, and its whole schedule of learning rates.

- `fast_over_equal`: tokens a second of the fast regions, over those of the same regions among equals.
- `periods_between_merges`: the longest that a region went without being merged fresh, in periods of H global steps,
  from its first merge to the end, of all regions; the worst of the seeds is judged.
- `loss_over_equal`: final validation loss over the other run's; `merged_over_equal` says how equal the tokens were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from local_runs import DEMO, command, finished, metrics, stretched, summary
from machine import machine
from rounds import note, show

FAST, SLOW = ("us-east", "us-west"), ("eu-west", "ap-south")
STEP_S = 0.25
STEP_TOKENS = 4 * 1024
MERGED_APART_MAX = 0.02
PERIOD_STEPS = 24


def run(folder: Path, seed: int, tokens: int, slow_s: float) -> dict[str, Any]:
    """One run to its end; its summary."""
    settings = [*stretched(FAST, f"{STEP_S}s"), *stretched(SLOW, f"{slow_s}s"), f"run.seed={seed}"]
    finished(command("run", DEMO, folder, [*settings, f"run.tokens={tokens}"], "--json"))
    return summary(folder)


def fast_steps_per_s(folder: Path) -> float:
    """Of the fast regions, the mean over them, from their first record with a step to their last."""
    rates = []
    for region in FAST:
        found = [record for record in metrics(folder, "learner") if record["region"] == region and record["local_step"]]
        took_s = found[-1]["elapsed_s"] - found[0]["elapsed_s"]
        rates.append((found[-1]["local_step"] - found[0]["local_step"]) / took_s)
    return statistics.mean(rates)


def periods_between(folder: Path) -> float:
    """The longest stretch of global steps without a fresh merge of a region, over H."""
    last: dict[str, int] = {}
    longest = 0
    for line in (folder / "tape.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        if record["type"] == "RoundClosed":
            step = record["global_step"]
            for entry in record["entries"]:
                if entry["staleness"] == 0:
                    name = entry["header"]["key"]["learner_id"]
                    longest = max(longest, step - last.get(name, step))
                    last[name] = step
    end = max(last.values())
    assert len(last) == len(FAST) + len(SLOW), f"only {sorted(last)} were ever merged"
    return max(longest, *(end - step for step in last.values())) / PERIOD_STEPS


def one(seed: int, steps: int, scratch: Path) -> dict[str, float]:
    """Both runs of a seed."""
    mixed = scratch / f"mixed-{seed}"
    with_slow = run(mixed, seed, steps * STEP_TOKENS, 3 * STEP_S)
    merged = with_slow["tokens_merged"]
    # Of work among equals the overlap is lost, about a twentieth.
    tokens, equal, folder = round(merged / 0.944), {}, mixed
    for attempt in range(2):
        folder = scratch / f"equal-{seed}-{attempt}"
        equal = run(folder, seed, tokens, STEP_S)
        if abs(merged / equal["tokens_merged"] - 1) <= MERGED_APART_MAX:
            break
        tokens = round(tokens * merged / equal["tokens_merged"])
    found = {
        "fast_over_equal": fast_steps_per_s(mixed) / fast_steps_per_s(folder),
        "periods_between_merges": periods_between(mixed),
        "loss_over_equal": with_slow["validation_nats_per_byte"] / equal["validation_nats_per_byte"],
        "merged_over_equal": merged / equal["tokens_merged"],
        "participation": with_slow["participation"],
    }
    print(f"seed {seed}: {found}", file=sys.stderr)
    return found


def measure(seeds: list[int], steps: int) -> dict[str, Any]:
    """All seeds, one after the other."""
    result: dict[str, Any] = {"machine": machine(), "seeds": seeds, "steps": steps, "step_s": STEP_S}
    with tempfile.TemporaryDirectory() as scratch:
        runs = [one(seed, steps, Path(scratch)) for seed in seeds]
    for key in runs[0]:
        note(result, key, [found[key] for found in runs])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 200 steps")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=600)
    chosen = parser.parse_args()
    seeds = [1] if chosen.quick else [int(seed) for seed in chosen.seeds.split(",")]
    show(measure(seeds, 200 if chosen.quick else chosen.steps), as_json=chosen.json)


if __name__ == "__main__":
    main()
