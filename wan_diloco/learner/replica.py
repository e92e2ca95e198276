"""One replica of the model with its optimizer: takes steps on numbered data units, and knows nothing of fragments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wan_diloco.algorithm.parameters import unique_parameters
from wan_diloco.training import (
    accumulate_gradients,
    apply_gradients,
    build_adamw,
    learning_rate,
    set_learning_rate,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wan_diloco.config import RunConfig

__all__ = ["GradientAverager", "Replica", "StepOutcome", "UnitSource"]


class UnitSource(Protocol):
    """Batches by number; `data.BatchReader` is one."""

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (B, T) of a unit."""
        ...


class GradientAverager(Protocol):
    """What makes several replicas take one step together."""

    def average(self, parameters: list[torch.Tensor], loss: float) -> float:
        """Replace each gradient by the mean over all replicas.

        Returns:
            The mean of their losses.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step did.

    Attributes:
        loss: Mean over its tokens before the update, nats; over all replicas that stepped together.
        tokens: Of this replica, 0 when the step was refused because something wasn't finite.
        learning_rate: That it was taken with.
    """

    loss: float
    tokens: int
    learning_rate: float


class Replica:
    """A model in training.

    Owner: the thread that trains.

    Args:
        config: The run; its model, inner and seed settings.
        model: To be trained in place, on its device.
        units: Its data; may be replaced by others between two steps.
        averager: For replicas that step together; None for one by itself.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, units: UnitSource, averager: GradientAverager | None = None
    ) -> None:
        """Build the optimizer."""
        inner = config.inner
        self.model = model
        self.parameters: dict[str, torch.Tensor] = dict(unique_parameters(model))
        self.optimizer = build_adamw(
            model,
            learning_rate=inner.lr,
            weight_decay=inner.weight_decay,
            beta1=inner.beta1,
            beta2=inner.beta2,
            eps=inner.eps,
        )
        self._inner = inner
        self.units = units
        self._averager = averager

    def step(self, unit: int, *, global_step: int, total_steps: int) -> StepOutcome:
        """Take one step.

        Args:
            unit: Number of the data unit.
            global_step: Steps that the run has taken before this one: what the learning rate follows.
            total_steps: Where the learning rate ends.
        """
        inner = self._inner
        rate = learning_rate(
            global_step,
            peak=inner.lr,
            warmup_steps=inner.warmup_steps,
            total_steps=total_steps,
            final_fraction=inner.final_lr_fraction,
        )
        set_learning_rate(self.optimizer, rate)
        inputs_BT, targets_BT = self.units.batch(unit)
        batches = list(zip(inputs_BT.chunk(inner.accumulation), targets_BT.chunk(inner.accumulation), strict=True))
        loss, tokens = accumulate_gradients(self.model, batches)
        if self._averager is not None:
            loss = self._averager.average(list(self.parameters.values()), loss)
        _, finite = apply_gradients(self.model, self.optimizer, clip_norm=inner.clip_norm, loss=loss)
        return StepOutcome(loss=loss, tokens=tokens if finite else 0, learning_rate=rate)
