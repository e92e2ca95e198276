"""Laws of the codecs, over shapes and magnitudes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import CODEC_NAMES, Payload, codec_by_name
from wan_diloco.algorithm.layout import MergeRule, TensorSpec, build_layout
from wan_diloco.errors import DecodeError, NonFiniteError

BLOCKWISE = ("int8", "int4", "e3m0")
# Largest error of one element, in units of its block's largest magnitude; 2^-8 is for the scale's rounding.
BOUNDS = {"f32": 0.0, "bf16": 2.0**-8, "int8": 0.5 / 127 + 2.0**-8, "int4": 0.5 / 7 + 2.0**-8, "e3m0": 0.25 + 2.0**-7}


@st.composite
def fragments(draw):
    """A block table, and values that differ in magnitude from row to row, far from the smallest scale."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 300)), min_size=1, max_size=3))
    specs = [TensorSpec(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes)]
    (fragment,) = build_layout(specs, num_fragments=1, merge=MergeRule.RDA).fragments
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    parts = []
    for rows, length in shapes:
        exponents = torch.tensor(draw(st.lists(st.integers(-30, 30), min_size=rows, max_size=rows)))
        values = torch.randn(rows, length, generator=generator)
        kept = torch.rand(rows, length, generator=generator) < draw(st.sampled_from([1.0, 0.5, 0.02]))
        parts.append((torch.ldexp(values, exponents.unsqueeze(1)) * kept).reshape(-1))
    return build_block_table(fragment), torch.cat(parts)


def blocks(values, table):
    return torch.split(values, table.lengths())


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(case=fragments())
def test_round_trip_keeps_length_and_stays_within_the_bound_of_each_block(name, case):
    table, values = case
    codec = codec_by_name(name)
    payload = codec.encode(values, table)
    sizes = codec.sizes(table)
    assert (payload.codes.shape, payload.scales.shape) == ((sizes.codes_bytes,), (sizes.scales_bytes,))
    decoded = codec.decode(payload, table)
    assert decoded.shape == values.shape
    for before, after in zip(blocks(values, table), blocks(decoded, table), strict=True):
        assert (before - after).abs().max() <= BOUNDS[name] * before.abs().max()
        assert bool((before * after >= 0).all())


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(case=fragments())
def test_encoding_what_was_decoded_gives_the_same_bytes(name, case):
    table, values = case
    codec = codec_by_name(name)
    once = codec.encode(values, table)
    twice = codec.encode(codec.decode(once, table), table)
    assert once.codes.tobytes() == twice.codes.tobytes()
    assert once.scales.tobytes() == twice.scales.tobytes()


@pytest.mark.parametrize("name", BLOCKWISE)
@given(case=fragments(), exponent=st.integers(-20, 20))
def test_scaling_by_a_power_of_two_moves_the_scales_and_no_code(name, case, exponent):
    table, values = case
    codec = codec_by_name(name)
    payload, scaled = codec.encode(values, table), codec.encode(values * 2.0**exponent, table)
    assert payload.codes.tobytes() == scaled.codes.tobytes()
    assert torch.equal(codec.decode(scaled, table), codec.decode(payload, table) * 2.0**exponent)


@pytest.mark.parametrize("name", BLOCKWISE)
@given(case=fragments(), exponent=st.integers(-20, 20), data=st.data())
def test_scaling_one_block_leaves_the_others_as_they_were(name, case, exponent, data):
    table, values = case
    codec = codec_by_name(name)
    chosen = data.draw(st.integers(0, table.num_blocks - 1))
    before = blocks(codec.decode(codec.encode(values, table), table), table)
    changed = values.clone()
    blocks(changed, table)[chosen].mul_(2.0**exponent)
    after = blocks(codec.decode(codec.encode(changed, table), table), table)
    for index, (left, right) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(left * 2.0**exponent if index == chosen else left, right)


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(case=fragments())
def test_codes_of_the_opposite_decode_to_the_opposite(name, case):
    # Except where a value lies exactly between two codes: rounding is upwards, not to even.
    table, values = case
    codec = codec_by_name(name)
    decoded = codec.decode(codec.encode(values, table), table)
    mirrored = -codec.decode(codec.encode(-values, table), table)
    for left, right, original in zip(*(blocks(each, table) for each in (decoded, mirrored, values)), strict=True):
        differs = left != right
        assert bool((left[differs].abs() < original.abs().max()).all())
        assert (left - right).abs().max() <= 2 * BOUNDS[name] * original.abs().max()


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(data=st.data())
def test_any_bytes_decode_to_finite_values_or_a_typed_error(name, data):
    specs = [TensorSpec(name="t", shape=(2, data.draw(st.integers(1, 140))))]
    (fragment,) = build_layout(specs, num_fragments=1, merge=MergeRule.RDA).fragments
    table = build_block_table(fragment)
    codec = codec_by_name(name)
    sizes = codec.sizes(table)
    slack = data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    codes = data.draw(st.binary(min_size=max(0, sizes.codes_bytes + slack), max_size=max(0, sizes.codes_bytes + slack)))
    scales = data.draw(st.binary(min_size=sizes.scales_bytes, max_size=sizes.scales_bytes))
    payload = Payload(codes=np.frombuffer(codes, np.uint8), scales=np.frombuffer(scales, np.uint8))
    try:
        decoded = codec.decode(payload, table)
    except (DecodeError, NonFiniteError):
        return
    assert slack == 0
    assert bool(torch.isfinite(decoded).all())
