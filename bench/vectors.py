"""Vectors and fragments that codecs and merges are measured with; not run by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wan_diloco.algorithm.layout import Fragment, MergeRule, Piece
from wan_diloco.units import FragmentId

Vector = npt.NDArray[np.float32]
ROW = 512


def gaussian(numel: int, seed: int) -> Vector:
    """Normal values, each row at a scale of its own, as rows of real deltas have."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.standard_normal(numel // ROW, np.float32)) * np.float32(1e-3)
    return (rng.standard_normal((numel // ROW, ROW), np.float32) * scales[:, None]).reshape(-1)


def student_t(numel: int, seed: int) -> Vector:
    """Heavy tails: Student's t with three degrees of freedom."""
    return (np.random.default_rng(seed).standard_t(3, numel) * 1e-3).astype(np.float32)


def fragment_of(numel: int, *, rule: MergeRule, num_pieces: int = 1) -> Fragment:
    """A fragment of equal pieces whose rows are whole blocks."""
    share = numel // num_pieces
    pieces = tuple(
        Piece(tensor=f"weight{index}", start=0, stop=share, row_length=ROW, rule=rule) for index in range(num_pieces)
    )
    return Fragment(fragment_id=FragmentId(0), pieces=pieces, numel=share * num_pieces)
