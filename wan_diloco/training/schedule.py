"""The learning rate, as a function of the global step and of nothing else.

There is no scheduler object: state that counts calls is what restarts the warm-up after a resume, or runs at a
multiple of the true pace. Every learner that knows the global step knows its rate.
"""

from __future__ import annotations

import math

__all__ = ["learning_rate"]


def learning_rate(
    global_step: int, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0
) -> float:
    """The rate of the step that leads from `global_step` to `global_step + 1`.

    Rises linearly from 0 to the peak, then falls along half a cosine, and stays where it ends.

    Args:
        global_step: Steps taken so far, 0 or more.
        peak: The highest rate.
        warmup_steps: Where the peak is reached; 0 starts at the peak.
        total_steps: Where the fall ends.
        final_fraction: The last rate over the peak, 0..1.
    """
    if global_step < warmup_steps:
        return peak * global_step / warmup_steps
    if global_step >= total_steps:
        return peak * final_fraction
    progress = (global_step - warmup_steps) / (total_steps - warmup_steps)
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))
