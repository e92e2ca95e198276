"""Laws of layouts: nothing lost, nothing twice, nothing empty, balanced."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_diloco.algorithm.blocks import BLOCK, FLAT_BELOW, build_block_table
from wan_diloco.algorithm.fragments import read_fragment, write_fragment
from wan_diloco.algorithm.layout import MergeRule, TensorSpec, build_layout

shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 300)),
        st.tuples(st.integers(1, 40), st.integers(1, 140)),
        st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=8,
)
names = st.sampled_from(["layers.{}.w", "embed.{}.w"])
models = st.builds(
    lambda shapes_, name: [TensorSpec(name=name.format(i), shape=shape) for i, shape in enumerate(shapes_)],
    shapes,
    names,
)
layouts = st.builds(
    lambda specs, parts, rule: build_layout(specs, num_fragments=parts, merge=rule),
    models,
    st.integers(1, 30),
    st.sampled_from(MergeRule),
)


@given(layouts)
def test_every_element_is_in_exactly_one_fragment_and_none_is_empty(layout):
    tensors = {spec.name: torch.zeros(spec.shape) for spec in layout.tensors}
    for fragment in layout.fragments:
        assert fragment.numel > 0
        write_fragment(fragment, tensors, read_fragment(fragment, tensors) + 1.0)
    assert all(bool((tensor == 1.0).all()) for tensor in tensors.values())
    assert sum(fragment.numel for fragment in layout.fragments) == layout.num_parameters
    assert [fragment.fragment_id for fragment in layout.fragments] == list(range(layout.num_fragments))


@given(models, st.integers(1, 12), st.sampled_from(MergeRule), st.randoms(use_true_random=False))
def test_the_order_of_the_tensors_changes_nothing(specs, parts, rule, rng):
    shuffled = list(specs)
    rng.shuffle(shuffled)
    one = build_layout(specs, num_fragments=parts, merge=rule)
    assert build_layout(shuffled, num_fragments=parts, merge=rule).lines() == one.lines()


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=7), st.integers(2, 3))
def test_where_no_tensor_dominates_the_fullest_fragment_is_within_four_thirds_of_the_best(sizes, parts):
    if len(sizes) < parts or 3 * max(sizes) * parts > 4 * sum(sizes):
        return
    specs = [TensorSpec(name=f"layers.{i}", shape=(size,)) for i, size in enumerate(sizes)]
    layout = build_layout(specs, num_fragments=parts, merge=MergeRule.RDA)
    best = min(
        max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == part) for part in range(parts))
        for owners in product(range(parts), repeat=len(sizes))
    )
    assert 3 * max(fragment.numel for fragment in layout.fragments) <= 4 * best


@given(
    st.lists(st.tuples(st.integers(64, 400), st.sampled_from([16, 64, 128])), min_size=1, max_size=6),
    st.integers(2, 24),
    st.sampled_from(MergeRule),
)
def test_large_matrices_make_fragments_of_nearly_one_size(matrix_shapes, parts, rule):
    specs = [TensorSpec(name=f"layers.{i}.w", shape=shape) for i, shape in enumerate(matrix_shapes)]
    total = sum(spec.numel for spec in specs)
    if any(3 * spec.numel * parts <= 4 * total for spec in specs):
        return
    layout = build_layout(specs, num_fragments=parts, merge=rule)
    assert layout.num_fragments == parts
    # One row of slack for what can't be cut finer.
    row = max(shape[1] for shape in matrix_shapes)
    assert max(fragment.numel for fragment in layout.fragments) <= 4 / 3 * total / parts + row


@given(layouts)
def test_blocks_cover_each_fragment_and_never_cross_a_piece_or_a_long_row(layout):
    for fragment in layout.fragments:
        table = build_block_table(fragment)
        lengths = table.lengths()
        assert (len(lengths), sum(lengths)) == (table.num_blocks, fragment.numel)
        assert min(lengths) >= 1
        assert max(lengths) <= BLOCK
        starts = {sum(lengths[:block]) for block in range(len(lengths))}
        offset = 0
        for piece, (start, stop), (first, last) in zip(
            fragment.pieces, table.piece_elements, table.piece_blocks, strict=True
        ):
            assert (start, stop) == (offset, offset + piece.numel)
            assert sum(lengths[first:last]) == piece.numel
            row = piece.numel if piece.row_length < FLAT_BELOW else piece.row_length
            assert starts >= set(range(start, stop, row))
            offset = stop
