"""`wan-diloco simulate`: figures, failing seeds, and one world told in full."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil

from tests.simulation.mutants.planted import MUTANTS, planted
from tests.support.cli import in_this_process
from wan_diloco.simulation.transitions import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FORGETFUL = next(mutant for mutant in MUTANTS if mutant.name == "committed data are issued again")


def test_worlds_that_hold_give_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    failures = tmp_path / "failing"
    words = ["simulate", "protocol", "--seeds", "2", "--jobs", "1", "--failures", str(failures), "--json"]
    outcome = in_this_process(capsys, *words)
    found = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert (found["worlds"], found["violations"], found["failing_seeds"]) == (2, 0, {})
    assert found["merges_min"] >= 10
    assert found["faults_min"] >= 3
    assert found["syncer_crashed"] == 1
    assert 0 < found["transition_coverage"] < 1
    assert not failures.exists()


def test_people_get_numbers_and_programs_the_whole_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["simulate", "protocol", "--seeds", "1", "--jobs", "1", "--failures", str(tmp_path / "failing")]
    lines = in_this_process(capsys, *words).stdout.splitlines()
    unseen = json.loads(in_this_process(capsys, *words, "--json").stdout)["transitions_unseen"]
    (said,) = (line for line in lines if line.startswith("transitions_unseen"))
    assert said.split(maxsplit=1)[1] == f"{len(unseen)} of the {len(table())} in the machines' tables"
    assert max(map(len, lines)) < 300


def test_a_seed_that_fails_is_said_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    failures = tmp_path / "failing"
    seed = str(FORGETFUL.seed)
    words = ["simulate", "protocol", "--seeds", "1", "--first", seed, "--jobs", "1", "--failures", str(failures)]
    with planted(FORGETFUL):
        outcome = in_this_process(capsys, *words)
    assert outcome.exit_code == 70
    assert f"seed {seed}: " in outcome.stderr
    assert FORGETFUL.says in outcome.stderr
    assert failures.read_text().split()[0] == seed


def test_one_seed_is_told_event_by_event(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = in_this_process(capsys, "simulate", "protocol", "--seed", "1")
    lines = outcome.stdout.splitlines()
    assert outcome.exit_code == 0
    assert lines[-1].startswith("seed 1: everything held; ")
    assert any("syncer" in line and "LearnerSaid" in line for line in lines)
    assert any("-> Record(" in line for line in lines)


def test_workers_end_with_the_command_however_it_ends(tmp_path: Path) -> None:
    words = ["simulate", "protocol", "--seeds", "100000", "--jobs", "2", "--failures", str(tmp_path / "failing")]
    command = [sys.executable, "-m", "wan_diloco", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Its first line comes when a worker has played some.
        assert process.stderr.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=60.0)
    for worker in alive:
        worker.kill()
    assert not alive
