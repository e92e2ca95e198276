"""Codecs to the byte: formats, limits, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from wan_diloco.algorithm.codec import CODEC_NAMES, Payload, codec_by_name
from wan_diloco.errors import ConfigError, DecodeError, NonFiniteError

BLOCKWISE = ["int8", "int4", "e3m0"]
F32_MAX = float(np.finfo(np.float32).max)


def bf16(value):
    return torch.tensor(value).to(torch.bfloat16).float().item()


def random_values(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def payload_of(codes, scales):
    return Payload(
        codes=np.array(codes, np.uint8), scales=torch.tensor(scales).to(torch.bfloat16).view(torch.uint8).numpy()
    )


def test_int4_writes_halves_of_the_block_and_zero_into_the_spare_half_byte(make_fragment):
    _, table = make_fragment((5,))
    payload = codec_by_name("int4").encode(torch.tensor([7.0, -7.0, 3.4, -3.6, 0.2]), table)
    # Codes 15, 1, 11, 4, 8 and a spare 8; element j lies beside element j + 3.
    assert payload.codes.tolist() == [15 | 4 << 4, 1 | 8 << 4, 11 | 8 << 4]
    assert payload.scales.tolist() == [0x80, 0x3F]


def test_int4_full_block_puts_element_j_beside_element_j_plus_64(make_fragment):
    _, table = make_fragment((128,))
    values = torch.cat([torch.full((64,), 7.0), torch.full((64,), -7.0)])
    assert codec_by_name("int4").encode(values, table).codes.tolist() == [15 | 1 << 4] * 64


def test_int8_writes_a_byte_an_element(make_fragment):
    _, table = make_fragment((4,))
    payload = codec_by_name("int8").encode(torch.tensor([127.0, -127.0, 1.4, -0.6]), table)
    assert payload.codes.tolist() == [255, 1, 129, 127]


def test_e3m0_writes_a_sign_and_the_nearest_power_of_two(make_fragment):
    _, table = make_fragment((8,))
    values = torch.tensor([1.0, -1.0, 0.76, 0.74, -0.3, 2.0**-6.4, -(2.0**-6.6), 0.0])
    codec = codec_by_name("e3m0")
    payload = codec.encode(values, table)
    assert payload.codes.tolist() == [7 | 13 << 4, 15 | 1 << 4, 7 | 0 << 4, 6 | 0 << 4]
    assert codec.decode(payload, table).tolist() == [1.0, -1.0, 1.0, 0.5, -0.25, 2.0**-6, 0.0, 0.0]


def test_bf16_rounds_to_even_and_never_to_infinity(make_fragment):
    _, table = make_fragment((4,))
    codec = codec_by_name("bf16")
    values = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, F32_MAX, -F32_MAX])
    decoded = codec.decode(codec.encode(values, table), table)
    assert decoded.tolist() == [1.0, 1.0 + 2.0**-6, (2 - 2.0**-7) * 2.0**127, -(2 - 2.0**-7) * 2.0**127]


def test_f32_keeps_every_bit(make_fragment):
    _, table = make_fragment((5,))
    values = torch.tensor([0.1, -0.0, 1e-45, F32_MAX, -1.5])
    codec = codec_by_name("f32")
    payload = codec.encode(values, table)
    assert codec.decode(payload, table).numpy().tobytes() == values.numpy().tobytes()
    payload.codes[:] = 0
    assert values[0] == torch.tensor(0.1)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integer_codecs_follow_their_formula_one_element_at_a_time(make_fragment, name):
    _, table = make_fragment((3, 200), (33,), (40, 5))
    values = random_values(table.numel)
    levels, offset = (127, 128.5) if name == "int8" else (7, 8.5)
    expected, start = [], 0
    for length in table.lengths():
        block = values[start : start + length].numpy()
        scale = np.float32(bf16(float(np.abs(block).max() / np.float32(levels))))
        inv = np.float32(1) / scale
        codes = [math.floor(np.float32(x * inv) + np.float32(offset)) for x in block]
        expected += [float(np.float32(code - int(offset)) * scale) for code in codes]
        start += length
    codec = codec_by_name(name)
    assert codec.decode(codec.encode(values, table), table).tolist() == expected


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("shape", [(1,), (31,), (33,), (4095,), (4096,), (3, 11), (3, 43), (2, 3, 50)])
def test_odd_lengths_and_partial_blocks_keep_their_length(make_fragment, name, shape):
    _, table = make_fragment(shape)
    codec = codec_by_name(name)
    values = random_values(table.numel)
    payload = codec.encode(values, table)
    sizes = codec.sizes(table)
    assert (len(payload.codes), len(payload.scales)) == (sizes.codes_bytes, sizes.scales_bytes)
    assert sizes.total_bytes == sizes.codes_bytes + sizes.scales_bytes
    decoded = codec.decode(payload, table)
    assert decoded.shape == values.shape
    assert decoded.dtype is torch.float32
    if name in {"int4", "e3m0"}:
        assert sizes.codes_bytes == sum((length + 1) // 2 for length in table.lengths())
        assert sizes.codes_bytes <= -(-table.numel // 32) * 16


@pytest.mark.parametrize("name", BLOCKWISE)
def test_the_last_blocks_scale_depends_on_its_real_elements_only(make_fragment, name):
    _, table = make_fragment((33,))
    memory = torch.full((128,), 1e9)
    memory[:33] = random_values(33)
    codec = codec_by_name(name)
    beside_garbage = codec.encode(memory[:33], table)
    alone = codec.encode(memory[:33].clone(), table)
    assert beside_garbage.scales.tolist() == alone.scales.tolist()
    assert beside_garbage.codes.tolist() == alone.codes.tolist()
    largest = codec.decode(alone, table).abs().max()
    assert largest == pytest.approx(memory[:33].abs().max(), rel=2.0**-8)


def test_bits_a_parameter_are_as_promised(make_fragment):
    _, table = make_fragment((256, 1024))
    bits = {name: 8 * codec_by_name(name).sizes(table).total_bytes / table.numel for name in CODEC_NAMES}
    assert bits == {"f32": 32, "bf16": 16, "int8": 8.125, "int4": 4.125, "e3m0": 4.125}


def test_gaussian_loss_is_what_the_formats_can_reach(make_fragment):
    _, table = make_fragment((64, 1024))
    values = random_values(table.numel)
    for name, loss in (("int8", 0.0066), ("int4", 0.118), ("e3m0", 0.194), ("bf16", 0.0018), ("f32", 0.0)):
        codec = codec_by_name(name)
        error = values - codec.decode(codec.encode(values, table), table)
        assert error.norm() <= loss * values.norm()


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 150, -1])
def test_encoding_refuses_what_is_not_finite_wherever_it_is(make_fragment, name, bad, position):
    _, table = make_fragment((3, 130))
    values = random_values(table.numel)
    values[position] = bad
    with pytest.raises(NonFiniteError) as caught:
        codec_by_name(name).encode(values, table)
    assert caught.value.reason == "non_finite"


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_decoding_refuses_a_scale_that_is_not_finite(make_fragment, name, bad):
    _, table = make_fragment((2, 128))
    codec = codec_by_name(name)
    codes = codec.encode(torch.ones(256), table).codes
    with pytest.raises(NonFiniteError):
        codec.decode(payload_of(codes, [1.0, bad]), table)


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("bad", [-1.0, 2.0**-101, 1e-45])
def test_decoding_refuses_a_scale_that_no_encoder_writes(make_fragment, name, bad):
    _, table = make_fragment((1,))
    codec = codec_by_name(name)
    codes = codec.encode(torch.ones(1), table).codes
    payload = Payload(codes=codes, scales=torch.tensor([bad]).view(torch.int16)[1:].view(torch.uint8).numpy())
    if bad == 1e-45:
        payload = Payload(codes=codes, scales=np.array([1, 0], np.uint8))
    with pytest.raises(DecodeError) as caught:
        codec.decode(payload, table)
    assert caught.value.reason == "scale_out_of_range"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_scale_with_which_a_code_would_overflow_is_refused(make_fragment, name):
    _, table = make_fragment((1,))
    with pytest.raises(DecodeError):
        codec_by_name(name).decode(payload_of([0], [1e38]), table)


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_decoding_refuses_values_that_are_not_finite(make_fragment, name):
    _, table = make_fragment((2,))
    size = codec_by_name(name).sizes(table).codes_bytes
    payload = Payload(codes=np.full(size, 255, np.uint8), scales=np.empty(0, np.uint8))
    with pytest.raises(NonFiniteError):
        codec_by_name(name).decode(payload, table)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_truncated_or_overlong_payload_is_a_typed_error(make_fragment, name):
    _, table = make_fragment((3, 43))
    codec = codec_by_name(name)
    good = codec.encode(random_values(table.numel), table)
    wrong = [
        Payload(codes=good.codes[:-1], scales=good.scales),
        Payload(codes=np.append(good.codes, good.codes[:1]), scales=good.scales),
        Payload(codes=good.codes, scales=np.append(good.scales, np.zeros(2, np.uint8))),
        Payload(codes=good.codes.reshape(1, -1), scales=good.scales),
        Payload(codes=np.empty(0, np.uint8), scales=np.empty(0, np.uint8)),
        Payload(codes=good.codes.view(np.int8), scales=good.scales),
    ]
    for payload in wrong:
        with pytest.raises(DecodeError) as caught:
            codec.decode(payload, table)
        assert caught.value.reason == "wrong_length"


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_received_bytes_are_read_only_and_decode_all_the_same(make_fragment, name):
    _, table = make_fragment((3, 130))
    codec = codec_by_name(name)
    payload = codec.encode(random_values(table.numel), table)
    received = Payload(
        codes=np.frombuffer(payload.codes.tobytes(), np.uint8), scales=np.frombuffer(payload.scales.tobytes(), np.uint8)
    )
    assert torch.equal(codec.decode(received, table), codec.decode(payload, table))


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, 1e-38, 1e-32])
def test_blocks_of_nothing_and_next_to_nothing_are_zero(make_fragment, name, tiny):
    _, table = make_fragment((2, 128))
    values = torch.full((256,), tiny)
    values[:128] = 1.0
    codec = codec_by_name(name)
    decoded = codec.decode(codec.encode(values, table), table)
    assert decoded[128:].numpy().tobytes() == bytes(512)
    assert torch.all(decoded[:128] > 0)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_the_largest_floats_stay_finite_and_nearly_as_large(make_fragment, name):
    _, table = make_fragment((128,))
    values = torch.full((128,), F32_MAX)
    values[::2] = -F32_MAX
    codec = codec_by_name(name)
    decoded = codec.decode(codec.encode(values, table), table)
    assert torch.isfinite(decoded).all()
    assert torch.equal(decoded.sign(), values.sign())
    assert decoded.abs().min() >= 0.85 * F32_MAX


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_byte_decodes_to_something_finite(make_fragment, name):
    _, table = make_fragment((512,))
    codec = codec_by_name(name)
    sizes = codec.sizes(table)
    codes = np.resize(np.arange(256, dtype=np.uint8), sizes.codes_bytes)
    if name in BLOCKWISE:
        top = torch.tensor([codec.scale_max]).to(torch.bfloat16)
        assert top.item() == codec.scale_max
        scales = top.repeat(table.num_blocks).view(torch.uint8).numpy()
        assert torch.isfinite(codec.decode(Payload(codes=codes, scales=scales), table)).all()
    else:
        with pytest.raises(NonFiniteError):
            codec.decode(Payload(codes=np.full_like(codes, 255), scales=np.empty(0, np.uint8)), table)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_codecs_do_not_depend_on_the_number_of_threads(make_fragment, name):
    _, table = make_fragment((1000, 300))
    values = random_values(table.numel)
    codec = codec_by_name(name)
    one = codec.encode(values, table)
    decoded = codec.decode(one, table)
    torch.set_num_threads(2)
    two = codec.encode(values, table)
    assert one.codes.tobytes() == two.codes.tobytes()
    assert one.scales.tobytes() == two.scales.tobytes()
    assert torch.equal(codec.decode(two, table), decoded)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_rank_with_whole_rows_writes_its_part_of_the_payload(make_fragment, name):
    _, whole = make_fragment((6, 300))
    _, part = make_fragment((2, 300))
    values = random_values(1800)
    codec = codec_by_name(name)
    parts = [codec.encode(values[600 * rank : 600 * (rank + 1)], part) for rank in range(3)]
    payload = codec.encode(values, whole)
    assert np.concatenate([each.codes for each in parts]).tobytes() == payload.codes.tobytes()
    assert np.concatenate([each.scales for each in parts]).tobytes() == payload.scales.tobytes()


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_vector_of_another_length_or_type_is_our_bug(make_fragment, name):
    _, table = make_fragment((8,))
    for wrong in (torch.zeros(9), torch.zeros(8, dtype=torch.float64), torch.zeros(8, device="meta")):
        with pytest.raises(ValueError, match="float32 vector of 8"):
            codec_by_name(name).encode(wrong, table)


def test_codecs_are_known_by_name():
    assert {name: codec_by_name(name).lossless for name in CODEC_NAMES} == {
        "f32": True,
        "bf16": False,
        "int8": False,
        "int4": False,
        "e3m0": False,
    }
    with pytest.raises(ConfigError, match="int4"):
        codec_by_name("int3")
