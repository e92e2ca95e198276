"""What the loop says of itself while it trains, and while it holds."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.unit.learner.conftest import MakeTrainer
from wan_diloco.clock import ManualClock
from wan_diloco.learner.ipc import Command
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.stop_signals import stop_signals
from wan_diloco.learner.trainer import TrainingLoop
from wan_diloco.protocol.events import AllowSteps, BoundaryPassed, ExitLearner, ShowReason
from wan_diloco.units import LocalStep


class ScriptedUplink:
    """Hands out what a syncer's words came to, a boundary each, with some seconds between them."""

    look_again_s = 0.0
    readable: tuple[int, ...] = ()

    def __init__(self, clock: ManualClock, script: list[list[Command]]) -> None:
        self._clock = clock
        self._script = script

    def receive(self) -> list[Command]:
        self._clock.advance(4.0)
        return self._script.pop(0)

    def passed(self, report: BoundaryPassed) -> None:
        pass


def test_progress_is_logged_now_and_then_also_while_no_step_may_be_taken(make_trainer: MakeTrainer) -> None:
    trainer, _ = make_trainer()
    clock = ManualClock()
    why = ShowReason(topic="step", text="holds: the run's 4 steps are done")
    leave: list[list[Command]] = [[AllowSteps(until_step=LocalStep(4))]]
    script = [*leave, *([] for _ in range(6)), [why], [ExitLearner(reason="the run has ended", exit_code=0)]]
    logs = _loop(trainer, clock, script, exit_code=0)
    # At 12 s, 24 s and 36 s of this clock: after two steps, after the last one allowed, and once more.
    assert [(line["event"], line["local_step"], line.get("reason")) for line in logs if "local_step" in line] == [
        ("training", 2, None),
        ("holding", 4, "waits for the syncer"),
        ("holding", 4, "holds: the run's 4 steps are done"),
    ]
    assert logs[0]["loss"] > 0
    assert logs[0]["total_steps"] == 40
    assert logs[-1]["log_level"] == "info"


def test_a_reason_that_is_withdrawn_is_given_no_more(make_trainer: MakeTrainer) -> None:
    trainer, _ = make_trainer()
    trainer.boundary([ShowReason(topic="syncer", text="nobody answers"), ShowReason(topic="step", text="no step yet")])
    assert trainer.reason == "no step yet; nobody answers"
    trainer.boundary([ShowReason(topic="step", text=""), ShowReason(topic="fragment:3", text="refused")])
    assert trainer.reason == "nobody answers"


@pytest.mark.parametrize("exit_code", [75, 77, 78])
def test_an_end_that_nobody_asked_for_is_an_error(make_trainer: MakeTrainer, exit_code: int) -> None:
    trainer, _ = make_trainer()
    script: list[list[Command]] = [[ExitLearner(reason="refused (fenced): no", exit_code=exit_code)]]
    (line,) = _loop(trainer, ManualClock(), script, exit_code=exit_code)
    assert (line["event"], line["log_level"], line["exit_code"]) == ("learner_ends", "error", exit_code)


def _loop(
    trainer: LocalTrainer, clock: ManualClock, script: list[list[Command]], *, exit_code: int
) -> list[MutableMapping[str, Any]]:
    """Let a loop go through a script to its end; what it logged."""
    with stop_signals() as signals, capture_logs() as logs:
        loop = TrainingLoop(
            trainer=trainer,
            uplink=ScriptedUplink(clock, script),  # type: ignore[arg-type]  # the real one is a process
            step_time_min_s=0.0,
            checkpoints=None,
            clock=clock,
            signals=signals,
            reload=lambda: None,
        )
        assert loop.run() == exit_code
    return logs
