"""One local step: gradients of the mean loss over all tokens of the unit, a clip, an update, or an honest refusal.

It comes in two halves, because a region of several ranks agrees on the loss between them; `train_step` is both, for
one process. Nothing here knows of other processes: a model wrapped in DDP or FSDP2 reduces its own gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from wan_diloco.data.batches import IGNORED_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["StepResult", "accumulate_gradients", "apply_gradients", "train_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: Mean over its tokens before the update, nats.
        grad_norm: Norm over all gradients before the clip.
        tokens: Targets that counted.
        finite: Whether loss and gradients were finite. If not, neither weights nor moments have moved, and the tokens
            have taught nothing.
    """

    loss: float
    grad_norm: float
    tokens: int
    finite: bool


def accumulate_gradients(model: nn.Module, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, int]:
    """Add the gradient of the mean loss over all counted tokens of several micro-batches.

    Each micro-batch is weighted by the targets that count in it, so the result is that of one big batch, however it
    was cut.

    Args:
        model: Maps inputs (B, T) to logits (B, T, V).
        batches: Inputs and targets, on the model's device; targets of `IGNORED_TARGET` don't count.

    Returns:
        The mean loss in nats, and the number of targets that counted.

    Raises:
        ValueError: No target counts.
    """
    tokens = sum(int((targets_BT != IGNORED_TARGET).sum()) for _, targets_BT in batches)
    if tokens == 0:
        raise ValueError("a step needs at least one target that counts")
    loss = 0.0
    for inputs_BT, targets_BT in batches:
        logits_BTV = model(inputs_BT)
        share = (
            functional.cross_entropy(
                logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
            )
            / tokens
        )
        share.backward()  # type: ignore[no-untyped-call]
        loss += float(share.detach())
    return loss, tokens


def apply_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, clip_norm: float, loss: float
) -> tuple[float, bool]:
    """Clip, update, and forget the gradients; with a loss or gradient that isn't finite, only forget.

    A clip can't mend such a gradient: it would spread the NaN over every weight, and into the moments for good.

    Args:
        model: Whose gradients are ready.
        optimizer: Of that model.
        clip_norm: The gradient is shrunk to this norm; 0 leaves it.
        loss: Of this step; the same on all ranks of a region, so that all of them take the step or none does.

    Returns:
        The norm before the clip, and whether the update was made.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    grad_norm = float(norm)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if finite:
        if 0 < clip_norm < grad_norm:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, finite


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    clip_norm: float = 1.0,
) -> StepResult:
    """Take one step in one process.

    Args:
        model: Maps inputs (B, T) to logits (B, T, V).
        optimizer: Of that model; set its learning rate before.
        batches: The micro-batches of the unit; see `accumulate_gradients`.
        clip_norm: See `apply_gradients`.
    """
    loss, tokens = accumulate_gradients(model, batches)
    grad_norm, finite = apply_gradients(model, optimizer, clip_norm=clip_norm, loss=loss)
    return StepResult(loss=loss, grad_norm=grad_norm, tokens=tokens, finite=finite)
