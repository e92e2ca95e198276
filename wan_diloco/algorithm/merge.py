"""Many learners' deltas of one fragment become one: plain mean, or RDA, piece by piece.

With weights w_m that sum to 1, deltas v_m and their norms r_m, for each piece:

    mean      = sum w_m v_m
    radius    = sum w_m r_m
    direction = sum (w_m / r_m) v_m            a zero delta has no direction and adds nothing
    rda       = radius * direction / ||direction||

RDA (radial-directional averaging) keeps the length that the mean of near-orthogonal vectors loses. Where
the learners cancel out, what is left of the direction is noise, so its gain over the mean is capped at
c = 2 sqrt(M), M contributions:

    gain   = max(radius / ||mean||, 1 / ||direction||)
    blend  = min(1, (c - 1) / (gain - 1))
    merged = blend * rda + (1 - blend) * mean

The blend is continuous in the deltas, 1 up to the cap (orthogonal learners have a gain of at most sqrt(M)),
falls to the plain mean as the learners cancel, and ||merged|| <= c ||mean|| always. A direction shorter
than 1e-12, or norms that f32 can't hold, give the plain mean.

Products and sums are rounded to f32 one by one, in the order of the contributions; norms come from
`blocks`; factors are computed in f64 and rounded to f32 once. So the bits are the same on every machine.

Legend: N elements of the fragment, B blocks, M contributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from wan_diloco.algorithm.blocks import BlockTable, block_sums_of_squares, norm
from wan_diloco.algorithm.codec.base import Codec, Payload, check_vector
from wan_diloco.algorithm.layout import Fragment, MergeRule
from wan_diloco.algorithm.weights import contribution_weight, normalised
from wan_diloco.errors import NonFiniteError

__all__ = ["Contribution", "blend_factor", "merge_fragment", "round_f32"]

_DEGENERATE: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """One learner's part in a merge.

    Attributes:
        delta: Base minus local value: encoded, or float32 [N].
        tokens: Real tokens that it stands for.
        steps: Steps that it stands for, at least 1.
    """

    delta: Payload | torch.Tensor
    tokens: int
    steps: int


def round_f32(factor: float) -> float:
    """The nearest f32, as torch would make of a scalar; explicit, so that no kernel has to guess."""
    return float(np.float32(factor))


def blend_factor(gain: float, num_contributions: int) -> float:
    """How much of RDA, rather than of the mean, goes into the merge: 1 up to the cap, then towards 0."""
    cap = 2.0 * math.sqrt(num_contributions)
    return 1.0 if gain <= cap else (cap - 1.0) / (gain - 1.0)


def _decoded(contribution: Contribution, codec: Codec, table: BlockTable) -> torch.Tensor:
    if isinstance(contribution.delta, Payload):
        return codec.decode(contribution.delta, table)
    check_vector(contribution.delta, table)
    if not bool(torch.isfinite(contribution.delta).all()):
        raise NonFiniteError("a contribution's delta")
    return contribution.delta.detach()


class _Rda:
    """Radius and direction of the pieces that take RDA, while contributions come in."""

    def __init__(self, fragment: Fragment, table: BlockTable, num_contributions: int) -> None:
        self._table = table
        self._num_contributions = num_contributions
        self._pieces = [index for index, piece in enumerate(fragment.pieces) if piece.rule is MergeRule.RDA]
        self._radius = dict.fromkeys(self._pieces, 0.0)
        self._direction_N = torch.zeros(table.numel if self._pieces else 0, dtype=torch.float32)

    def _norms(self, values_N: torch.Tensor) -> dict[int, float]:
        sums_B = block_sums_of_squares(values_N, self._table)
        return {piece: norm(sums_B[slice(*self._table.piece_blocks[piece])]) for piece in self._pieces}

    def add(self, delta_N: torch.Tensor, weight: float) -> None:
        if not self._pieces:
            return
        for piece, length in self._norms(delta_N).items():
            self._radius[piece] += weight * length
            if length > 0.0:
                part = slice(*self._table.piece_elements[piece])
                self._direction_N[part] += delta_N[part] * round_f32(weight / length)

    def finish(self, mean_N: torch.Tensor) -> None:
        """Replace the mean of the RDA pieces, in place."""
        if not self._pieces:
            return
        mean_norms, direction_norms = self._norms(mean_N), self._norms(self._direction_N)
        for piece in self._pieces:
            radius, direction, mean = self._radius[piece], direction_norms[piece], mean_norms[piece]
            if not (radius < math.inf and mean > 0.0 and direction >= _DEGENERATE):
                continue
            blend = blend_factor(max(radius / mean, 1.0 / direction), self._num_contributions)
            part = slice(*self._table.piece_elements[piece])
            rda = self._direction_N[part] * round_f32(blend * radius / direction)
            mean_N[part] = rda if blend == 1.0 else rda + mean_N[part] * round_f32(1.0 - blend)


def merge_fragment(
    fragment: Fragment, table: BlockTable, codec: Codec, contributions: Sequence[Contribution]
) -> torch.Tensor:
    """Merge contributions, in the order given, each by its weight tokens^2 / steps.

    One contribution comes back to the bit, whatever the rule.

    Args:
        fragment: Tells each piece's rule.
        table: Its blocks.
        codec: Of the contributions that are encoded.
        contributions: At least one. Who is absent isn't in it: absence is no zero delta.

    Returns:
        The merged delta, float32 [N], in memory of its own.

    Raises:
        ValueError: There is no contribution, or none has weight.
        NonFiniteError: A contribution has a value that isn't finite; nothing of it is used.
        DecodeError: A contribution doesn't decode.
    """
    weights = normalised([contribution_weight(each.tokens, each.steps) for each in contributions])
    if len(contributions) == 1:
        return _decoded(contributions[0], codec, table).clone()
    rda = _Rda(fragment, table, len(contributions))
    mean_N = torch.zeros(table.numel, dtype=torch.float32)
    for contribution, weight in zip(contributions, weights, strict=True):
        delta_N = _decoded(contribution, codec, table)
        # Not add_(alpha=...): torch may fuse that into one rounding.
        mean_N += delta_N * round_f32(weight)
        rda.add(delta_N, weight)
    rda.finish(mean_N)
    return mean_N
