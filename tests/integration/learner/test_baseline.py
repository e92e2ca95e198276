"""The two baselines, as processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.integration.learner.stub_syncer import write_config
from wan_diloco.config import RunConfig, load_config
from wan_diloco.learner.baseline import BaselineMode, run_baseline, run_together
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import held_out_tokens, open_shard
from wan_diloco.models import build_model
from wan_diloco.telemetry import METRICS_FILE, SUMMARY_FILE, EvaluationRecord, LearnerRecord, read_metrics
from wan_diloco.training import evaluate

STEPS = 12


def tiny(folder: Path) -> RunConfig:
    path = write_config(folder)
    text = path.read_text().replace('tokens = "10M"', f"tokens = {STEPS * 64}")
    path.write_text(text + '[[regions]]\nname = "west"\n[evaluation]\nevery_steps = 5\n')
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
