"""Whole blocks to codes and back; `codec.blockwise` has the formulas, and the same in torch.

Everything here works on some blocks of 128 at once that stand in `t` as f32; `bits` is the same memory as int32. A
loop touches it as the one or as the other: in a loop that does both, LLVM must keep each element's order, and uses no
vectors. Every decoded value is exact in f32: a small integer, or a power of two, times a scale of 8 bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.compiled import f32, i8, i32, inner, u8, u16
from wan_diloco.algorithm.kernels.vectors import add_product

__all__ = [
    "BF16",
    "E3M0",
    "F32",
    "GROUP",
    "INT4",
    "INT8",
    "add_blocks",
    "block_bytes",
    "code_bytes",
    "decode_blocks",
    "encode_blocks",
    "find_infinite",
    "find_scales",
    "publish_int4",
]

# What kernels call the codecs.
F32: Final = 0
BF16: Final = 1
INT8: Final = 2
INT4: Final = 3
E3M0: Final = 4

# Blocks that are worked on together. Each pass over a group costs some hundred nanoseconds beside the work; five
# buffers of so many still leave the second cache room.
GROUP: Final = 64
_HALF: Final = BLOCK // 2
_MAGNITUDE: Final = i32(0x7FFFFFFF)
_INFINITE: Final = i32(0x7F800000)
_BF16_MAX: Final = f32((2.0 - 2.0**-7) * 2.0**127)
_SCALE_MIN: Final = f32(2.0**-100)
_ROUND_HALF: Final = i32(0x7FFF)
_ONE: Final = i32(1)
_SIXTEEN: Final = i32(16)
_MANTISSA: Final = i32(23)
_FOUR_THIRDS: Final = f32(4 / 3)
_ZERO_BELOW: Final = f32(2.0**-6.5)
# A level's exponent, biased as in a float: 2^(level - 7).
_LEVEL_BIAS: Final = i32(120)
_LEVEL_MAX: Final = i32(7)


def block_bytes(kind: int, n: int) -> int:
    """Bytes of the codes of a block of n; `code_bytes` is the same for kernels."""
    if kind == INT4 or kind == E3M0:
        return (n + 1) // 2
    if kind == INT8:
        return n
    return 2 * n if kind == BF16 else 4 * n


code_bytes = inner(block_bytes)


@inner
def _absmax_bits(bits: Any) -> Any:
    """Bits of the largest magnitude, NaN above infinity above all numbers."""
    largest = i32(0)
    for j in range(BLOCK):
        largest = max(largest, bits[j] & _MAGNITUDE)
    return largest


@inner
def _rounded_scale(largest: Any, scale_max: Any, one: Any, one_bits: Any) -> Any:
    """Rounded to bf16, within bounds."""
    one[0] = largest
    rounded = (one_bits[0] + _ROUND_HALF + ((one_bits[0] >> _SIXTEEN) & _ONE)) >> _SIXTEEN
    one_bits[0] = rounded << _SIXTEEN
    one[0] = min(one[0], scale_max)
    if one[0] < _SCALE_MIN:
        one[0] = f32(0)
    return one[0]


@inner
def _as_float(word: Any, one: Any, one_bits: Any) -> Any:
    one_bits[0] = word
    return one[0]


@inner
def _find(bits: Any, count: int, divisor: Any, scale_max: Any, scales: Any, tools: Any) -> int:
    one, one_bits, inverses = tools[0], tools[1], tools[2]
    bad = 0
    for block in range(count):
        magnitude = _absmax_bits(bits[block * BLOCK : (block + 1) * BLOCK])
        if magnitude >= _INFINITE:
            bad += 1
            scales[block] = u16(0)
            inverses[block] = f32(np.nan)
            continue
        scale = _rounded_scale(_as_float(magnitude, one, one_bits) / divisor, scale_max, one, one_bits)
        scales[block] = u16(one_bits[0] >> _SIXTEEN)
        inverses[block] = f32(1) / scale if scale > f32(0) else f32(0)
    return bad


@inner
def find_infinite(bits: Any, count: int, tools: Any) -> int:
    """How many blocks have values that aren't finite; their inverse among the tools is NaN, that of others 0."""
    inverses = tools[2]
    bad = 0
    for block in range(count):
        infinite = _absmax_bits(bits[block * BLOCK : (block + 1) * BLOCK]) >= _INFINITE
        bad += 1 if infinite else 0
        inverses[block] = f32(np.nan) if infinite else f32(0)
    return bad


@inner
def find_scales(kind: int, bits: Any, count: int, scales: Any, tools: Any) -> int:
    """Scale of each block, and 1 / scale among the tools; before anything is encoded, so that divisions overlap.

    Args:
        kind: Of the codec.
        bits: int32 [>= count * 128], of the values.
        count: Blocks.
        scales: uint16, where they go; without meaning for codecs that have none.
        tools: As `memory.make_tools` makes them.

    Returns:
        How many blocks have values that aren't finite; their scale is 0, and their inverse NaN.
    """
    if kind == INT4:
        return _find(bits, count, f32(7), _BF16_MAX / f32(8), scales, tools)
    if kind == INT8:
        return _find(bits, count, f32(127), _BF16_MAX / f32(128), scales, tools)
    if kind == E3M0:
        return _find(bits, count, f32(1), _BF16_MAX, scales, tools)
    return find_infinite(bits, count, tools)


