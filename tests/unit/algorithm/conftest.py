"""What the tests of tensor maths share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wan_diloco.algorithm.blocks import BlockTable, build_block_table
from wan_diloco.algorithm.layout import Fragment, MergeRule, TensorSpec, build_layout

MakeFragment = Callable[..., tuple[Fragment, BlockTable]]


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    """Numbers with which every implementation of the method agrees."""
    path = Path(__file__).parents[2] / "golden" / "vectors.json"
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads; tests about threads set their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_fragment() -> MakeFragment:
    """Make one fragment, and its blocks, of tensors of the given shapes."""

    def make(*shapes: tuple[int, ...], rule: MergeRule = MergeRule.RDA) -> tuple[Fragment, BlockTable]:
        specs = [TensorSpec(name=f"t{index}", shape=shape) for index, shape in enumerate(shapes)]
        (fragment,) = build_layout(specs, num_fragments=1, merge=rule).fragments
        return fragment, build_block_table(fragment)

    return make
