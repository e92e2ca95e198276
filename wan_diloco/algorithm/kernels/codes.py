"""Whole blocks to codes and back; `codec.blockwise` has the formulas, and the same in torch.

Everything here works on some blocks of 128 at once. Every decoded value is exact in f32: a small integer, or a power of
two, times a scale of 8 bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.bitcasts import bits_of, float_of
from wan_diloco.algorithm.kernels.compiled import f32, i8, i32, inner, u8, u16
from wan_diloco.algorithm.kernels.prefetch import prefetch_block, prefetch_two
from wan_diloco.algorithm.kernels.vectors import add_product, fill

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
    "find_magnitudes",
    "find_scales",
    "publish_int4",
]

# What kernels call the codecs.
F32: Final = 0
BF16: Final = 1
INT8: Final = 2
INT4: Final = 3
E3M0: Final = 4

# Blocks that are worked on together: a division for each would keep the next block waiting, and what passes of a group
# hand to each other must stay in the first caches.
GROUP: Final = 16
_HALF: Final = BLOCK // 2
_MAGNITUDE: Final = i32(0x7FFFFFFF)
_INFINITE: Final = i32(0x7F800000)
_BF16_MAX: Final = f32((2.0 - 2.0**-7) * 2.0**127)
_SCALE_MIN: Final = f32(2.0**-100)
_ROUND_HALF: Final = i32(0x7FFF)
_UPPER_HALF: Final = i32(-0x10000)
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
def _rounded_scale(largest: Any, scale_max: Any) -> Any:
    """Rounded to bf16, within bounds."""
    word = bits_of(largest)
    scale = float_of(i32(i32(i32(word + _ROUND_HALF) + i32(i32(word >> _SIXTEEN) & _ONE)) & _UPPER_HALF))
    scale = min(scale, scale_max)
    return scale if scale >= _SCALE_MIN else f32(0)


@inner
def _scale_of(half: Any) -> Any:
    """The f32 of a bf16."""
    return float_of(i32(i32(half) << _SIXTEEN))


@inner
def _find(count: int, divisor: Any, scale_max: Any, scales: Any, inverses: Any) -> int:
    bad = 0
    for block in range(count):
        magnitude = inverses[block]
        finite = bits_of(magnitude) < _INFINITE
        scale = _rounded_scale(magnitude / divisor, scale_max) if finite else f32(0)
        scales[block] = u16(i32(bits_of(scale) >> _SIXTEEN))
        inverse = f32(1) / scale if scale > f32(0) else f32(0)
        inverses[block] = inverse if finite else f32(np.nan)
        bad += 0 if finite else 1
    return bad


@inner
def find_magnitudes(x: Any, count: int, inverses: Any) -> None:
    """Largest magnitude of each block, to where `find_scales` takes it from."""
    for block in range(count):
        y, largest = x[block * BLOCK : (block + 1) * BLOCK], i32(0)
        for j in range(BLOCK):
            # The bits of magnitudes are in their order; NaN is above infinity, and that above all numbers.
            largest = max(largest, i32(bits_of(y[j]) & _MAGNITUDE))
        inverses[block] = float_of(largest)


@inner
def find_infinite(count: int, inverses: Any) -> int:
    """How many blocks have values that aren't finite; their inverse becomes NaN, that of others 0.

    Args:
        count: Blocks.
        inverses: As `find_magnitudes` left them.
    """
    bad = 0
    for block in range(count):
        infinite = bits_of(inverses[block]) >= _INFINITE
        bad += 1 if infinite else 0
        inverses[block] = f32(np.nan) if infinite else f32(0)
    return bad


@inner
def find_scales(kind: int, count: int, scales: Any, inverses: Any) -> int:
    """Scale of each block, and 1 / scale; for all before anything is encoded, so that divisions overlap.

    Args:
        kind: Of the codec.
        count: Blocks.
        scales: uint16, where they go; without meaning for codecs that have none.
        inverses: float32 [>= count], as `find_magnitudes` left them; 1 / scale comes there.

    Returns:
        How many blocks have values that aren't finite; their scale is 0, and their inverse NaN.
    """
    if kind == INT4:
        return _find(count, f32(7), _BF16_MAX / f32(8), scales, inverses)
    if kind == INT8:
        return _find(count, f32(127), _BF16_MAX / f32(128), scales, inverses)
    if kind == E3M0:
        return _find(count, f32(1), _BF16_MAX, scales, inverses)
    return find_infinite(count, inverses)


@inner
def _int4_code(value: Any) -> Any:
    return min(max(i32(value + f32(8.5)), i32(1)), i32(15))


@inner
def _encode_int4(t: Any, count: int, codes: Any, inverses: Any, following: Any) -> None:
    for block in range(count):
        prefetch_two(following, block)
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        inverse = inverses[block]
        for j in range(_HALF):
            low, high = _int4_code(x[j] * inverse), _int4_code(x[_HALF + j] * inverse)
            out[j] = u8(i32(low | i32(high << i32(4))))


@inner
def _encode_int8(t: Any, count: int, codes: Any, inverses: Any, following: Any) -> None:
    for block in range(count):
        prefetch_two(following, block)
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[block * BLOCK : (block + 1) * BLOCK]
        inverse = inverses[block]
        for j in range(BLOCK):
            out[j] = u8(min(max(i32(x[j] * inverse + f32(128.5)), i32(1)), i32(255)))


@inner
def _e3m0_code(value: Any, inverse: Any) -> Any:
    """The level whose power is nearest by ratio, and the sign of what isn't zero."""
    ratio = abs(value) * inverse
    least = i32(1) if ratio >= _ZERO_BELOW else i32(0)
    level = max(min(i32(i32(bits_of(ratio * _FOUR_THIRDS) >> _MANTISSA) - _LEVEL_BIAS), _LEVEL_MAX), least)
    sign = i32(i32(bits_of(value) >> i32(28)) & i32(8))
    return i32(level | sign) if level > i32(0) else i32(0)


