"""Many learners' deltas of one fragment become one, and that the next value: mean or RDA, outer step, publication.

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
`blocks`; factors are computed in f64 and rounded to f32 once. So the bits are the same on every machine, for
any number of threads. The payloads stay packed, and are decoded block by block where they are added; nothing is ever
decoded as a whole. They are all read before anything is changed: what can fail, fails before.

Legend: N elements of the fragment, B blocks, M contributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from wan_diloco.algorithm.blocks import BlockTable, norm
from wan_diloco.algorithm.codec.base import Codec, Payload, PayloadSource, as_halves
from wan_diloco.algorithm.kernels import merging, passes
from wan_diloco.algorithm.kernels.memory import workspace
from wan_diloco.algorithm.kernels.segments import BlockMap
from wan_diloco.algorithm.layout import Fragment, MergeRule
from wan_diloco.algorithm.rounding import round_f32
from wan_diloco.algorithm.weights import contribution_weight, normalised
from wan_diloco.errors import NonFiniteError

if TYPE_CHECKING:
    import torch

__all__ = ["Contribution", "FragmentTensors", "blend_factor", "inspect_payload", "merge_and_publish"]

_DEGENERATE: Final = 1e-12
# Blocks of one contribution that are at hand at once while it is inspected: half the second cache of int4 codes.
_TILE_BLOCKS: Final = 8192
_NO_FACTORS: Final = np.empty(0, np.float32)

Factors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """One learner's part in a merge.

    Attributes:
        source: Its delta, base minus local value, encoded; what `inspect_payload` found good.
        tokens: Real tokens that it stands for.
        steps: Steps that it stands for, at least 1.
        norms: Of each piece, as `inspect_payload` gave them.
    """

    source: PayloadSource
    tokens: int
    steps: int
    norms: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FragmentTensors:
    """What a merge changes, in place; float32 [N] each, on the CPU, contiguous.

    Attributes:
        exact_N: What the outer optimizer has.
        momentum_N: Its momentum.
        published_N: What everybody has.
    """

    exact_N: torch.Tensor
    momentum_N: torch.Tensor
    published_N: torch.Tensor


def blend_factor(gain: float, num_contributions: int) -> float:
    """How much of RDA, rather than of the mean, goes into the merge: 1 up to the cap, then towards 0."""
    cap = 2.0 * math.sqrt(num_contributions)
    return 1.0 if gain <= cap else (cap - 1.0) / (gain - 1.0)


def inspect_payload(fragment: Fragment, table: BlockTable, codec: Codec, source: PayloadSource) -> tuple[float, ...]:
    """See that a contribution's values are all finite, and measure what its merge will need, while it is taken in.

    Args:
        fragment: Tells each piece's rule.
        table: Its blocks.
        codec: Of the contribution.
        source: Buffers of the right lengths.

    Returns:
        The norm of each piece that takes RDA, 0 for others.

    Raises:
        DecodeError: A scale is one that no encoder writes.
        NonFiniteError: A scale or value is NaN or infinite.
    """
    scales = source.scales()
    codec.check_scales(scales)
    rules = [piece.rule for piece in fragment.pieces]
    norms = [0.0] * len(rules)
    if MergeRule.RDA not in rules and not codec.codes_may_be_infinite:
        return tuple(norms)
    blocks, halves = BlockMap(codec.kind, table), as_halves(scales)
    sums_B = np.empty(table.num_blocks, np.float32)
    bad = 0
    for low in range(0, table.num_blocks, _TILE_BLOCKS):
        high = min(low + _TILE_BLOCKS, table.num_blocks)
        codes = np.empty(blocks.code(high) - blocks.code(low), np.uint8)
        source.codes_into(blocks.code(low), codes)
        bad += passes.measure(
            codec.kind,
            codes,
            halves[low:],
            blocks.segments,
            low,
            high,
            sums_B[low:],
            blocks.code(low),
            low,
            workspace(),
        )
    if bad:
        raise NonFiniteError(f"decoded values, in {bad} of {table.num_blocks} blocks")
    for index, (low, high) in enumerate(table.piece_blocks):
        if rules[index] is MergeRule.RDA:
            norms[index] = norm(sums_B[low:high])
    return tuple(norms)


def merge_and_publish(
    fragment: Fragment,
    table: BlockTable,
    codec: Codec,
    contributions: Sequence[Contribution],
    tensors: FragmentTensors,
    *,
    lr: float,
    momentum: float,
    threads: Executor | None = None,
    num_threads: int = 1,
) -> tuple[Payload, int]:
    """Merge contributions, in the order given, each by its weight tokens^2 / steps; step; publish.

    One contribution comes in to the bit, whatever the rule.

    Args:
        fragment: Tells each piece's rule.
        table: Its blocks.
        codec: Of contributions and publication.
        contributions: At least one. Who is absent isn't in it: absence is no zero delta.
        tensors: Changed in place. Blocks of which a new value would not be finite stay as they are.
        lr: Of the outer step.
        momentum: Of the outer step, now.
        threads: Where parts of the fragment are done side by side; never the pool that runs this call.
        num_threads: Into how many parts it is cut.

    Returns:
        The publication, and how many blocks stayed as they were.

    Raises:
        ValueError: There is no contribution, or none has weight.
        Exception: What a source raises while it is read. In either case nothing is changed.
    """
    return _Merge(fragment, table, codec, contributions, tensors, lr, momentum, threads, num_threads).run()


class _Merge:
    """One merge: what all its passes share."""

    def __init__(
        self,
        fragment: Fragment,
        table: BlockTable,
        codec: Codec,
        contributions: Sequence[Contribution],
        tensors: FragmentTensors,
        lr: float,
        momentum: float,
        threads: Executor | None,
        num_threads: int,
    ) -> None:
        self._weights = normalised([contribution_weight(each.tokens, each.steps) for each in contributions])
        self._fragment, self._table, self._kind = fragment, table, codec.kind
        self._contributions = contributions
        self._blocks = BlockMap(codec.kind, table)
        vectors = (tensors.exact_N, tensors.momentum_N, tensors.published_N)
        self._state = tuple(tensor_N.numpy() for tensor_N in vectors)
        self._rule = (np.float32(momentum), np.float32(lr))
        self._factors: Factors = np.array([round_f32(weight) for weight in self._weights], np.float32)
        sizes = codec.sizes(table)
        self._scales_MB = np.stack([as_halves(each.source.scales()) for each in contributions])
        self._codes_MC = np.empty((len(contributions), sizes.codes_bytes), np.uint8)
        for row_C, each in zip(self._codes_MC, contributions, strict=True):
            each.source.codes_into(0, row_C)
        self._codes, self._scales = np.empty(sizes.codes_bytes, np.uint8), np.empty(sizes.scales_bytes, np.uint8)
        self._halves = as_halves(self._scales)
        self._threads, self._num_threads = threads, num_threads if threads is not None else 1
        self._unstepped = 0

    def run(self) -> tuple[Payload, int]:
        rules = [piece.rule for piece in self._fragment.pieces]
        if len(self._contributions) == 1:
            rules = [MergeRule.MEAN] * len(rules)
        for rule, group in groupby(range(len(rules)), key=rules.__getitem__):
            pieces = list(group)
            if rule is MergeRule.MEAN:
                low, high = self._table.piece_blocks[pieces[0]][0], self._table.piece_blocks[pieces[-1]][1]
                self._step(low, high, _NO_FACTORS, (0.0, 0.0))
            else:
                for piece in pieces:
                    self._rda(piece)
        return Payload(codes=self._codes, scales=self._scales), self._unstepped

    def _rda(self, piece: int) -> None:
        low, high = self._table.piece_blocks[piece]
        lengths = [each.norms[piece] for each in self._contributions]
        radius = 0.0
        for weight, length in zip(self._weights, lengths, strict=True):
            radius += weight * length
        turns = [
            round_f32(weight / length) if length > 0.0 else 0.0
            for weight, length in zip(self._weights, lengths, strict=True)
        ]
        directions = np.array(turns, np.float32)
        mean, direction = self._merged_norms(low, high, directions)
        if not (radius < math.inf and mean > 0.0 and direction >= _DEGENERATE):
            self._step(low, high, _NO_FACTORS, (0.0, 0.0))
            return
        blend = blend_factor(max(radius / mean, 1.0 / direction), len(self._contributions))
        rest = 0.0 if blend == 1.0 else round_f32(1.0 - blend)
        self._step(low, high, directions, (rest, round_f32(blend * radius / direction)))

    def _merged_norms(self, low: int, high: int, directions: Factors) -> tuple[float, float]:
        """Norms of mean and direction over some blocks."""
        mean_sums, direction_sums = np.empty(high - low, np.float32), np.empty(high - low, np.float32)

        def sums(start: int, stop: int) -> None:
            merging.merged_sums(
                self._kind,
                self._codes_MC,
                self._scales_MB,
                self._factors,
                directions,
                self._blocks.segments,
                start,
                stop,
                mean_sums[start - low :],
                direction_sums[start - low :],
                start,
                workspace(),
            )

        self._in_parts(low, high, sums)
        return norm(mean_sums), norm(direction_sums)

    def _step(self, low: int, high: int, directions: Factors, blend: tuple[float, float]) -> None:
        factors = (np.float32(blend[0]), np.float32(blend[1]))

        def step(start: int, stop: int) -> int:
            return int(
                merging.merge_and_publish(
                    self._kind,
                    self._codes_MC,
                    self._scales_MB,
                    self._factors,
                    directions,
                    factors,
                    self._blocks.segments,
                    start,
                    stop,
                    self._state,
                    self._rule,
                    self._codes,
                    self._halves,
                    workspace(),
                )
            )

        self._unstepped += sum(self._in_parts(low, high, step))

    def _in_parts(self, low: int, high: int, job: Callable[[int, int], Any]) -> list[Any]:
        """Do something with the blocks [low, high), in parts side by side."""
        step = max(1, -(-(high - low) // self._num_threads))
        parts = [(start, min(start + step, high)) for start in range(low, high, step)]
        if self._threads is None or len(parts) == 1:
            return [job(*part) for part in parts]
        futures = [self._threads.submit(job, *part) for part in parts]
        return [future.result() for future in futures]
