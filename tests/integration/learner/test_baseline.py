"""The two baselines, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from tests.integration.learner.stub_syncer import write_config
from tests.support.sources import REPOSITORY
from wan_diloco.config import RunConfig, load_config
from wan_diloco.errors import EXIT_TEMPORARY
from wan_diloco.learner.baseline import BaselineMode, run_baseline, run_together
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import held_out_tokens, open_shard
from wan_diloco.models import build_model
from wan_diloco.telemetry import METRICS_FILE, SUMMARY_FILE, EvaluationRecord, LearnerRecord, read_metrics
from wan_diloco.training import evaluate

STEPS = 12


def tiny(folder: Path, *, steps: int = STEPS, step_time: str = "0s", evaluate_every: int = 5) -> RunConfig:
    path = write_config(folder)
    text = path.read_text().replace('tokens = "10M"', f"tokens = {steps * 64}")
    west = f'[[regions]]\nname = "west"\nstep_time_min = "{step_time}"\n'
    path.write_text(f"{text}{west}[evaluation]\nevery_steps = {evaluate_every}\n")
    return load_config([path], env={}).config


class _BothShards:
    """Units of twice the batch: what data-parallel training over two regions sees in one step."""

    def __init__(self, config: RunConfig) -> None:
        self._shards = [open_shard(config, index) for index in range(2)]

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = zip(*(shard.batch(index) for shard in self._shards), strict=True)
        return torch.cat(inputs), torch.cat(targets)


@pytest.mark.parametrize("mode", list(BaselineMode))
def test_a_baseline_is_plain_training_on_the_runs_own_data(tmp_path: Path, mode: BaselineMode) -> None:
    torch.set_num_threads(1)
    config, folder = tiny(tmp_path), tmp_path / "baseline"
    assert run_baseline(config, mode, folder) == 0

    alone = mode is BaselineMode.ALONE
    units = open_shard(config, 0) if alone else _BothShards(config)
    reference = Replica(config, build_model(config), units)
    for step in range(STEPS):
        reference.step(step, global_step=step, total_steps=STEPS)
    validation, test = (
        evaluate(reference.model, tokens, sequence_length=config.model.sequence_length)
        for tokens in held_out_tokens(config)
    )
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    assert summary["validation_nats_per_byte"] == pytest.approx(validation, abs=1e-5)
    assert summary["test_nats_per_byte"] == pytest.approx(test, abs=1e-5)
    assert summary["tokens"] == STEPS * (32 if alone else 64)
    assert summary["wall_s"] > 0
    assert "Loss against tokens" in (folder / "report.html").read_text()

    log = read_metrics(folder / METRICS_FILE)
    assert log.damaged == 0
    records = [line.record for line in log.lines]
    assert [record.local_step for record in records if isinstance(record, LearnerRecord)] == [*range(1, STEPS + 1)]
    curve = [record for record in records if isinstance(record, EvaluationRecord)]
    assert [(record.split, record.global_step) for record in curve] == [
        ("validation", 5),
        ("validation", 10),
        ("validation", 12),
        ("test", 12),
    ]
    assert curve[2].nats_per_byte < curve[0].nats_per_byte


WAITS = "import signal; signal.sigwait([signal.SIGTERM])"


@pytest.mark.parametrize(
    ("scripts", "exit_code"),
    [
        (["pass", "pass"], 0),
        (["raise SystemExit(78)", WAITS], 78),
        ([WAITS, "import os; os.kill(os.getpid(), 9)"], 70),
        ([f"import os; os.kill(os.getppid(), 15); {WAITS}", WAITS], 143),
    ],
)
def test_processes_end_together(scripts: list[str], exit_code: int) -> None:
    assert run_together([[sys.executable, "-c", script] for script in scripts]) == exit_code
    assert psutil.Process().children() == []


@contextmanager
def two_ranks(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A group of replicas, with nobody above them."""
    command = [sys.executable, "-m", "wan_diloco.learner.baseline_rank", str(folder), str(BaselineMode.DATA_PARALLEL)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / "store")], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def steps_of(folder: Path) -> list[int]:
    path = folder / METRICS_FILE
    lines = read_metrics(path).lines if path.exists() else ()
    return [line.record.local_step for line in lines if isinstance(line.record, LearnerRecord)]


def test_a_rank_that_is_killed_ends_its_group_by_itself(tmp_path: Path) -> None:
    """Who is left takes no step alone, waits for nobody, and says whom it lost."""
    config = tiny(tmp_path, steps=100_000, step_time="5ms", evaluate_every=100_000)
    (tmp_path / "config.json").write_text(config.resolved_json())
    with two_ranks(tmp_path) as (first, second):
        while len(steps_of(tmp_path)) < 2:
            assert (first.poll(), second.poll()) == (None, None), first.communicate()
            threading.Event().wait(0.05)
        second.kill()
        _, stderr = first.communicate(timeout=60)
    assert first.returncode == EXIT_TEMPORARY
    assert "baseline: a process of the group is gone" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / SUMMARY_FILE).exists()