@inner
def _encode_int4(t: Any, count: int, codes: Any, tools: Any) -> None:
    inverses = tools[2]
    for block in range(count):
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        inverse = inverses[block]
        for j in range(_HALF):
            low = min(max(i32(x[j] * inverse + f32(8.5)), i32(1)), i32(15))
            high = min(max(i32(x[_HALF + j] * inverse + f32(8.5)), i32(1)), i32(15))
            out[j] = u8(i32(low | i32(high << i32(4))))


@inner
def _encode_int8(t: Any, count: int, codes: Any, tools: Any) -> None:
    inverses = tools[2]
    for block in range(count):
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[block * BLOCK : (block + 1) * BLOCK]
        inverse = inverses[block]
        for j in range(BLOCK):
            out[j] = u8(min(max(i32(x[j] * inverse + f32(128.5)), i32(1)), i32(255)))


@inner
def _encode_e3m0(t: Any, work: Any, word: Any, spare: Any, count: int, codes: Any, tools: Any) -> None:
    inverses = tools[2]
    for block in range(count):
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        inverse = inverses[block]
        for j in range(BLOCK):
            ratio = abs(x[j]) * inverse
            low = i32(1) if ratio >= _ZERO_BELOW else i32(0)
            spare[j] = i32(low | (i32(8) if x[j] < f32(0) else i32(0)))
            work[j] = ratio * _FOUR_THIRDS
        for j in range(BLOCK):
            flags = spare[j]
            exponent = i32(i32(word[j] >> _MANTISSA) - _LEVEL_BIAS)
            level = max(min(exponent, _LEVEL_MAX), i32(flags & _ONE))
            spare[j] = i32(level | (i32(flags & i32(8)) if level > i32(0) else i32(0)))
        for j in range(_HALF):
            out[j] = u8(i32(spare[j] | i32(spare[_HALF + j] << i32(4))))


@inner
def _encode_bf16(t: Any, work: Any, word: Any, count: int, codes: Any) -> None:
    for block in range(count):
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[2 * block * BLOCK : 2 * (block + 1) * BLOCK]
        for j in range(BLOCK):
            work[j] = min(max(x[j], -_BF16_MAX), _BF16_MAX)
        for j in range(BLOCK):
            even = i32(i32(word[j] >> _SIXTEEN) & _ONE)
            rounded = i32(i32(i32(word[j] + _ROUND_HALF) + even) >> _SIXTEEN)
            out[2 * j] = u8(rounded)
            out[2 * j + 1] = u8(i32(rounded >> i32(8)))


@inner
def _encode_f32(bits: Any, count: int, codes: Any) -> None:
    for j in range(count * BLOCK):
        for byte in range(4):
            codes[4 * j + byte] = u8(i32(bits[j] >> i32(8 * byte)))


@inner
def encode_blocks(
    kind: int, t: Any, bits: Any, work: Any, word: Any, spare: Any, count: int, codes: Any, tools: Any
) -> None:
    """Codes of what stands in t, all of it finite, after `find_scales`.

    Args:
        kind: Of the codec.
        t: float32 [>= count * 128].
        bits: The same memory as int32.
        work: float32 [128], to work in.
        word: The same memory as int32.
        spare: int32 [128], to work in.
        count: Blocks.
        codes: uint8, where they go.
        tools: As `find_scales` left them.
    """
    if kind == INT4:
        _encode_int4(t, count, codes, tools)
    elif kind == INT8:
        _encode_int8(t, count, codes, tools)
    elif kind == E3M0:
        _encode_e3m0(t, work, word, spare, count, codes, tools)
    elif kind == BF16:
        _encode_bf16(t, work, word, count, codes)
    else:
        _encode_f32(bits, count, codes)


