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

    Rises linearly to the peak, already above zero at the first step, which would else be wasted; then falls along half
    a cosine, and stays where it ends.

    Args:
        global_step: Steps taken so far, 0 or more.
        peak: The highest rate.
        warmup_steps: Steps below the peak; 0 starts at it.
        total_steps: Where the fall ends; where it is not beyond the warm-up, nothing falls before it is over.
        final_fraction: The last rate over the peak, 0..1.
    """
    if global_step < warmup_steps:
        rate = peak * (global_step + 1) / warmup_steps
        # Near the largest number the product is infinite, and the quotient alone isn't.
        return rate if math.isfinite(rate) else peak * ((global_step + 1) / warmup_steps)
    if global_step >= total_steps:
        return peak * final_fraction
    progress = (global_step - warmup_steps) / (total_steps - warmup_steps)
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))
