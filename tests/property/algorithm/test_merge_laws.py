"""Laws of the merge: what scaling, order and agreement among learners may and may not change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.merging import Delta as Contribution
from tests.support.merging import merge_fragment, publish
from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.layout import MergeRule, TensorSpec, build_layout
from wan_diloco.algorithm.weights import contribution_weight, normalised

F32 = codec_by_name("f32")
counts = st.tuples(st.integers(1, 10**9), st.integers(1, 10**4))


@st.composite
def merges(draw):
    """A fragment of one or two pieces, and up to five contributions of random direction and length."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 150)), min_size=1, max_size=2))
    rule = draw(st.sampled_from(MergeRule))
    specs = [TensorSpec(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes)]
    (fragment,) = build_layout(specs, num_fragments=1, merge=rule).fragments
    table = build_block_table(fragment)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    contributions = [
        Contribution(delta=length * torch.randn(table.numel, generator=generator), tokens=tokens, steps=steps)
        for length, (tokens, steps) in draw(
            st.lists(st.tuples(st.sampled_from([1.0, 0.1, 0.0]), counts), min_size=1, max_size=5)
        )
    ]
    return fragment, table, contributions


def plain_mean(contributions):
    weights = normalised([contribution_weight(each.tokens, each.steps) for each in contributions])
    return sum(weight * each.delta.double() for weight, each in zip(weights, contributions, strict=True))


@given(st.lists(counts, min_size=1, max_size=8), st.integers(1, 1000))
def test_weights_sum_to_one_and_do_not_change_when_all_tokens_scale(pairs, factor):
    weights = normalised([contribution_weight(*pair) for pair in pairs])
    assert math.fsum(weights) == pytest.approx(1.0, abs=1e-12)
    scaled = normalised([contribution_weight(tokens * factor, steps) for tokens, steps in pairs])
    assert scaled == pytest.approx(weights, rel=1e-9)
    longer = normalised([contribution_weight(tokens * factor, steps * factor) for tokens, steps in pairs])
    assert longer == pytest.approx(weights, rel=1e-9)


@given(merges(), st.integers(-20, 20))
def test_scaling_all_deltas_scales_the_merge_to_the_bit(case, exponent):
    fragment, table, contributions = case
    scaled = [
        Contribution(delta=each.delta * 2.0**exponent, tokens=each.tokens, steps=each.steps) for each in contributions
    ]
    merged = merge_fragment(fragment, table, F32, contributions)
    assert torch.equal(merge_fragment(fragment, table, F32, scaled), merged * 2.0**exponent)


@given(merges(), st.integers(1, 1000))
def test_scaling_all_token_counts_hardly_changes_the_merge(case, factor):
    fragment, table, contributions = case
    more = [Contribution(delta=each.delta, tokens=each.tokens * factor, steps=each.steps) for each in contributions]
    merged = merge_fragment(fragment, table, F32, contributions)
    assert torch.allclose(merge_fragment(fragment, table, F32, more), merged, rtol=1e-4, atol=1e-5)


@given(merges())
def test_learners_that_agree_get_what_they_agree_on(case):
    fragment, table, contributions = case
    delta = contributions[0].delta
    same = [Contribution(delta=delta, tokens=each.tokens, steps=each.steps) for each in contributions]
    assert torch.allclose(merge_fragment(fragment, table, F32, same), delta, rtol=1e-5, atol=1e-7)


@given(merges())
def test_the_merge_never_exceeds_the_capped_mean_and_never_falls_below_the_mean(case):
    fragment, table, contributions = case
    merged = merge_fragment(fragment, table, F32, contributions)
    mean = plain_mean(contributions)
    cap = 2 * math.sqrt(len(contributions))
    for start, stop in table.piece_elements:
        length, mean_length = (float(each[start:stop].double().norm()) for each in (merged, mean))
        assert length <= cap * mean_length * (1 + 1e-4) + 1e-30
        if fragment.pieces[0].rule is MergeRule.MEAN:
            assert torch.allclose(merged[start:stop].double(), mean[start:stop], rtol=1e-4, atol=1e-6)


@given(merges())
def test_turning_all_deltas_around_turns_the_merge_around(case):
    fragment, table, contributions = case
    flipped = [Contribution(delta=-each.delta, tokens=each.tokens, steps=each.steps) for each in contributions]
    merged = merge_fragment(fragment, table, F32, contributions)
    assert torch.equal(merge_fragment(fragment, table, F32, flipped), -merged)


@given(merges(), st.sampled_from(["bf16", "int8", "int4", "e3m0"]))
def test_published_value_follows_the_exact_one_within_one_updates_error(case, name):
    fragment, table, contributions = case
    codec = codec_by_name(name)
    exact = published = torch.zeros(table.numel)
    merged = merge_fragment(fragment, table, F32, contributions)
    for _ in range(4):
        exact = exact - merged
        before = (exact - published).abs().max()
        _, published = publish(exact, published, codec, table)
        assert (exact - published).abs().max() <= 0.3 * before + 1e-6 * exact.abs().max()
