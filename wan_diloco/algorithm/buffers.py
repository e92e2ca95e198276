"""Merging what a model keeps beside its parameters: running statistics and counters.

Buffers bypass momentum and quantisation: an average that is averaged needs neither.

Legend: M learners.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch

from wan_diloco.algorithm.rounding import round_f32
from wan_diloco.algorithm.weights import normalised

__all__ = ["BufferRule", "buffer_rule", "merge_buffer"]


class BufferRule(StrEnum):
    """What becomes of a buffer at a merge."""

    MEAN = "mean"
    MAX = "max"
    KEEP = "keep"


def buffer_rule(dtype: torch.dtype) -> BufferRule:
    """The rule that fits a type: mean for running statistics, maximum for counters, nothing for flags."""
    if dtype.is_floating_point:
        return BufferRule.MEAN
    return BufferRule.KEEP if dtype in (torch.bool, torch.complex64, torch.complex128) else BufferRule.MAX


def merge_buffer(
    rule: BufferRule, local: torch.Tensor, values_M: Sequence[torch.Tensor], weights_M: Sequence[float]
) -> torch.Tensor:
    """One buffer after a merge; type and shape stay.

    Args:
        rule: What to do.
        local: The buffer as this learner has it.
        values_M: As the merged learners have it, in the merge's order.
        weights_M: Their weights, not necessarily normalised.

    Returns:
        The new value in memory of its own; with `KEEP`, the local bits.

    Raises:
        ValueError: A value has another shape or type, or the weights can't be normalised.
    """
    if any(value.shape != local.shape or value.dtype != local.dtype for value in values_M):
        raise ValueError("the learners' buffers differ in shape or type")
    if rule is BufferRule.KEEP or not values_M:
        return local.clone()
    if rule is BufferRule.MAX:
        return torch.stack(list(values_M)).amax(dim=0)
    wide = torch.float64 if local.dtype is torch.float64 else torch.float32
    merged = torch.zeros_like(local, dtype=wide)
    for value, weight in zip(values_M, normalised(weights_M), strict=True):
        merged += value.to(wide) * (weight if wide is torch.float64 else round_f32(weight))
    return merged.to(local.dtype)
