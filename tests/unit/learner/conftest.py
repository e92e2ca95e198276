"""A run that is as small as one can be, and its parts in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wan_diloco.config import RunConfig, parse_config
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.moments import MomentsLayout
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.models import build_model, run_layout
from wan_diloco.training import optimizer_tensors

MakeConfig = Callable[..., RunConfig]
MakeTrainer = Callable[..., tuple[LocalTrainer, FragmentSlots]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A tiny run; keyword arguments are tables laid over it."""

    def make(**tables: dict[str, Any]) -> RunConfig:
        corpus = tmp_path / "corpus.txt"
        if not corpus.exists():
            corpus.write_text("".join(f"The {i}th day was much like the {i * i}th.\n\n" for i in range(600)))
        tree: dict[str, Any] = {
            "run": {"name": "tiny", "tokens": 32 * 2 * 40},
            "model": {"dim": 8, "layers": 1, "heads": 2, "sequence_length": 16},
            "data": {"source": f"text:{corpus}"},
            "inner": {"batch_tokens": 32, "warmup_steps": 0},
            "sync": {"fragments": 3, "period_steps": 6, "overlap_steps": 1},
            "wire": {"codec": "f32"},
            "regions": [{"name": "east"}, {"name": "west"}],
        }
        for section, table in tables.items():
            tree[section] = {**tree.get(section, {}), **table}
        return parse_config(tree)

    return make


class ConstantUnits:
    """The same few tokens in every unit, told apart by the unit's number."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        both = (torch.arange(2 * 17) * 7 + index).remainder(256).view(2, 17)
        return both[:, :-1], both[:, 1:]


@pytest.fixture
def make_trainer(make_config: MakeConfig) -> MakeTrainer:
    """A trainer with slots of its own."""

    def make(**tables: dict[str, Any]) -> tuple[LocalTrainer, FragmentSlots]:
        config = make_config(**tables)
        layout = run_layout(config)
        replica = Replica(config, build_model(config), ConstantUnits())
        state_bytes = MomentsLayout.of(optimizer_tensors(replica.optimizer, replica.model)).size_bytes
        slots = FragmentSlots.private([fragment.numel for fragment in layout.fragments], state_bytes)
        return LocalTrainer(config, replica, layout, slots), slots

    return make
