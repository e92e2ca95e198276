"""Merges as tests look at them: the merged delta alone, out of the code that the syncer runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan_diloco.algorithm.blocks import BlockTable
from wan_diloco.algorithm.codec import Codec, Payload, codec_by_name
from wan_diloco.algorithm.layout import Fragment
from wan_diloco.algorithm.merge import Contribution, FragmentTensors, inspect_payload, merge_and_publish

__all__ = ["Delta", "as_contribution", "merge_fragment", "publish", "step_outer", "zero_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
    """A contribution as a payload, or as float32 [N], which is written in f32."""

    delta: Payload | torch.Tensor
    tokens: int
    steps: int


def zero_tensors(numel: int) -> FragmentTensors:
    """A fragment at its very beginning."""
    return FragmentTensors(exact_N=torch.zeros(numel), momentum_N=torch.zeros(numel), published_N=torch.zeros(numel))


def as_contribution(fragment: Fragment, table: BlockTable, codec: Codec, each: Delta) -> Contribution:
    """What a syncer makes of it when it comes in."""
    payload = each.delta if isinstance(each.delta, Payload) else codec.encode(each.delta, table)
    codec.check(payload, table)
    source = payload.source()
    norms = inspect_payload(fragment, table, codec, source)
    return Contribution(source=source, tokens=each.tokens, steps=each.steps, norms=norms)


def merge_fragment(fragment: Fragment, table: BlockTable, codec: Codec, contributions: Sequence[Delta]) -> torch.Tensor:
    """The merged delta: what an outer step of rate 1 without momentum takes from zero."""
    tensors = zero_tensors(table.numel)
    taken = [as_contribution(fragment, table, codec, each) for each in contributions]
    merge_and_publish(fragment, table, codec, taken, tensors, lr=1.0, momentum=0.0)
    return tensors.momentum_N


def step_outer(
    theta_N: torch.Tensor, momentum_N: torch.Tensor, delta_N: torch.Tensor, *, lr: float, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """An outer step with a delta: the new value and the new momentum."""
    from wan_diloco.algorithm.blocks import build_block_table
    from wan_diloco.algorithm.layout import MergeRule, TensorSpec, build_layout

    spec = TensorSpec(name="t", shape=tuple(delta_N.shape))
    (fragment,) = build_layout([spec], num_fragments=1, merge=MergeRule.MEAN).fragments
    table, codec = build_block_table(fragment), codec_by_name("f32")
    tensors = FragmentTensors(
        exact_N=theta_N.clone(), momentum_N=momentum_N.clone(), published_N=torch.zeros_like(theta_N)
    )
    taken = [as_contribution(fragment, table, codec, Delta(delta=delta_N, tokens=1, steps=1))]
    merge_and_publish(fragment, table, codec, taken, tensors, lr=lr, momentum=momentum)
    return tensors.exact_N, tensors.momentum_N


def publish(
    exact_N: torch.Tensor, published_N: torch.Tensor, codec: Codec, table: BlockTable
) -> tuple[Payload, torch.Tensor]:
    """Publish a value as it is: a step with a delta of zero."""
    from wan_diloco.algorithm.layout import Fragment, MergeRule, Piece

    pieces = tuple(
        Piece(tensor=f"t{index}", start=0, stop=stop - start, row_length=stop - start, rule=MergeRule.MEAN)
        for index, (start, stop) in enumerate(table.piece_elements)
    )
    fragment = Fragment(fragment_id=0, pieces=pieces, numel=table.numel)
    tensors = FragmentTensors(
        exact_N=exact_N.clone(), momentum_N=torch.zeros(table.numel), published_N=published_N.clone()
    )
    taken = [as_contribution(fragment, table, codec, Delta(delta=torch.zeros(table.numel), tokens=1, steps=1))]
    payload, _ = merge_and_publish(fragment, table, codec, taken, tensors, lr=1.0, momentum=0.0)
    return payload, tensors.published_N