@inner
def _encode_e3m0(t: Any, count: int, codes: Any, inverses: Any, following: Any) -> None:
    for block in range(count):
        prefetch_two(following, block)
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        inverse = inverses[block]
        for j in range(_HALF):
            low, high = _e3m0_code(x[j], inverse), _e3m0_code(x[_HALF + j], inverse)
            out[j] = u8(i32(low | i32(high << i32(4))))


@inner
def _encode_bf16(t: Any, count: int, codes: Any) -> None:
    for j in range(count * BLOCK):
        word = bits_of(min(max(t[j], -_BF16_MAX), _BF16_MAX))
        even = i32(i32(word >> _SIXTEEN) & _ONE)
        rounded = i32(i32(i32(word + _ROUND_HALF) + even) >> _SIXTEEN)
        codes[2 * j] = u8(rounded)
        codes[2 * j + 1] = u8(i32(rounded >> i32(8)))


@inner
def _encode_f32(t: Any, count: int, codes: Any) -> None:
    for j in range(count * BLOCK):
        word = bits_of(t[j])
        for byte in range(4):
            codes[4 * j + byte] = u8(i32(word >> i32(8 * byte)))


@inner
def encode_blocks(kind: int, x: Any, count: int, codes: Any, inverses: Any, following: Any) -> None:
    """Codes of values that are all finite, after `find_scales`.

    Args:
        kind: Of the codec.
        x: float32 [>= count * 128].
        count: Blocks.
        codes: uint8, where they go.
        inverses: As `find_scales` left them.
        following: Two addresses of as many blocks that will be needed next.
    """
    if kind == INT4:
        _encode_int4(x, count, codes, inverses, following)
    elif kind == INT8:
        _encode_int8(x, count, codes, inverses, following)
    elif kind == E3M0:
        _encode_e3m0(x, count, codes, inverses, following)
    elif kind == BF16:
        _encode_bf16(x, count, codes)
    else:
        _encode_f32(x, count, codes)


