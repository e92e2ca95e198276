"""Loops over plain vectors."""

from __future__ import annotations

from typing import Any

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.compiled import f32, inner

__all__ = ["add_product", "add_vectors", "copy", "fill", "subtract_vectors"]


@inner
def fill(t: Any, start: int, stop: int) -> None:
    """Zeros into t[start:stop]."""
    for j in range(start, stop):
        t[j] = f32(0)


@inner
def copy(source: Any, target: Any, count: int) -> None:
    """The first elements of one array into another."""
    for j in range(count):
        target[j] = source[j]


@inner
def subtract_vectors(x: Any, y: Any, t: Any) -> None:
    """The difference x - y, into t."""
    for j in range(x.size):
        t[j] = x[j] - y[j]


@inner
def add_vectors(x: Any, y: Any, t: Any) -> None:
    """The sum x + y, into t."""
    for j in range(x.size):
        t[j] = x[j] + y[j]


@inner
def add_product(d: Any, t: Any, weight: Any, count: int) -> None:
    """Add weight * t to d, over whole blocks."""
    for j in range(count * BLOCK):
        d[j] += t[j] * weight
