"""How much each contribution counts: quantity times quality, normalised over those present."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["contribution_weight", "normalised"]


def contribution_weight(tokens: int, steps: int) -> float:
    """Tokens times tokens a step: tokens^2 / steps.

    Args:
        tokens: Real tokens trained on (padding doesn't count), at least 0.
        steps: Steps they took, at least 1: who took none has nothing to contribute.

    Raises:
        ValueError: A count is out of range.
    """
    if tokens < 0 or steps < 1:
        raise ValueError(f"a contribution has at least 0 tokens and 1 step, not {tokens} and {steps}")
    return tokens * tokens / steps


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights divided by their sum, which doesn't depend on their order.

    Raises:
        ValueError: There is none, one is negative or not finite, or all are zero.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights are finite and not negative: {list(weights)}")
    total = math.fsum(weights)
    if total <= 0:
        raise ValueError("no contribution has any weight")
    return tuple(weight / total for weight in weights)
