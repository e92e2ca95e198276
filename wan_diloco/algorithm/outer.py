"""The outer optimizer: SGD with Nesterov momentum, one state a fragment, strictly in f32.

With a merged delta d, positive where learners moved downhill, and each operation rounded once:

    b     = mu b + d
    theta = theta - eta (d + mu b)

Taken once a merge, and not at all where nobody contributed; `merge.merge_and_publish` does it.
"""

from __future__ import annotations

from wan_diloco.units import GlobalStep

__all__ = ["momentum_at"]


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
