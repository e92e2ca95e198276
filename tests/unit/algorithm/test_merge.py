"""Merging: signs, weights, RDA, and what must not get in."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.merging import Delta as Contribution
from tests.support.merging import merge_fragment
from tests.support.merging import step_outer as outer_step
from wan_diloco.algorithm.codec import Payload, codec_by_name
from wan_diloco.algorithm.layout import MergeRule
from wan_diloco.algorithm.merge import blend_factor
from wan_diloco.errors import NonFiniteError

F32 = codec_by_name("f32")


def contribution(values, tokens=1, steps=1):
    return Contribution(delta=torch.as_tensor(values, dtype=torch.float32), tokens=tokens, steps=steps)


def randoms(count, numel, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [contribution(scale * torch.randn(numel, generator=generator), 100, 10) for _ in range(count)]


def test_one_learner_with_lr_one_and_no_momentum_becomes_the_global_value(make_fragment, vectors):
    case = vectors["identity"]
    fragment, table = make_fragment((1,))
    anchor, local = torch.tensor([case["anchor"]]), torch.tensor([case["local"]])
    outer_gradient = anchor - local
    assert outer_gradient.item() == pytest.approx(case["delta"], abs=1e-7)
    merged = merge_fragment(fragment, table, F32, [contribution(outer_gradient)])
    theta, _ = outer_step(anchor, torch.zeros(1), merged, lr=case["outer_lr"], momentum=case["momentum"])
    assert theta.item() == pytest.approx(case["new_global"], abs=1e-7)


def test_descending_learners_make_the_loss_fall_on_a_quadratic(make_fragment):
    fragment, table = make_fragment((8,))
    target = torch.linspace(-1, 1, 8)
    theta, momentum, losses = torch.zeros(8), torch.zeros(8), []
    for _ in range(10):
        contributions = []
        for rate in (0.1, 0.2):
            local = theta.clone()
            for _ in range(3):
                local -= rate * (local - target)
            contributions.append(contribution((theta - local), 30, 3))
        merged = merge_fragment(fragment, table, F32, contributions)
        theta, momentum = outer_step(theta, momentum, merged, lr=0.7, momentum=0.3)
        losses.append(float((theta - target).square().sum()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01 * losses[0]


def test_the_mean_is_weighted_by_tokens_squared_over_steps(make_fragment, vectors):
    case = vectors["weighted_mean"]
    fragment, table = make_fragment((1,), rule=MergeRule.MEAN)
    contributions = [
        contribution([value], tokens, steps)
        for value, tokens, steps in zip(case["deltas"], case["tokens"], case["steps"], strict=True)
    ]
    assert merge_fragment(fragment, table, F32, contributions).item() == pytest.approx(case["merged"], abs=1e-6)


def test_padding_and_numbers_of_steps_do_not_distort_the_weights(make_fragment):
    fragment, table = make_fragment((1,), rule=MergeRule.MEAN)
    merged = merge_fragment(fragment, table, F32, [contribution([1.0], 100, 50), contribution([2.0], 300, 100)])
    assert merged.item() == pytest.approx(2000 / 1100, abs=1e-6)


def test_an_absent_learner_is_not_a_zero_vector(make_fragment):
    fragment, table = make_fragment((2,), rule=MergeRule.MEAN)
    present = [contribution([2.0, 2.0]), contribution([4.0, 4.0])]
    assert merge_fragment(fragment, table, F32, present).tolist() == [3.0, 3.0]
    with_zero = merge_fragment(fragment, table, F32, [*present, contribution([0.0, 0.0])])
    assert with_zero.tolist() == pytest.approx([2.0, 2.0])
    with pytest.raises(ValueError, match="weight"):
        merge_fragment(fragment, table, F32, [])


def test_a_delta_against_the_learners_own_base_leaves_out_what_it_never_saw():
    base, local = torch.tensor([1.0]), torch.tensor([0.75])
    meanwhile = torch.tensor([-3.0])
    own_work = base - local
    assert own_work.item() == 0.25
    theta, _ = outer_step(meanwhile, torch.zeros(1), own_work, lr=1.0, momentum=0.0)
    assert theta.item() == -3.25


@pytest.mark.parametrize("rule", MergeRule)
@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4", "e3m0"])
def test_one_contribution_comes_back_to_the_bit(make_fragment, rule, name):
    fragment, table = make_fragment((3, 200), (7,), rule=rule)
    codec = codec_by_name(name)
    payload = codec.encode(torch.randn(table.numel, generator=torch.Generator().manual_seed(1)), table)
    merged = merge_fragment(fragment, table, codec, [Contribution(delta=payload, tokens=70, steps=3)])
    assert torch.equal(merged, codec.decode(payload, table))


def test_a_merge_is_in_memory_of_its_own(make_fragment):
    fragment, table = make_fragment((2,))
    only = contribution([1.0, 2.0])
    merge_fragment(fragment, table, F32, [only]).zero_()
    assert only.delta.tolist() == [1.0, 2.0]


def test_rda_of_the_published_examples(make_fragment, vectors):
    fragment, table = make_fragment((2,))
    for case in vectors["rda"]:
        # tokens = steps = w makes the weight w.
        contributions = [contribution(v, w, w) for v, w in zip(case["v"], case["w"], strict=True)]
        merged = merge_fragment(fragment, table, F32, contributions)
        assert merged.tolist() == pytest.approx(case["merged"], abs=1e-6)


def test_rda_keeps_the_common_norm_of_orthogonal_deltas_and_the_mean_does_not(make_fragment):
    eye = torch.eye(8) * 3.0
    contributions = [contribution(row, 5, 1) for row in eye]
    norms = {}
    for rule in MergeRule:
        fragment, table = make_fragment((8,), rule=rule)
        norms[rule] = merge_fragment(fragment, table, F32, contributions).norm().item()
    assert norms[MergeRule.RDA] == pytest.approx(3.0, rel=1e-6)
    assert norms[MergeRule.MEAN] == pytest.approx(3.0 / math.sqrt(8), rel=1e-6)


def test_rda_works_piece_by_piece_and_leaves_mean_pieces_alone(make_fragment):
    fragment, table = make_fragment((2, 64), (96,))
    contributions = randoms(3, table.numel)
    merged = merge_fragment(fragment, table, F32, contributions)
    for start, stop in table.piece_elements:
        part, part_table = make_fragment((stop - start,))
        alone = [contribution(each.delta[start:stop], each.tokens, each.steps) for each in contributions]
        assert torch.allclose(merged[start:stop], merge_fragment(part, part_table, F32, alone), rtol=1e-6)
    mean_fragment, _ = make_fragment((2, 64), (96,), rule=MergeRule.MEAN)
    mixed = type(fragment)(
        fragment_id=fragment.fragment_id,
        pieces=(fragment.pieces[0], mean_fragment.pieces[1]),
        numel=fragment.numel,
    )
    mixed_merge = merge_fragment(mixed, table, F32, contributions)
    assert torch.equal(mixed_merge[:128], merged[:128])
    assert torch.equal(mixed_merge[128:], merge_fragment(mean_fragment, table, F32, contributions)[128:])


def test_a_piece_of_zeros_stays_zero_and_a_zero_delta_adds_no_direction(make_fragment):
    fragment, table = make_fragment((2,))
    zero = contribution([0.0, 0.0])
    assert merge_fragment(fragment, table, F32, [zero, zero]).tolist() == [0.0, 0.0]
    merged = merge_fragment(fragment, table, F32, [contribution([0.0, 4.0]), zero])
    assert merged.tolist() == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize(
    ("deltas", "mean"),
    [
        ([[1.0, 2.0], [-1.0, -2.0]], [0.0, 0.0]),
        ([[8.0, 0.0], [-2.0, 0.0]], [3.0, 0.0]),
        ([[1e25, 0.0], [0.0, 1e25]], [5e24, 5e24]),
    ],
    ids=["opposite", "opposite directions only", "squares beyond f32"],
)
def test_where_rda_has_no_direction_the_mean_is_taken(make_fragment, deltas, mean):
    fragment, table = make_fragment((2,))
    merged = merge_fragment(fragment, table, F32, [contribution(each) for each in deltas])
    assert merged.tolist() == pytest.approx(mean, rel=1e-6)


def test_gain_is_capped_and_falls_to_the_mean_without_a_jump(make_fragment):
    fragment, table = make_fragment((2,))
    cap = 2 * math.sqrt(2)
    lengths = []
    # Two unit deltas that point apart by ever more: the mean's length is the cosine of half the angle.
    for cosine in np.linspace(0.999, 1e-4, 400):
        sine = math.sqrt(1 - cosine * cosine)
        merged = merge_fragment(fragment, table, F32, [contribution([cosine, sine]), contribution([cosine, -sine])])
        gain = merged.norm().item() / cosine
        assert gain <= cap * (1 + 1e-5)
        assert gain == pytest.approx(min(1 / cosine, cap), rel=1e-4)
        lengths.append(merged.norm().item())
    assert max(abs(left - right) for left, right in pairwise(lengths)) < 0.01
    assert lengths[0] == pytest.approx(1.0, rel=1e-5)
    assert lengths[-1] < 1e-3


def test_a_direction_made_of_rounding_does_not_set_the_way(make_fragment):
    # Directions cancel up to 1e-6 to the side while the mean stays long: the mean decides.
    fragment, table = make_fragment((2,))
    merged = merge_fragment(fragment, table, F32, [contribution([8.0, 0.0]), contribution([-2.0, 2e-6])])
    assert merged.tolist() == pytest.approx([3.0, 0.0], abs=1e-4)


def test_blend_is_all_rda_up_to_the_cap_and_continuous_there():
    cap = 2 * math.sqrt(4)
    assert blend_factor(1.0, 4) == blend_factor(cap, 4) == 1.0
    assert blend_factor(cap * (1 + 1e-9), 4) == pytest.approx(1.0, abs=1e-8)
    assert blend_factor(1e12, 4) == pytest.approx(0.0, abs=1e-11)


def test_orthogonal_learners_stay_below_the_cap():
    for count in (1, 2, 8, 64):
        assert blend_factor(math.sqrt(count), count) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rule", MergeRule)
def test_one_learners_nan_is_refused_whole_and_the_others_merge(make_fragment, rule, bad):
    fragment, table = make_fragment((2,), rule=rule)
    good = [contribution([1.0, 1.0], 10, 1), contribution([3.0, 3.0], 10, 1)]
    with pytest.raises(NonFiniteError):
        merge_fragment(fragment, table, F32, [good[0], contribution([bad, 1.0], 10, 1), good[1]])
    assert merge_fragment(fragment, table, F32, good).tolist() == pytest.approx([2.0, 2.0])


def test_a_nan_in_a_quantisation_scale_is_refused(make_fragment):
    fragment, table = make_fragment((2,))
    codec = codec_by_name("int4")
    good = codec.encode(torch.ones(2), table)
    bad = Payload(codes=good.codes, scales=np.array([0xC0, 0x7F], np.uint8))
    with pytest.raises(NonFiniteError):
        merge_fragment(fragment, table, codec, [Contribution(delta=each, tokens=1, steps=1) for each in (good, bad)])


def test_the_mean_is_rounded_after_each_product_and_each_sum(make_fragment):
    fragment, table = make_fragment((300,), rule=MergeRule.MEAN)
    contributions = randoms(3, 300)
    third = np.float32(1 / 3)
    expected = np.zeros(300, np.float32)
    for each in contributions:
        expected = expected + each.delta.numpy() * third
    assert merge_fragment(fragment, table, F32, contributions).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("rule", MergeRule)
def test_merges_do_not_depend_on_the_number_of_threads(make_fragment, rule):
    fragment, table = make_fragment((500, 300), (200, 512), (77,), rule=rule)
    contributions = randoms(3, table.numel, scale=1e-3)
    one = merge_fragment(fragment, table, F32, contributions)
    torch.set_num_threads(2)
    assert torch.equal(merge_fragment(fragment, table, F32, contributions), one)


def test_encoded_and_decoded_contributions_merge_to_the_same_bits(make_fragment):
    fragment, table = make_fragment((4, 200))
    codec = codec_by_name("int4")
    payloads = [codec.encode(each.delta, table) for each in randoms(3, table.numel)]
    encoded = [Contribution(delta=payload, tokens=5, steps=2) for payload in payloads]
    decoded = [Contribution(delta=codec.decode(payload, table), tokens=5, steps=2) for payload in payloads]
    assert torch.equal(merge_fragment(fragment, table, codec, encoded), merge_fragment(fragment, table, codec, decoded))
