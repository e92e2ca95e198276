"""What the loop says of itself while it trains, and while it holds."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.unit.learner.conftest import MakeTrainer
from wan_diloco.clock import ManualClock
from wan_diloco.learner.ipc import Command
from wan_diloco.learner.stop_signals import stop_signals
from wan_diloco.learner.trainer import TrainingLoop
from wan_diloco.protocol.events import AllowSteps, BoundaryPassed, ExitLearner
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
    leave: list[list[Command]] = [[AllowSteps(until_step=LocalStep(4))]]
    script = [*leave, *([] for _ in range(7)), [ExitLearner(reason="the run has ended", exit_code=0)]]
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
        assert loop.run() == 0
    # At 12 s, 24 s and 36 s of this clock: after two steps, after the last one allowed, and once more.
    assert [(line["event"], line["local_step"]) for line in logs if "local_step" in line] == [
        ("training", 2),
        ("holding", 4),
        ("holding", 4),
    ]
    assert logs[0]["loss"] > 0
    assert logs[0]["total_steps"] == 40