@inner
def _unpack_int4(codes: Any, count: int, small: Any) -> None:
    """Codes less 8, as bytes: 32 to a vector; as wider integers it would take four times as long."""
    for block in range(count):
        x, packed = small[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        for j in range(_HALF):
            x[j] = i8((packed[j] & u8(15)) - u8(8))
            x[_HALF + j] = i8((packed[j] >> u8(4)) - u8(8))


@inner
def _decode_int4(codes: Any, scales: Any, count: int, t: Any, tools: Any) -> None:
    small = tools[3]
    _unpack_int4(codes, count, small)
    for block in range(count):
        x, y = t[block * BLOCK : (block + 1) * BLOCK], small[block * BLOCK : (block + 1) * BLOCK]
        scale = _as_float(i32(scales[block]) << _SIXTEEN, tools[0], tools[1])
        for j in range(BLOCK):
            x[j] = f32(y[j]) * scale


@inner
def _decode_int8(codes: Any, scales: Any, count: int, t: Any, tools: Any) -> None:
    for block in range(count):
        x, packed = t[block * BLOCK : (block + 1) * BLOCK], codes[block * BLOCK : (block + 1) * BLOCK]
        scale = _as_float(i32(scales[block]) << _SIXTEEN, tools[0], tools[1])
        for j in range(BLOCK):
            x[j] = f32(i32(i32(packed[j]) - i32(128))) * scale


@inner
def _power(code: Any) -> Any:
    """Bits of +-2^(level - 7), or of zero."""
    level = i32(code & _LEVEL_MAX)
    power = i32(i32(i32(level + _LEVEL_BIAS) << _MANTISSA) | i32(i32(code & i32(8)) << i32(28)))
    return power if level > i32(0) else i32(0)


@inner
def _decode_e3m0(codes: Any, scales: Any, count: int, t: Any, bits: Any, tools: Any) -> None:
    for block in range(count):
        x, y = t[block * BLOCK : (block + 1) * BLOCK], bits[block * BLOCK : (block + 1) * BLOCK]
        packed = codes[block * _HALF : (block + 1) * _HALF]
        scale = _as_float(i32(scales[block]) << _SIXTEEN, tools[0], tools[1])
        for j in range(_HALF):
            code = i32(packed[j])
            y[j] = _power(i32(code & i32(15)))
            y[_HALF + j] = _power(i32(code >> i32(4)))
        for j in range(BLOCK):
            x[j] *= scale


@inner
def _decode_bf16(codes: Any, count: int, bits: Any) -> None:
    for j in range(count * BLOCK):
        bits[j] = i32(i32(i32(codes[2 * j]) << _SIXTEEN) | i32(i32(codes[2 * j + 1]) << i32(24)))


@inner
def _decode_f32(codes: Any, count: int, bits: Any) -> None:
    for j in range(count * BLOCK):
        word = i32(0)
        for byte in range(4):
            word |= i32(codes[4 * j + byte]) << i32(8 * byte)
        bits[j] = word


@inner
def decode_blocks(kind: int, codes: Any, scales: Any, count: int, t: Any, bits: Any, tools: Any) -> None:
    """Values of blocks, exactly: what the codes say, whoever wrote them.

    Args:
        kind: Of the codec.
        codes, scales: uint8 and uint16, of these blocks.
        count: Blocks.
        t: float32 [>= count * 128], where they go.
        bits: The same memory as int32.
        tools: As `memory.make_tools` makes them.
    """
    if kind == INT4:
        _decode_int4(codes, scales, count, t, tools)
    elif kind == INT8:
        _decode_int8(codes, scales, count, t, tools)
    elif kind == E3M0:
        _decode_e3m0(codes, scales, count, t, bits, tools)
    elif kind == BF16:
        _decode_bf16(codes, count, bits)
    else:
        _decode_f32(codes, count, bits)


@inner
def _add_int4(codes: Any, scales: Any, count: int, weight: Any, d: Any, tools: Any) -> None:
    small = tools[3]
    _unpack_int4(codes, count, small)
    for block in range(count):
        x, y = d[block * BLOCK : (block + 1) * BLOCK], small[block * BLOCK : (block + 1) * BLOCK]
        scale = _as_float(i32(scales[block]) << _SIXTEEN, tools[0], tools[1])
        for j in range(BLOCK):
            x[j] += f32(y[j]) * scale * weight


@inner
def publish_int4(d: Any, count: int, codes: Any, scales: Any, published: Any, tools: Any) -> None:
    """`encode_blocks` and `add_blocks` with weight 1 in one: each code is added while it is in a register."""
    inverses = tools[2]
    for block in range(count):
        x, out = d[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        y, inverse = published[block * BLOCK : (block + 1) * BLOCK], inverses[block]
        scale = _as_float(i32(scales[block]) << _SIXTEEN, tools[0], tools[1])
        for j in range(_HALF):
            low = min(max(i32(x[j] * inverse + f32(8.5)), i32(1)), i32(15))
            high = min(max(i32(x[_HALF + j] * inverse + f32(8.5)), i32(1)), i32(15))
            out[j] = u8(i32(low | i32(high << i32(4))))
            y[j] += f32(i32(low - i32(8))) * scale
            y[_HALF + j] += f32(i32(high - i32(8))) * scale


@inner
def add_blocks(
    kind: int, codes: Any, scales: Any, count: int, weight: Any, d: Any, t: Any, bits: Any, tools: Any
) -> None:
    """Add weight * values to d: for the default codec in one pass, for others through t, which is as long as d."""
    if kind == INT4:
        _add_int4(codes, scales, count, weight, d, tools)
        return
    decode_blocks(kind, codes, scales, count, t, bits, tools)
    add_product(d, t, weight, count)
