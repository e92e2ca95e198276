"""Whole runs on this machine, started as a user starts them, and what their files say. Not run by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "deploy" / "demo.toml"


def command(name: str, config: Path, folder: Path, settings: Sequence[str], *words: str) -> list[str]:
    """The command line of `wan-diloco NAME CONFIG`."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "wan_diloco", name, str(config), "--run-folder", str(folder), *overrides, *words]


def finished(words: list[str]) -> str:
    """Run a command to its end; what it printed on stdout.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"{done.stderr.strip()[-800:]}\n{done.stdout.strip()[-800:]}"
        raise RuntimeError(f"{' '.join(words[2:4])} ended with {done.returncode}: {said}")
    return done.stdout


def summary(folder: Path) -> dict[str, Any]:
    """Of a finished run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind so far, in order."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith(b"\n") and line.strip()]
    return [record for record in records if record["kind"] == kind]


def stretched(regions: Sequence[str], step_time: str) -> list[str]:
    """Settings that stretch the steps of these regions, so that how busy the machine is doesn't decide."""
    return [f"regions.{name}.step_time_min={step_time}" for name in regions]
