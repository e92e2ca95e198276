"""`wan-diloco chaos` as a user runs it: real processes are killed and stopped, links broken, the disk filled.

What is asserted holds on any machine: nothing is lost, nothing counts twice, everything befell. How long anything took
is `bench/chaos.py`'s to say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import REPOSITORY
from tests.support.text import write_text_corpus
from wan_diloco.config import FaultKind, load_schedule
from wan_diloco.errors import EXIT_SIGTERM
from wan_diloco.lab.small_disk import plan_disk

# A machine that is busy with other things takes minutes to start so many Python processes; an idle one takes seconds.
_WITHIN_S = 900.0
pytestmark = pytest.mark.timeout(_WITHIN_S + 100)

CONFIG = """
[run]
name = "tiny"
tokens = {tokens}
start_timeout = "240s"
[model]
dim = 16
layers = 1
heads = 2
sequence_length = 32
[data]
source = "text:{text}"
[inner]
batch_tokens = 64
warmup_steps = 4
[sync]
fragments = 4
period_steps = 4
overlap_steps = 1
quorum = 1
[evaluation]
every_steps = 1000
tokens = "2k"
"""
REGION = """
[[regions]]
name = "{name}"
step_time_min = "{step_time}"
"""
# The syncer last: a busy machine takes long to start it again, and until then a half-open link has nothing to lose.
SHORT = """
seed = 3
[[faults]]
at = "1s"
kind = "cut"
target = "link:a"
for = "1s"
[[faults]]
at = "4s"
kind = "half-open"
target = "link:a"
for = "2s"
[[faults]]
at = "7s"
kind = "kill"
target = "learner:b"
[[faults]]
at = "8s"
kind = "kill"
target = "syncer"
"""


# The last comes when the end has begun.
ENDLESS = """
[[faults]]
at = "0s"
kind = "stop"
target = "learner:b"
for = "1h"
[[faults]]
at = "1s"
kind = "cut"
target = "link:a"
for = "1h"
[[faults]]
at = "1500ms"
kind = "kill"
target = "syncer"
"""


def prepare(folder: Path, steps: int, regions: str, step_time: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command, and its environment."""
    config = folder / "tiny.toml"
    text = write_text_corpus(folder / "text.txt", 3000)
    config.write_text(
        CONFIG.format(tokens=steps * 64 * len(regions), text=text)
        + "".join(REGION.format(name=name, step_time=step_time) for name in regions)
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("WAN_DILOCO_")}
    return [
        sys.executable,
        "-m",
        "wan_diloco",
        "chaos",
        str(config),
        "--run-folder",
        str(folder / "run"),
        "--json",
    ], env


def play(folder: Path, steps: int, regions: str, *words: str, step_time: str = "150ms") -> dict[str, Any]:
    """Run to the end; what `chaos.json` says."""
    command, env = prepare(folder, steps, regions, step_time)
    run = folder / "run"
    done = subprocess.run(
        [*command, *words],
        cwd=REPOSITORY,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    logs = "\n".join(f"---- {path.name}\n{path.read_text()[-2000:]}" for path in (run / "logs").glob("*.log"))
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}\n{logs}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report == json.loads((run / "chaos.json").read_text())
    return report


def check_account(folder: Path, report: dict[str, Any]) -> None:
    """Nothing lost, nothing twice, by the run's own books and by those of chaos; and the summary says so."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["finished"]
    audit = report["audit"]
    assert audit["sentences"] == []
    assert (audit["double_merges"], audit["lost_acknowledged"], audit["unaccounted"]) == (0, 0, 0)
    assert audit["ended"]
    assert audit["outstanding"] == 0
    assert audit["acknowledged"] == audit["merged"] + audit["replaced"] + sum(audit["discarded"].values())
    assert audit["published"] == summary["rounds"]
    for key in (
        "faults",
        "longest_standstill_s",
        "ledger_balance",
        "double_merges",
        "repeated_units",
        "lost_acknowledged",
    ):
        assert summary[key] == report[key]
    assert summary["ledger_balance"] == 0
    assert 'id="part-faults"' in (folder / "run" / "report.html").read_text()


def test_a_run_comes_through_a_killed_syncer_a_killed_learner_and_broken_links(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(SHORT)
    report = play(tmp_path, 200, "ab", "--schedule", str(tmp_path / "faults.toml"))
    check_account(tmp_path, report)
    assert [item["problem"] for item in report["befallen"]] == ["", "", "", ""]
    assert report["faults_by_kind"] == {"cut link": 1, "half-open link": 1, "kill learner": 1, "kill syncer": 1}
    assert report["audit"]["terms"] == 2, "the syncer was started again"
    assert report["links"]["a"]["lost_bytes"] > 0
    assert all(counts["up_bytes"] and counts["down_bytes"] for counts in report["links"].values())
    assert {"alive", "training", "averaged"} <= report["presence"][0].keys()
    assert load_schedule(tmp_path / "run" / "chaos-schedule.json") == load_schedule(tmp_path / "faults.toml")


def test_a_run_that_is_told_to_end_in_the_middle_of_faults_ends_cleanly(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(ENDLESS)
    command, env = prepare(tmp_path, 100_000, "ab", "150ms")
    process = subprocess.Popen(
        [*command, "--schedule", str(tmp_path / "faults.toml")],
        cwd=REPOSITORY,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "chaos: cut link:a" in line:
                process.send_signal(signal.SIGTERM)
                break
        out, rest = process.communicate(timeout=_WITHIN_S)
    finally:
        process.kill()
    assert process.returncode == EXIT_SIGTERM, f"{''.join(said)}{rest}"
    report = json.loads(out)
    stop, cut, kill = report["befallen"]
    assert (stop["cut_short"], cut["cut_short"]) == (True, True)
    assert kill["problem"] == "the run was over before"
    assert "kill syncer" not in rest
    assert "is killed" not in rest, "who was stopped went on, and ended by itself"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["finished"], summary["faults"], summary["ledger_balance"]) == (False, 2, 0)
    assert not (tmp_path / "run" / "links").exists()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_five_minutes_of_drawn_faults_of_every_sort_lose_nothing(tmp_path: Path) -> None:
    report = play(tmp_path, 1400, "abcd", "--random", "--seed", "5", "--faults", "22", step_time="250ms")
    check_account(tmp_path, report)
    assert report["faults"] >= 20
    kinds = {kind for kind in FaultKind if kind is not FaultKind.FULL_DISK or not plan_disk(tmp_path).why_not}
    assert {item["kind"] for item in report["befallen"]} == kinds
    assert report["audit"]["terms"] >= 2
