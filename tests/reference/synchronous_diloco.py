"""Synchronous DiLoCo on one machine, in a page: what a lockstep run must equal to the bit.

Nothing here is asynchronous, sent, encoded or journalled: M models take the same number of steps, and whenever
a fragment is due its deltas are merged and everybody continues from the new value. The maths is written out
in plain torch, apart from `wan_diloco.algorithm`; only data, model, inner step and the fragment map are shared.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch

from wan_diloco.algorithm.layout import Layout, MergeRule, Piece
from wan_diloco.algorithm.parameters import unique_parameters
from wan_diloco.config import RunConfig
from wan_diloco.data import BatchReader
from wan_diloco.models import Decoder
from wan_diloco.training import build_adamw, learning_rate, set_learning_rate, train_step


def f32(value: float) -> float:
    """Round a scalar to single precision."""
    return float(np.float32(value))


def length(vector: torch.Tensor, piece: Piece) -> float:
    """Norm of a piece: squares in f32, blocks of 128 summed by halves, blocks summed in f64, row by row."""
    rows = vector.view(-1, piece.row_length if piece.row_length >= 32 else piece.numel)
    total = np.float64(0.0)
    for row in rows:
        for block in row.split(128):
            squares = torch.zeros(128)
            squares[: block.numel()] = block * block
            while squares.numel() > 1:
                half = squares.numel() // 2
                squares = squares[:half] + squares[half:]
            total = total + np.float64(squares.item())
    return float(np.sqrt(total))


def merge(deltas: list[torch.Tensor], weights: list[float], piece: Piece) -> torch.Tensor:
    """Weighted mean, or radial-directional average, of one piece."""
    mean = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        mean = mean + delta * f32(weight)
    if piece.rule is MergeRule.MEAN:
        return mean
    radius, direction = 0.0, torch.zeros_like(mean)
    for delta, weight in zip(deltas, weights, strict=True):
        norm = length(delta, piece)
        radius += weight * norm
        if norm > 0:
            direction = direction + delta * f32(weight / norm)
    short, straight = length(mean, piece), length(direction, piece)
    if short == 0 or straight < 1e-12:
        return mean
    gain, cap = max(radius / short, 1 / straight), 2 * math.sqrt(len(deltas))
    blend = 1.0 if gain <= cap else (cap - 1) / (gain - 1)
    rda = direction * f32(blend * radius / straight)
    return rda if blend == 1.0 else rda + mean * f32(1 - blend)


def synchronous_diloco(
    config: RunConfig, model: Decoder, layout: Layout, shards: list[BatchReader]
) -> dict[str, torch.Tensor]:
    """Train, and return the published model.

    Args:
        config: The run: inner and outer settings, period, total steps.
        model: With the initial weights.
        layout: The fragment map.
        shards: One a learner; unit s is the batch of step s.
    """
    inner, outer, period = config.inner, config.outer, config.sync.period_steps
    published = {name: value.detach().clone() for name, value in unique_parameters(model)}
    momenta = {name: torch.zeros_like(value) for name, value in published.items()}
    learners = [copy.deepcopy(model) for _ in shards]
    optimizers = [
        build_adamw(
            learner,
            learning_rate=inner.lr,
            weight_decay=inner.weight_decay,
            beta1=inner.beta1,
            beta2=inner.beta2,
            eps=inner.eps,
        )
        for learner in learners
    ]
    tensors = [dict(unique_parameters(learner)) for learner in learners]
    weight = [1.0 / len(shards)] * len(shards)  # equal batches and steps: tokens^2 / steps is the same for all
    for step in range(1, config.total_steps + 1):
        rate = learning_rate(
            step - 1,
            peak=inner.lr,
            warmup_steps=inner.warmup_steps,
            total_steps=config.total_steps,
            final_fraction=inner.final_lr_fraction,
        )
        for learner, optimizer, shard in zip(learners, optimizers, shards, strict=True):
            set_learning_rate(optimizer, rate)
            train_step(learner, optimizer, [shard.batch(step - 1)], clip_norm=inner.clip_norm)
        for fragment in layout.fragments:
            if (step - fragment.fragment_id * period // layout.num_fragments) % period:
                continue
            warm = step >= outer.momentum_warmup_steps
            mu = f32(outer.momentum if warm else outer.momentum * step / outer.momentum_warmup_steps)
            for piece in fragment.pieces:
                part = slice(piece.start, piece.stop)
                value, momentum = published[piece.tensor].view(-1)[part], momenta[piece.tensor].view(-1)[part]
                locals_ = [parameters[piece.tensor].detach().view(-1)[part] for parameters in tensors]
                merged = merge([value - local for local in locals_], weight, piece)
                momentum.copy_(momentum * mu + merged)
                value.copy_(value - (merged + momentum * mu) * f32(outer.lr))
                for local in locals_:
                    local.copy_(value)
    return published
