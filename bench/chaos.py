"""What do five minutes of faults cost a run? Against a run without faults that merged as many tokens.

    python bench/chaos.py [--quick] [--json] [--seeds 1,2,3] [--faults 22] [--duration 300]

For each seed, `wan-diloco chaos deploy/demo.toml --random` with steps that are stretched, so that two cores are far
from busy: syncer, learners and uplinks are killed and stopped, links cut, half-open, throttled, delayed and noisy, the
disk is filled, a learner comes late. Then `wan-diloco run` of the same seed without faults, with so many tokens that as
many are merged (a killed learner trains on fewer), and its whole schedule of learning rates.

- `longest_standstill_s`: without a published round, while a quorum could contribute; the worst of the seeds is judged.
- `ledger_balance`, `double_merges`, `repeated_units`, `lost_acknowledged`, `unaccounted`: summed over the seeds without
  their signs, all to be 0.
- `replayed_otherwise`: of the seeds, in how many `wan-diloco replay` of the whole journal, from the initial weights on,
  doesn't give the digest of every version that was published; `replayed_versions` are compared.
- `never_well`: faults after which no work of a region that they hit was merged again before the end, of all seeds.
- `loss_over_faultless`: final validation loss over the other run's; `merged_over_faultless` says how equal they were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from local_runs import DEMO, ROOT, command, finished, stretched, summary
from machine import machine
from rounds import note, show

REGIONS = ("us-east", "us-west", "eu-west", "ap-south")
STEP_S = 0.4
STEP_TOKENS = 4 * 1024
# Steps go on while the faults last and for a while after them.
CALM_SHARE = 1.15
MERGED_APART_MAX = 0.02
ZEROS = ("ledger_balance", "double_merges", "repeated_units", "lost_acknowledged", "unaccounted")


def replayed(folder: Path) -> dict[str, Any]:
    """What `wan-diloco replay` says of a run: whether its journal gives the versions that it published, all of them."""
    words = [sys.executable, "-m", "wan_diloco", "replay", str(folder), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    proof: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"equal": False, "versions": 0}
    return proof


def one(seed: int, duration_s: float, faults: int, scratch: Path) -> dict[str, Any]:
    """Both runs of a seed."""
    tokens = round(CALM_SHARE * duration_s / STEP_S) * STEP_TOKENS
    settings = [*stretched(REGIONS, f"{STEP_S}s"), f"run.seed={seed}"]
    kept = "syncer.journal_retention=all"
    words = ("--random", "--seed", str(seed), "--faults", str(faults), "--duration", f"{duration_s}s", "--json")
    shaken = scratch / f"chaos-{seed}"
    report = json.loads(finished(command("chaos", DEMO, shaken, [*settings, kept, f"run.tokens={tokens}"], *words)))
    proof = replayed(shaken)
    befell = [item for item in report["befallen"] if not item["problem"]]
    well_after_s = [item["well_after_s"] for item in befell if item["well_after_s"] is not None]
    result = {key: report[key] for key in ("faults", "faults_by_kind", "longest_standstill_s", *ZEROS)}
    came_to = summary(shaken)
    merged = came_to["tokens_merged"]
    # Of calm work the overlap is lost, about a twentieth.
    calm_tokens, calm = round(merged / 0.944), {}
    for attempt in range(2):
        folder = scratch / f"calm-{seed}-{attempt}"
        finished(command("run", DEMO, folder, [*settings, f"run.tokens={calm_tokens}"], "--json"))
        calm = summary(folder)
        if abs(merged / calm["tokens_merged"] - 1) <= MERGED_APART_MAX:
            break
        calm_tokens = round(calm_tokens * merged / calm["tokens_merged"])
    result |= {
        "loss": came_to["validation_nats_per_byte"],
        "faultless_loss": calm["validation_nats_per_byte"],
        "loss_over_faultless": came_to["validation_nats_per_byte"] / calm["validation_nats_per_byte"],
        "merged_over_faultless": merged / calm["tokens_merged"],
        "tokens_discarded": came_to["tokens_discarded"],
        "replayed_versions": proof["versions"],
        "replayed_otherwise": int(not proof["equal"]),
        "well_after_s_max": max(well_after_s, default=None),
        "never_well": [
            f"{item['kind']} {item['target']} at {item['began_s']} s" for item in befell if item["well_after_s"] is None
        ],
    }
    print(f"seed {seed}: {result}", file=sys.stderr)
    return result


def measure(seeds: list[int], duration_s: float, faults: int) -> dict[str, Any]:
    """All seeds, one after the other."""
    result: dict[str, Any] = {"machine": machine(), "seeds": seeds, "duration_s": duration_s, "step_s": STEP_S}
    with tempfile.TemporaryDirectory() as scratch:
        runs = [one(seed, duration_s, faults, Path(scratch)) for seed in seeds]
    result["runs"] = runs
    result["faults"] = min(run["faults"] for run in runs)
    result |= {key: sum(abs(run[key]) for run in runs) for key in ZEROS}
    result |= {key: sum(run[key] for run in runs) for key in ("replayed_versions", "replayed_otherwise")}
    result["never_well"] = sum(len(run["never_well"]) for run in runs)
    note(result, "longest_standstill_s", [run["longest_standstill_s"] for run in runs])
    note(result, "loss_over_faultless", [run["loss_over_faultless"] for run in runs])
    note(result, "merged_over_faultless", [run["merged_over_faultless"] for run in runs])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a minute and a half, 15 faults")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--faults", type=int, default=22)
    parser.add_argument("--duration", type=float, default=300.0, metavar="SECONDS")
    chosen = parser.parse_args()
    if chosen.quick:
        result = measure([1], 90.0, 15)
    else:
        result = measure([int(seed) for seed in chosen.seeds.split(",")], chosen.duration, chosen.faults)
    show(result, as_json=chosen.json)
    if not chosen.json:
        print("  ".join(f"{key} {result[key]}" for key in ("faults", "never_well", *ZEROS)))


if __name__ == "__main__":
    main()
