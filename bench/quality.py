"""How good is the model? The run itself, one region alone, and data-parallel training, on the same model and data.

    python bench/quality.py [--quick] [--json] [--seeds 1,2,3] [--arms alone,wan_diloco] [--config deploy/demo.toml]
                            [--set KEY=VALUE ...]

Each arm is one `wan-diloco run`, as a user would start it, in a folder that is thrown away. The data-parallel arm sees
the tokens of the whole run, the lone region those of one region. All arms of a seed run one after the other; what is
compared is loss at equal tokens, so the machine's load doesn't matter for it. Validation figures are of the whole
validation set, and the published model's, never a learner's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parent.parent
ARMS = {"wan_diloco": [], "alone": ["--baseline", "alone"], "data_parallel": ["--baseline", "data-parallel"]}
KEPT = (
    "validation_nats_per_byte",
    "test_nats_per_byte",
    "participation",
    "ledger_balance",
    "merges_per_fragment_min",
    "uplink_bits_per_parameter",
    "downlink_bits_per_parameter",
    "tokens_trained",
    "wall_s",
)
QUICK_TOKENS = "400k"


def run_arm(arm: str, config: Path, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """One run to its end; its summary.

    Raises:
        RuntimeError: It failed.
    """
    command = [
        sys.executable,
        "-m",
        "wan_diloco",
        "run",
        str(config),
        "--run-folder",
        str(folder),
        "--json",
        *ARMS[arm],
    ]
    for override in [f"run.seed={seed}", *overrides]:
        command += ["--set", override]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{arm} with seed {seed} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    summary = json.loads((folder / "summary.json").read_text())
    kept = {key: summary[key] for key in KEPT if key in summary}
    kept.setdefault("tokens_trained", summary.get("tokens"))  # as a baseline calls it
    if regions := summary.get("by_region"):
        kept["sent_mb_a_region"] = statistics.mean(region["uplink_bytes"] for region in regions.values()) / 1e6
    return kept


def measure(arms: list[str], config: Path, seeds: list[int], overrides: list[str]) -> dict[str, Any]:
    """The arms for all seeds, and their medians and spreads."""
    result: dict[str, Any] = {"machine": machine(), "seeds": seeds, "overrides": overrides, "arms": {}}
    for arm in arms:
        runs = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as scratch:
                runs.append(run_arm(arm, config, seed, overrides, Path(scratch) / "run"))
            print(f"{arm}, seed {seed}: {runs[-1]}", file=sys.stderr)
        keys = [key for key in runs[0] if all(isinstance(run.get(key), int | float) for run in runs)]
        result["arms"][arm] = {
            key: {
                "median": statistics.median(run[key] for run in runs),
                "min": min(run[key] for run in runs),
                "max": max(run[key] for run in runs),
            }
            for key in keys
        }
    return result


def table(result: dict[str, Any]) -> str:
    """The README's table."""
    rows = [
        "| | one region alone | data-parallel | wan_diloco |",
        "|---|---|---|---|",
    ]
    names = {
        "validation_nats_per_byte": "validation, nats a byte",
        "test_nats_per_byte": "test, nats a byte",
        "tokens_trained": "tokens trained on",
        "participation": "participation",
        "sent_mb_a_region": "sent by a region in the whole run, MB",
        "uplink_bits_per_parameter": "bits a parameter and merge, up",
        "downlink_bits_per_parameter": "bits a parameter and merge, down",
    }
    for key, name in names.items():
        cells = []
        for arm in ("alone", "data_parallel", "wan_diloco"):
            figure = result["arms"].get(arm, {}).get(key)
            cells.append("-" if figure is None else _spelled(figure))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _spelled(figure: dict[str, float]) -> str:
    if figure["median"] > 1000:
        return f"{figure['median'] / 1e6:.2f}M"
    if figure["min"] == figure["max"]:
        return f"{figure['median']:.3f}"
    return f"{figure['median']:.3f} ({figure['min']:.3f}-{figure['max']:.3f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_TOKENS} tokens")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--arms", default=",".join(ARMS), help="which of them")
    parser.add_argument("--config", type=Path, default=ROOT / "deploy" / "demo.toml")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    chosen = parser.parse_args()
    seeds = [1] if chosen.quick else [int(seed) for seed in chosen.seeds.split(",")]
    overrides = chosen.overrides + ([f"run.tokens={QUICK_TOKENS}"] if chosen.quick else [])
    arms = chosen.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"no such arms: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    result = measure(arms, chosen.config, seeds, overrides)
    print(json.dumps(result, indent=2) if chosen.json else f"{json.dumps(result['machine'])}\n\n{table(result)}")


if __name__ == "__main__":
    main()
