"""One learner's inner loop in plain torch: schedule, optimizer, step, evaluation. No torch.distributed."""

from __future__ import annotations

from wan_diloco.training.evaluate import evaluate
from wan_diloco.training.optimizer import (
    build_adamw,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
    zero_nonfinite_moments,
)
from wan_diloco.training.schedule import learning_rate
from wan_diloco.training.step import StepResult, accumulate_gradients, apply_gradients, train_step

__all__ = [
    "StepResult",
    "accumulate_gradients",
    "apply_gradients",
    "build_adamw",
    "evaluate",
    "learning_rate",
    "load_optimizer_tensors",
    "optimizer_tensors",
    "set_learning_rate",
    "train_step",
    "zero_nonfinite_moments",
]
