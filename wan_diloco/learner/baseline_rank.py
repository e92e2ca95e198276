"""One replica of a baseline, as a process of its own: `python -m wan_diloco.learner.baseline_rank`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from wan_diloco.clock import SystemClock
from wan_diloco.config import load_config
from wan_diloco.errors import EXIT_OK, WanDilocoError
from wan_diloco.learner.baseline import BaselineMode, baseline_tokens
from wan_diloco.learner.region import file_group
from wan_diloco.learner.replica import Replica, StepOutcome
from wan_diloco.learner.setup import held_out_tokens, open_shard
from wan_diloco.learner.stop_signals import StopSignals, stop_signals
from wan_diloco.models import build_model
from wan_diloco.storage import write_json, write_text
from wan_diloco.telemetry import METRICS_FILE, SUMMARY_FILE, EvaluationRecord, LearnerRecord, MetricsWriter
from wan_diloco.telemetry.report import render_report
from wan_diloco.training import evaluate
from wan_diloco.units import format_count

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from wan_diloco.clock import Clock
    from wan_diloco.config import RunConfig

__all__ = ["Observer", "main", "train"]

# Points of the training curve; more would only make the file long.
_POINTS: Final = 500
_LINE_EVERY_S: Final = 5.0


class Observer:
    """Rank 0's other work: the curve, and the summary at the end.

    Args:
        config: The run.
        mode: Which baseline.
        model: In training; looked at between steps.
        run_folder: Where the results go.
        clock: For the metrics.
    """

    def __init__(
        self, config: RunConfig, mode: BaselineMode, model: torch.nn.Module, run_folder: Path, clock: Clock
    ) -> None:
        """Load what is held out."""
        self._config = config
        self._mode = mode
        self._model = model
        self._run_folder = run_folder
        self._validation, self._test = held_out_tokens(config)
        # An earlier attempt in the same folder is not part of this one.
        (run_folder / METRICS_FILE).unlink(missing_ok=True)
        self._metrics = MetricsWriter(run_folder / METRICS_FILE, clock)
        self._every = max(1, config.total_steps // _POINTS)
        self._region = config.regions[0].name if mode is BaselineMode.ALONE else str(mode)
        self._tokens_per_step = baseline_tokens(config, mode) // config.total_steps
        self._clock = clock
        self._shown_s = clock.now_s()
        self._shown_steps = 0
        self._known_loss = ""

    def stepped(self, steps: int, outcome: StepOutcome, step_time_s: float) -> None:
        """Note a step, and evaluate where the curve wants it."""
        tokens = steps * self._tokens_per_step
        if steps % self._every == 0 or steps == self._config.total_steps:
            self._metrics.write(
                LearnerRecord(
                    region=self._region,
                    local_step=steps,
                    global_step=steps,
                    tokens=tokens,
                    loss=outcome.loss,
                    step_time_s=step_time_s,
                    learning_rate=outcome.learning_rate,
                )
            )
        if steps % self._config.evaluation.every_steps == 0 and steps != self._config.total_steps:
            loss = self._evaluate("validation", self._validation, steps, self._config.evaluation.tokens)
            self._known_loss = f", validation loss {loss:.3f} at step {steps}"
        self._show(steps, outcome.loss)

    def finish(self, wall_s: float) -> None:
        """Evaluate on everything that was held out, and write the summary.

        Raises:
            StorageError: The summary can't be written.
        """
        steps = self._config.total_steps
        tokens = steps * self._tokens_per_step
        validation = self._evaluate("validation", self._validation, steps, 0)
        test = self._evaluate("test", self._test, steps, 0)
        self._metrics.close()
        summary = {
            "baseline": str(self._mode),
            "validation_nats_per_byte": validation,
            "test_nats_per_byte": test,
            "steps": steps,
            "tokens": tokens,
            "wall_s": wall_s,
            "tokens_per_s": tokens / wall_s if wall_s > 0 else None,
        }
        write_json(self._run_folder / SUMMARY_FILE, summary)
        write_text(self._run_folder / "report.html", render_report(self._run_folder))

    def _show(self, steps: int, loss: float) -> None:
        """A line now and then, as a run has them; it says how fast training went since the last one."""
        now_s, total_steps = self._clock.now_s(), self._config.total_steps
        if now_s - self._shown_s < _LINE_EVERY_S and steps != total_steps:
            return
        rate_per_s = (steps - self._shown_steps) * self._tokens_per_step / max(now_s - self._shown_s, 1e-9)
        self._shown_s, self._shown_steps = now_s, steps
        tokens = format_count(steps * self._tokens_per_step)
        line = f"step {steps}/{total_steps}, {tokens} tokens ({format_count(rate_per_s)}/s), loss {loss:.3f}"
        # Whoever reads it may be gone, which is no reason to stop.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{line}{self._known_loss}\n")
            sys.stderr.flush()

    def _evaluate(self, split: str, held_out: npt.NDArray[np.uint8], steps: int, tokens_max: int) -> float:
        loss = evaluate(
            self._model, held_out, sequence_length=self._config.model.sequence_length, tokens_max=tokens_max
        )
        self._metrics.write(
            EvaluationRecord(tokens=steps * self._tokens_per_step, global_step=steps, split=split, nats_per_byte=loss)
        )
        return loss


def train(
    config: RunConfig,
    replica: Replica,
    observer: Observer | None,
    *,
    step_time_min_s: float,
    clock: Clock,
    signals: StopSignals,
) -> int:
    """Train one replica, together with the others of its group.

    Args:
        config: The run.
        replica: In its group.
        observer: Rank 0's; `wall_s` in its summary is the time of the steps, without evaluations.
        step_time_min_s: Each step is stretched to this, as in the run itself.
        clock: For step times.
        signals: That end it early.

    Returns:
        The exit code.

    Raises:
        TransportError: Another replica is gone.
        StorageError: The summary can't be written.
    """
    wall_s = 0.0
    for step in range(config.total_steps):
        started_s = clock.now_s()
        outcome = replica.step(step, global_step=step, total_steps=config.total_steps)
        left_s = started_s + step_time_min_s - clock.now_s()
        if left_s > 0:
            signals.wait(left_s)
        if signals.received is not None:
            return 128 + signals.received
        step_time_s = clock.now_s() - started_s
        wall_s += step_time_s
        if observer is not None:
            observer.stepped(step + 1, outcome, step_time_s)
    if observer is not None:
        observer.finish(wall_s)
    return EXIT_OK


def main(arguments: list[str]) -> int:
    """Run the process.

    Args:
        arguments: Run folder, mode, rank, number of ranks, and the file where they meet.

    Returns:
        The exit code.
    """
    folder, mode, rank, world_size, store = arguments
    torch.set_num_threads(1)
    clock = SystemClock()
    try:
        config = load_config([Path(folder) / "config.json"], env={}).config
        # Whatever is wrong with the data shows before anybody waits for anybody.
        model, units = build_model(config), open_shard(config, config.shards[config.regions[int(rank)].name])
        observer = Observer(config, BaselineMode(mode), model, Path(folder), clock) if rank == "0" else None
        with stop_signals() as signals, file_group(Path(store), int(rank), int(world_size)) as group:
            return train(
                config,
                Replica(config, model, units, group),
                observer,
                step_time_min_s=config.regions[group.rank].step_time_min_s,
                clock=clock,
                signals=signals,
            )
    except WanDilocoError as exc:
        sys.stderr.write(f"baseline: {exc}\n")
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
