"""How good a model is: nats per byte on a held-out set."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from wan_diloco.data.batches import IGNORED_TARGET, evaluation_batches

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

__all__ = ["evaluate"]


def evaluate(
    model: nn.Module,
    tokens: npt.NDArray[np.uint8],
    *,
    sequence_length: int,
    batch_size: int = 32,
    tokens_max: int = 0,
    threads: int = 1,
) -> float:
    """Mean negative log likelihood of a set, nats per token; with byte tokens, nats per byte.

    Windows don't overlap, so early positions of each have little to go by: compare figures of one sequence length only.

    Args:
        model: Maps inputs (B, T) to logits (B, T, V); its mode is restored after.
        tokens: The set, uint8 (N,).
        sequence_length: Tokens of a window.
        batch_size: Windows at once; the result doesn't depend on it but for rounding.
        tokens_max: A quick look at evenly spread windows of about this many tokens; 0 takes all.
        threads: How many batches are looked at side by side, each by one thread of torch's. Unlike torch's own threads
            these don't wait for each other after every operation, so on a busy machine they are never slower than one.

    Returns:
        The mean; the same bits for any number of threads.

    Raises:
        DataError: The set has nothing to predict.
    """
    device = next(model.parameters()).device
    batches = evaluation_batches(tokens, sequence_length=sequence_length, batch_size=batch_size, tokens_max=tokens_max)
    lock = threading.Lock()  # owns the iterator

    def look(_: int) -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []
        with torch.inference_mode():
            while True:
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return seen
                inputs_BT, targets_BT = batch
                logits_BTV = model(inputs_BT.to(device))
                loss = functional.cross_entropy(
                    logits_BTV.flatten(0, 1).float(),
                    targets_BT.to(device).flatten(),
                    ignore_index=IGNORED_TARGET,
                    reduction="sum",
                )
                seen.append((float(loss), int((targets_BT != IGNORED_TARGET).sum())))

    was_training = model.training
    model.eval()
    try:
        if threads == 1:
            seen = look(0)
        else:
            with ThreadPoolExecutor(threads) as pool:
                seen = [item for part in pool.map(look, range(threads)) for item in part]
    finally:
        model.train(was_training)
    # An exact sum doesn't depend on who looked at what.
    return math.fsum(loss for loss, _ in seen) / sum(count for _, count in seen)
