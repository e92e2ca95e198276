"""What codecs are given in real runs: how far a model goes from where a fragment was last taken over.

Not run by itself. The demo's data and optimizer train a larger model for a while; the delta is that of the last steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wan_diloco.algorithm.blocks import BlockTable, build_block_table
from wan_diloco.algorithm.fragments import read_fragment
from wan_diloco.config import load_config
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import open_shard
from wan_diloco.models import build_model, run_layout

if TYPE_CHECKING:
    import torch

DEMO = Path(__file__).resolve().parent.parent / "deploy" / "demo.toml"
# How long a fragment is on its own: the steps whose sum is one delta.
DELTA_STEPS = 40


def real_deltas(*, quick: bool) -> list[tuple[BlockTable, torch.Tensor]]:
    """Train; for each fragment its blocks and its delta, float32 [N].

    Args:
        quick: 0.7M parameters from step 120 on, instead of 1.8M from step 300.
    """
    dim, layers, steps_before = (128, 3, 120) if quick else (192, 4, 300)
    overrides = [f"model.dim={dim}", f"model.layers={layers}", "inner.lr=3e-3", "inner.warmup_steps=20"]
    config = load_config([DEMO], env={}, overrides=overrides).config
    layout = run_layout(config)
    replica = Replica(config, build_model(config), open_shard(config, 0))
    before: list[torch.Tensor] = []
    for step in range(steps_before + DELTA_STEPS):
        if step == steps_before:
            before = [read_fragment(fragment, replica.parameters) for fragment in layout.fragments]
        replica.step(step, global_step=step, total_steps=4 * steps_before)
    return [
        (build_block_table(fragment), base_N - read_fragment(fragment, replica.parameters))
        for fragment, base_N in zip(layout.fragments, before, strict=True)
    ]
