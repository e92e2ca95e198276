"""Copies between tensors and flat fragments."""

from __future__ import annotations

import pytest
import torch

from wan_diloco.algorithm.fragments import read_fragment, write_fragment
from wan_diloco.algorithm.layout import MergeRule, TensorSpec, build_layout
from wan_diloco.errors import LayoutMismatch


@pytest.fixture
def layout():
    specs = [
        TensorSpec(name="matrix", shape=(6, 4)),
        TensorSpec(name="vector", shape=(5,)),
        TensorSpec(name="scalar", shape=()),
        TensorSpec(name="conv", shape=(8, 2, 3), dtype="bfloat16"),
    ]
    return build_layout(specs, num_fragments=3, merge=MergeRule.MEAN)


@pytest.fixture
def tensors():
    return {
        # Transposed: its elements aren't in memory in the order of its rows.
        "matrix": torch.arange(24.0).view(4, 6).t(),
        "vector": torch.nn.Parameter(torch.arange(5.0)),
        "scalar": torch.tensor(7.0),
        "conv": torch.arange(48).view(8, 2, 3).to(torch.bfloat16),
    }


def test_every_element_is_read_exactly_once(layout, tensors):
    flat = torch.cat([read_fragment(fragment, tensors) for fragment in layout.fragments])
    everything = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors.values()])
    assert flat.dtype is torch.float32
    assert torch.equal(flat.sort().values, everything.sort().values)


def test_writing_what_was_read_changes_nothing_and_adding_changes_everything_once(layout, tensors):
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for fragment in layout.fragments:
        write_fragment(fragment, tensors, read_fragment(fragment, tensors))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    for fragment in layout.fragments:
        write_fragment(fragment, tensors, read_fragment(fragment, tensors) + 1.0)
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in tensors.items())
    assert pointers == {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_reading_can_reuse_memory(layout, tensors):
    fragment = layout.fragments[0]
    out_N = torch.full((fragment.numel,), float("nan"))
    assert read_fragment(fragment, tensors, out_N) is out_N
    assert torch.equal(out_N, read_fragment(fragment, tensors))


def test_a_flat_vector_of_another_size_or_type_is_our_bug(layout, tensors):
    fragment = layout.fragments[0]
    for wrong in (torch.zeros(fragment.numel + 1), torch.zeros(fragment.numel, dtype=torch.float64)):
        with pytest.raises(ValueError, match="float32 vector"):
            write_fragment(fragment, tensors, wrong)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("conv"), "unknown_tensor"),
        (lambda tensors: tensors.update(conv=torch.zeros(8, 3)), "wrong_shape"),
        (lambda tensors: tensors.update(conv=torch.zeros(1, 2, 3)), "wrong_shape"),
    ],
    ids=["missing", "other rows", "too few rows"],
)
def test_a_missing_or_misshapen_tensor_is_an_error_and_nothing_is_written(layout, tensors, change, reason):
    change(tensors)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    reasons = []
    for fragment in layout.fragments:
        if any(piece.tensor == "conv" for piece in fragment.pieces):
            try:
                write_fragment(fragment, tensors, torch.full((fragment.numel,), 99.0))
            except LayoutMismatch as error:
                reasons.append(error.reason)
    assert set(reasons) == {reason}
    if reason == "unknown_tensor":
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
