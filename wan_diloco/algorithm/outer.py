"""The outer optimizer: SGD with Nesterov momentum, one state a fragment, strictly in f32.

Legend: N elements of the fragment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.algorithm.merge import round_f32
from wan_diloco.units import GlobalStep

if TYPE_CHECKING:
    import torch

__all__ = ["momentum_at", "outer_step"]


def outer_step(
    theta_N: torch.Tensor, momentum_N: torch.Tensor, delta_N: torch.Tensor, *, lr: float, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step with a merged delta: b = mu b + d, theta = theta - eta (d + mu b), each operation rounded once.

    To be called once a merge, and not at all where nobody contributed.

    Args:
        theta_N: The exact value, float32 [N]; not changed.
        momentum_N: b, float32 [N], zeros at first; not changed.
        delta_N: The merged delta, positive where learners moved downhill.
        lr: eta.
        momentum: mu, 0 to below 1.

    Returns:
        The new value and the new b.
    """
    mu, eta = round_f32(momentum), round_f32(lr)
    new_momentum_N = momentum_N * mu + delta_N
    return theta_N - (delta_N + new_momentum_N * mu) * eta, new_momentum_N


def momentum_at(global_step: GlobalStep, momentum: float, warmup_steps: int) -> float:
    """The outer momentum at a global step: rising in a straight line from 0, then constant.

    Args:
        global_step: The syncer's step, from 0.
        momentum: Where it ends.
        warmup_steps: Steps it rises for; 0 for a constant momentum.
    """
    if global_step >= warmup_steps:
        return momentum
    return momentum * global_step / warmup_steps
