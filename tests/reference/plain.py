"""The method in plain torch, one operation after the other: what the kernels must equal to the bit.

Slow and whole-fragment; the formulas are those of `algorithm.merge`, `algorithm.codec.blockwise`, `algorithm.outer` and
`algorithm.publication`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan_diloco.algorithm.blocks import BLOCK, BlockTable, Segment, block_sums_of_squares, norm
from wan_diloco.algorithm.codec import Codec, Payload
from wan_diloco.algorithm.layout import Fragment, MergeRule
from wan_diloco.algorithm.merge import blend_factor
from wan_diloco.algorithm.rounding import round_f32
from wan_diloco.algorithm.weights import contribution_weight, normalised

__all__ = ["PlainContribution", "decode", "merge", "outer_step", "publish"]

_DEGENERATE = 1e-12
_LEVELS = torch.tensor(
    [0.0, *(2.0 ** (level - 7) for level in range(1, 8)), 0.0, *(-(2.0 ** (level - 7)) for level in range(1, 8))]
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainContribution:
    """A delta, decoded already: float32 [N]."""

    delta: torch.Tensor
    tokens: int
    steps: int


def _nibbles(packed: torch.Tensor, segment: Segment) -> torch.Tensor:
    codes = packed.new_zeros((segment.num_rows, segment.blocks_per_row, BLOCK))
    body = packed[:, : segment.full_blocks * 64].view(segment.num_rows, segment.full_blocks, 64)
    codes[:, : segment.full_blocks, :64] = body & 15
    codes[:, : segment.full_blocks, 64:] = body >> 4
    if segment.tail:
        half = (segment.tail + 1) // 2
        codes[:, -1, :half] = packed[:, -half:] & 15
        codes[:, -1, half : 2 * half] = packed[:, -half:] >> 4
    return codes


def decode(payload: Payload, codec: Codec, table: BlockTable) -> torch.Tensor:
    """A good payload's values, float32 [N]."""
    codes = torch.from_numpy(payload.codes.copy())
    if codec.name == "f32":
        return codes.view(torch.float32)
    if codec.name == "bf16":
        return codes.view(torch.bfloat16).float()
    scales_B = torch.from_numpy(payload.scales.copy()).view(torch.bfloat16).float()
    values_N = torch.empty(table.numel)
    offset = 0
    for segment in table.segments:
        halves = segment.full_blocks * 64 + (segment.tail + 1) // 2
        row_bytes = segment.row_length if codec.name == "int8" else halves
        packed = codes[offset : offset + segment.num_rows * row_bytes].view(segment.num_rows, row_bytes)
        offset += packed.numel()
        if codec.name == "int8":
            padded = packed.new_zeros((segment.num_rows, segment.blocks_per_row * BLOCK))
            padded[:, :row_bytes] = packed
            units = padded.view(segment.num_rows, -1, BLOCK).float() - 128.0
        elif codec.name == "int4":
            units = _nibbles(packed, segment).float() - 8.0
        else:
            units = _LEVELS[_nibbles(packed, segment).long()]
        scale_RK1 = scales_B[segment.first_block : segment.stop_block].view(segment.num_rows, -1, 1)
        segment.unpad(units * scale_RK1, values_N)
    return values_N


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


def merge(fragment: Fragment, table: BlockTable, contributions: Sequence[PlainContribution]) -> torch.Tensor:
    """The merged delta, float32 [N]."""
    weights = normalised([contribution_weight(each.tokens, each.steps) for each in contributions])
    if len(contributions) == 1:
        return contributions[0].delta.clone()
    rda = _Rda(fragment, table, len(contributions))
    mean_N = torch.zeros(table.numel)
    for contribution, weight in zip(contributions, weights, strict=True):
        # Not add_(alpha=...): torch may fuse that into one rounding.
        mean_N += contribution.delta * round_f32(weight)
        rda.add(contribution.delta, weight)
    rda.finish(mean_N)
    return mean_N


def outer_step(
    theta_N: torch.Tensor, momentum_N: torch.Tensor, delta_N: torch.Tensor, *, lr: float, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """New value and new momentum."""
    mu, eta = round_f32(momentum), round_f32(lr)
    new_momentum_N = momentum_N * mu + delta_N
    return theta_N - (delta_N + new_momentum_N * mu) * eta, new_momentum_N


def publish(
    exact_N: torch.Tensor, published_N: torch.Tensor, codec: Codec, table: BlockTable
) -> tuple[Payload, torch.Tensor]:
    """The update, and the new published value."""
    payload = codec.encode_on_device(exact_N if codec.lossless else exact_N - published_N, table)
    decoded_N = decode(payload, codec, table)
    return payload, decoded_N if codec.lossless else published_N + decoded_N