@inner
def _unpack_int4(codes: Any, count: int, small: Any) -> None:
    """Codes less 8, as bytes: 32 to a vector; as wider integers it would take four times as long."""
    for block in range(count):
        x, packed = small[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        for j in range(_HALF):
            x[j] = i8((packed[j] & u8(15)) - u8(8))
            x[_HALF + j] = i8((packed[j] >> u8(4)) - u8(8))


@inner
def _decode_int4(codes: Any, scales: Any, count: int, t: Any, small: Any) -> None:
    _unpack_int4(codes, count, small)
    for block in range(count):
        x, y = t[block * BLOCK : (block + 1) * BLOCK], small[block * BLOCK : (block + 1) * BLOCK]
        scale = _scale_of(scales[block])
        for j in range(BLOCK):
            x[j] = f32(y[j]) * scale


@inner
def _decode_int8(codes: Any, scales: Any, count: int, t: Any) -> None:
    for block in range(count):
        x, packed = t[block * BLOCK : (block + 1) * BLOCK], codes[block * BLOCK : (block + 1) * BLOCK]
        scale = _scale_of(scales[block])
        for j in range(BLOCK):
            x[j] = f32(i32(i32(packed[j]) - i32(128))) * scale


@inner
def _power(code: Any) -> Any:
    """A float +-2^(level - 7), or zero."""
    level = i32(code & _LEVEL_MAX)
    power = i32(i32(i32(level + _LEVEL_BIAS) << _MANTISSA) | i32(i32(code & i32(8)) << i32(28)))
    return float_of(power if level > i32(0) else i32(0))


@inner
def _decode_e3m0(codes: Any, scales: Any, count: int, t: Any) -> None:
    for block in range(count):
        x, packed = t[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        scale = _scale_of(scales[block])
        for j in range(_HALF):
            code = i32(packed[j])
            x[j] = _power(i32(code & i32(15))) * scale
            x[_HALF + j] = _power(i32(code >> i32(4))) * scale


@inner
def _decode_bf16(codes: Any, count: int, t: Any) -> None:
    for j in range(count * BLOCK):
        t[j] = float_of(i32(i32(i32(codes[2 * j]) << _SIXTEEN) | i32(i32(codes[2 * j + 1]) << i32(24))))


@inner
def _decode_f32(codes: Any, count: int, t: Any) -> None:
    for j in range(count * BLOCK):
        word = i32(0)
        for byte in range(4):
            word = i32(word | i32(i32(codes[4 * j + byte]) << i32(8 * byte)))
        t[j] = float_of(word)


@inner
def decode_blocks(kind: int, codes: Any, scales: Any, count: int, t: Any, small: Any) -> None:
    """Values of blocks, exactly: what the codes say, whoever wrote them.

    Args:
        kind: Of the codec.
        codes, scales: uint8 and uint16, of these blocks.
        count: Blocks.
        t: float32 [>= count * 128], where they go.
        small: int8 [>= count * 128], to work in.
    """
    if kind == INT4:
        _decode_int4(codes, scales, count, t, small)
    elif kind == INT8:
        _decode_int8(codes, scales, count, t)
    elif kind == E3M0:
        _decode_e3m0(codes, scales, count, t)
    elif kind == BF16:
        _decode_bf16(codes, count, t)
    else:
        _decode_f32(codes, count, t)


@inner
def _add_int4(
    codes: Any, scales: Any, count: int, weight: Any, fresh: bool, d: Any, small: Any, following: int
) -> None:
    _unpack_int4(codes, count, small)
    for block in range(count):
        prefetch_block(following, block)
        x, y = d[block * BLOCK : (block + 1) * BLOCK], small[block * BLOCK : (block + 1) * BLOCK]
        scale = _scale_of(scales[block])
        if fresh:
            for j in range(BLOCK):
                x[j] = f32(0) + f32(y[j]) * scale * weight
        else:
            for j in range(BLOCK):
                x[j] += f32(y[j]) * scale * weight


@inner
def publish_int4(t: Any, count: int, codes: Any, scales: Any, published: Any, inverses: Any) -> None:
    """`encode_blocks` and `add_blocks` with weight 1 in one: each code is added while it is in a register."""
    for block in range(count):
        x, out = t[block * BLOCK : (block + 1) * BLOCK], codes[block * _HALF : (block + 1) * _HALF]
        y, inverse = published[block * BLOCK : (block + 1) * BLOCK], inverses[block]
        scale = _scale_of(scales[block])
        for j in range(_HALF):
            low, high = _int4_code(x[j] * inverse), _int4_code(x[_HALF + j] * inverse)
            out[j] = u8(i32(low | i32(high << i32(4))))
            y[j] += f32(i32(low - i32(8))) * scale
            y[_HALF + j] += f32(i32(high - i32(8))) * scale


@inner
def add_blocks(
    kind: int,
    codes: Any,
    scales: Any,
    count: int,
    weight: Any,
    fresh: bool,
    d: Any,
    t: Any,
    small: Any,
    following: int,
) -> None:
    """Add weight * values to d: for the default codec in one pass, for others through t, which is as long as d.

    `fresh` says that d is zero, whatever it holds; `following` is the address of blocks that will be needed next.
    """
    if kind == INT4:
        _add_int4(codes, scales, count, weight, fresh, d, small, following)
        return
    decode_blocks(kind, codes, scales, count, t, small)
    if fresh:
        fill(d, 0, count * BLOCK)
    add_product(d, t, weight, count)
