"""How good a model is: nats per byte on a held-out set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from wan_diloco.data.batches import IGNORED_TARGET, evaluation_batches

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

__all__ = ["evaluate"]


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    tokens: npt.NDArray[np.uint8],
    *,
    sequence_length: int,
    batch_size: int = 32,
    tokens_max: int = 0,
) -> float:
    """Mean negative log likelihood of a set, nats per token; with byte tokens, nats per byte.

    Windows don't overlap, so early positions of each have little to go by: compare figures of one sequence length only.

    Args:
        model: Maps inputs (B, T) to logits (B, T, V); its mode is restored after.
        tokens: The set, uint8 (N,).
        sequence_length: Tokens of a window.
        batch_size: Windows at once; the result doesn't depend on it but for rounding.
        tokens_max: A quick look at evenly spread windows of about this many tokens; 0 takes all.

    Raises:
        DataError: The set has nothing to predict.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for inputs_BT, targets_BT in evaluation_batches(
        tokens, sequence_length=sequence_length, batch_size=batch_size, tokens_max=tokens_max
    ):
        logits_BTV = model(inputs_BT.to(device))
        total += functional.cross_entropy(
            logits_BTV.flatten(0, 1).float(),
            targets_BT.to(device).flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )
        count += int((targets_BT != IGNORED_TARGET).sum())
    model.train(was_training)
    return float(total) / count
