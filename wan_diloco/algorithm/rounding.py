"""Where f64 becomes f32."""

from __future__ import annotations

import numpy as np

__all__ = ["round_f32"]


def round_f32(factor: float) -> float:
    """The nearest f32, as torch would make of a scalar; explicit, so that no kernel has to guess."""
    return float(np.float32(factor))
