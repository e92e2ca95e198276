"""The kernels against the plain reference in torch: the same bits, however the work is cut."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.reference import plain
from tests.support.merging import Delta, as_contribution
from wan_diloco.algorithm.blocks import block_sums_of_squares, build_block_table
from wan_diloco.algorithm.codec import CODEC_NAMES, Payload, codec_by_name
from wan_diloco.algorithm.codec.base import as_halves
from wan_diloco.algorithm.kernels import passes
from wan_diloco.algorithm.kernels.memory import workspace
from wan_diloco.algorithm.kernels.segments import BlockMap
from wan_diloco.algorithm.layout import MergeRule, TensorSpec, build_layout
from wan_diloco.algorithm.merge import FragmentTensors, merge_and_publish
from wan_diloco.errors import NonFiniteError

# Whole blocks, short ones of even and odd length, rows of several, flat tensors, scalars.
SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 5), st.sampled_from([1, 31, 32, 127, 128, 129, 256, 300, 383])),
        st.tuples(st.integers(1, 400)),
    ),
    min_size=1,
    max_size=3,
)
MAGNITUDES = st.sampled_from([1.0, 1e-20, 1e-31, 1e20, 3e37])


def make_case(shapes, seed, magnitude, *, mean_too=False):
    specs = [TensorSpec(name=f"t{i}" if i or not mean_too else "embed", shape=shape) for i, shape in enumerate(shapes)]
    (fragment,) = build_layout(specs, num_fragments=1, merge=MergeRule.RDA).fragments
    table = build_block_table(fragment)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(table.numel, generator=generator) * magnitude
    # Rows differ, some values are zero, and some lie at the very edge.
    values *= torch.exp(3 * torch.randn(1 + table.numel // 128, generator=generator)).repeat_interleave(128)[
        : table.numel
    ]
    values[torch.rand(table.numel, generator=generator) < 0.1] = 0.0
    return fragment, table, values.clamp(-3.4e38, 3.4e38)


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(shapes=SHAPES, seed=st.integers(0, 2**31), magnitude=MAGNITUDES)
def test_encoding_and_decoding_equal_the_reference(name, shapes, seed, magnitude):
    _, table, values = make_case(shapes, seed, magnitude)
    codec = codec_by_name(name)
    payload, expected = codec.encode(values, table), codec.encode_on_device(values, table)
    assert payload.codes.tobytes() == expected.codes.tobytes()
    assert payload.scales.tobytes() == expected.scales.tobytes()
    decoded = plain.decode(expected, codec, table)
    assert codec.decode(payload, table).numpy().tobytes() == decoded.numpy().tobytes()
    base = torch.randn(table.numel, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(codec.decode(payload, table, base), base + decoded)


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "bf16"])
@given(shapes=SHAPES, seed=st.integers(0, 2**31), data=st.data())
def test_bytes_that_no_encoder_writes_decode_as_the_reference_says(name, shapes, seed, data):
    _, table, _ = make_case(shapes, seed, 1.0)
    codec, rng = codec_by_name(name), np.random.default_rng(seed)
    sizes = codec.sizes(table)
    codes = rng.integers(0, 256, sizes.codes_bytes, dtype=np.uint8)
    scales = codec.encode(torch.rand(table.numel), table).scales
    payload = Payload(codes=codes, scales=scales)
    expected = plain.decode(payload, codec, table)
    if not bool(torch.isfinite(expected).all()):
        with pytest.raises(NonFiniteError):
            codec.decode(payload, table)
        return
    assert codec.decode(payload, table).numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(shapes=SHAPES, seed=st.integers(0, 2**31), data=st.data())
def test_what_is_not_finite_is_found_wherever_it_is(name, shapes, seed, data):
    """Kernels look at bits: no assumption that floats are finite can make this check disappear."""
    _, table, values = make_case(shapes, seed, 1.0)
    values[data.draw(st.integers(0, table.numel - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    for encode in (codec_by_name(name).encode, codec_by_name(name).encode_on_device):
        with pytest.raises(NonFiniteError):
            encode(values, table)


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(shapes=SHAPES, seed=st.integers(0, 2**31), cuts=st.lists(st.integers(1, 20), max_size=4))
def test_blocks_can_be_done_in_any_parts(name, shapes, seed, cuts):
    """Windows of the buffers, as tiles and threads use them, give the bytes of the whole."""
    _, table, values = make_case(shapes, seed, 1.0)
    minus = torch.randn(table.numel, generator=torch.Generator().manual_seed(seed + 1))
    codec = codec_by_name(name)
    blocks = BlockMap(codec.kind, table)
    whole = codec.encode(values, table, minus)
    assert whole.codes.tobytes() == codec.encode_on_device(values - minus, table).codes.tobytes()
    edges = sorted({0, table.num_blocks, *(cut for cut in cuts if cut < table.num_blocks)})
    sums = block_sums_of_squares(plain.decode(whole, codec, table), table)
    total = torch.zeros(table.numel)
    for low, high in itertools.pairwise(edges):
        codes = np.empty(blocks.code(high) - blocks.code(low), np.uint8)
        scales = np.empty(2 * (high - low) if whole.scales.size else 0, np.uint8)
        codec.encode_range(values, table, blocks, low, high, codes, scales, minus)
        assert codes.tobytes() == whole.codes[blocks.code(low) : blocks.code(high)].tobytes()
        assert scales.tobytes() == whole.scales[2 * low : 2 * high].tobytes()
        found = np.empty(high - low, np.float32)
        place = (blocks.segments, low, high)
        passes.measure(codec.kind, codes, as_halves(scales), *place, found, blocks.code(low), low, workspace())
        assert found.tobytes() == sums[low:high].tobytes()
        weight = np.float32(0.3)
        passes.add(
            codec.kind, codes, as_halves(scales), *place, weight, total.numpy(), 0, blocks.code(low), low, workspace()
        )
    assert torch.equal(total, 0.0 + plain.decode(whole, codec, table) * float(weight))


@st.composite
def merges(draw):
    shapes = draw(SHAPES)
    num = draw(st.integers(1, 5))
    seeds = draw(st.lists(st.integers(0, 2**20), min_size=num, max_size=num))
    # Alike, so that RDA blends towards the mean; opposite, so that it is degenerate; or apart.
    likeness = draw(st.sampled_from([0.0, 0.999, -1.0]))
    tokens = draw(st.lists(st.integers(1, 1000), min_size=num, max_size=num))
    return shapes, seeds, likeness, tokens, draw(st.sampled_from([0.0, 0.6])), draw(st.sampled_from([1.0, 0.7]))


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(case=merges(), threads=st.sampled_from([1, 3]), mean_too=st.booleans())
@example(case=([(3, 300)], [1, 1], -1.0, [5, 5], 0.6, 0.7), threads=1, mean_too=False)
def test_merge_step_and_publication_equal_the_reference(name, case, threads, mean_too):
    shapes, seeds, likeness, tokens, momentum, lr = case
    fragment, table, first = make_case(shapes, seeds[0], 1.0, mean_too=mean_too)
    codec = codec_by_name(name)
    deltas = [first]
    for seed in seeds[1:]:
        own = torch.randn(table.numel, generator=torch.Generator().manual_seed(seed))
        deltas.append(likeness * first + (1 - abs(likeness)) * own)
    payloads = [codec.encode(delta, table) for delta in deltas]
    expected = plain.merge(
        fragment,
        table,
        [
            plain.PlainContribution(delta=plain.decode(payload, codec, table), tokens=count, steps=3)
            for payload, count in zip(payloads, tokens, strict=True)
        ],
    )
    generator = torch.Generator().manual_seed(seeds[0])
    exact, old_momentum, published = (torch.randn(table.numel, generator=generator) for _ in range(3))
    exact_after, momentum_after = plain.outer_step(exact, old_momentum, expected, lr=lr, momentum=momentum)
    update, published_after = plain.publish(exact_after, published, codec, table)

    tensors = FragmentTensors(exact_N=exact.clone(), momentum_N=old_momentum.clone(), published_N=published.clone())
    taken = [
        as_contribution(fragment, table, codec, Delta(delta=payload, tokens=count, steps=3))
        for payload, count in zip(payloads, tokens, strict=True)
    ]
    with ThreadPoolExecutor(threads) as pool:
        result, unstepped = merge_and_publish(
            fragment,
            table,
            codec,
            taken,
            tensors,
            lr=lr,
            momentum=momentum,
            threads=pool if threads > 1 else None,
            num_threads=threads,
        )
    assert unstepped == 0
    assert tensors.exact_N.numpy().tobytes() == exact_after.numpy().tobytes()
    assert tensors.momentum_N.numpy().tobytes() == momentum_after.numpy().tobytes()
    assert tensors.published_N.numpy().tobytes() == published_after.numpy().tobytes()
    assert result.codes.tobytes() == update.codes.tobytes()
    assert result.scales.tobytes() == update.scales.tobytes()
