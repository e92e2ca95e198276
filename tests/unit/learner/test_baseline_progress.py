"""What a baseline says while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.learner.conftest import MakeConfig
from wan_diloco.clock import ManualClock
from wan_diloco.learner.baseline import BaselineMode, baseline_tokens
from wan_diloco.learner.baseline_rank import Observer
from wan_diloco.learner.replica import StepOutcome
from wan_diloco.models import build_model


@pytest.mark.parametrize(
    ("mode", "tokens", "early", "late"),
    [
        (BaselineMode.ALONE, 40 * 32, "96 tokens (16/s)", "1.28k tokens"),
        (BaselineMode.DATA_PARALLEL, 40 * 64, "192 tokens (32/s)", "2.56k tokens"),
    ],
)
def test_a_line_now_and_then_says_step_tokens_rate_and_loss(
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: BaselineMode,
    tokens: int,
    early: str,
    late: str,
) -> None:
    config = make_config(evaluation={"every_steps": 4, "tokens": "100"})
    assert baseline_tokens(config, mode) == tokens
    clock = ManualClock()
    observer = Observer(config, mode, build_model(config), tmp_path, clock)
    for step in range(1, 41):
        clock.advance(2.0 if step <= 3 else 0.1)
        observer.stepped(step, StepOutcome(loss=5.0 - step / 10, tokens=32, learning_rate=1e-3), 0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"step 3/40, {early}, loss 4.700"
    assert len(lines) == 2, "the other steps come too soon after the first line"
    assert lines[1].startswith(f"step 40/40, {late} (")
    assert ", loss 1.000, validation loss " in lines[1]
    assert lines[1].endswith(" at step 36")
