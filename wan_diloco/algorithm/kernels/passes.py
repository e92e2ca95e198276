"""Passes over a range of blocks: encode, decode, add, measure.

A range [low, high) counts blocks of the whole fragment; buffers may be windows of it, and `e0`, `c0`, `b0` say which
element, byte of the codes and block the windows begin with. Blocks don't depend on each other: a range may be cut
anywhere and its parts run on any threads, with the same bits. `groups` says what segments are; the last argument is a
workspace of this thread.

Legend: N elements, B blocks, C bytes of codes.
"""

from __future__ import annotations

from typing import Any

from numba import types

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.codes import (
    add_blocks,
    code_bytes,
    encode_blocks,
    find_infinite,
    find_magnitudes,
    find_scales,
)
from wan_diloco.algorithm.kernels.compiled import (
    BYTES,
    COUNT,
    FACTOR,
    HALVES,
    SEGMENTS,
    VECTOR,
    entry,
)
from wan_diloco.algorithm.kernels.groups import (
    find_segment,
    join_halves,
    load,
    place,
    store,
    sums_of_squares,
    unpack,
)
from wan_diloco.algorithm.kernels.memory import (
    as_bytes,
    as_floats,
    as_halves,
    buffer,
    make_inverses,
    make_padded,
    make_small,
)
from wan_diloco.algorithm.kernels.prefetch import NOTHING, address_of
from wan_diloco.algorithm.kernels.vectors import add_product, add_vectors, copy, subtract_vectors

__all__ = ["add", "decode", "encode", "measure"]


@entry(COUNT, COUNT, VECTOR, VECTOR, SEGMENTS, COUNT, COUNT, BYTES, HALVES, COUNT, COUNT, COUNT, VECTOR)
def encode(
    kind: int,
    values: Any,
    minus: Any,
    segments: Any,
    low: int,
    high: int,
    codes: Any,
    scales: Any,
    e0: int,
    c0: int,
    b0: int,
    work: Any,
) -> int:
    """Encode values, or values - minus where minus isn't empty.

    Returns:
        How many blocks have values that aren't finite; nothing is written for those.
    """
    values, minus, codes, scales = as_floats(values), as_floats(minus), as_bytes(codes), as_halves(scales)
    work = as_floats(work)
    t, y, inverses, padded = buffer(work, 0), buffer(work, 1), make_inverses(work), make_padded(work)
    bad, at, block = 0, 0, low
    while block < high:
        at = find_segment(segments, block, at)
        element, code, count, n = place(kind, segments, at, block, high)
        element, code, b = element - e0, code - c0, block - b0
        stop, code_stop = element + count * BLOCK, code + count * code_bytes(kind, n)
        x, packed = t, padded
        if n < BLOCK:
            load(kind, values, element, count, n, t)
            if minus.size > 0:
                load(kind, minus, element, count, n, y)
                subtract_vectors(t, y, t)
        else:
            packed = codes[code:code_stop]
            if minus.size > 0:
                subtract_vectors(values[element:stop], minus[element:stop], t)
            else:
                x = values[element:stop]
        find_magnitudes(x, count, inverses)
        worse = find_scales(kind, count, scales[b : b + count], inverses)
        bad += worse
        if worse == 0:
            following = (address_of(values, stop), address_of(minus, stop) if minus.size > 0 else NOTHING)
            encode_blocks(kind, x, count, packed, inverses, following)
        if n < BLOCK:
            copy(padded, codes[code:code_stop], code_stop - code)
        block += count
    return bad


@entry(types.void, COUNT, BYTES, HALVES, SEGMENTS, COUNT, COUNT, VECTOR, VECTOR, COUNT, COUNT, COUNT, VECTOR)
def decode(
    kind: int,
    codes: Any,
    scales: Any,
    segments: Any,
    low: int,
    high: int,
    base: Any,
    out: Any,
    e0: int,
    c0: int,
    b0: int,
    work: Any,
) -> None:
    """Decode into out: the values, or base + values where base isn't empty; base and out don't overlap."""
    codes, scales, base, out = as_bytes(codes), as_halves(scales), as_floats(base), as_floats(out)
    work = as_floats(work)
    t, y, small, padded = buffer(work, 0), buffer(work, 1), make_small(work), make_padded(work)
    at, block = 0, low
    while block < high:
        at = find_segment(segments, block, at)
        element, code, count, n = place(kind, segments, at, block, high)
        element -= e0
        unpack(kind, codes, scales, code - c0, block - b0, count, n, t, padded, small)
        stop = element + count * BLOCK
        if base.size == 0:
            store(kind, t, out, element, count, n)
        elif n < BLOCK:
            load(kind, base, element, count, n, y)
            add_vectors(y, t, t)
            store(kind, t, out, element, count, n)
        else:
            add_vectors(base[element:stop], t, out[element:stop])
        block += count


@entry(types.void, COUNT, BYTES, HALVES, SEGMENTS, COUNT, COUNT, FACTOR, VECTOR, COUNT, COUNT, COUNT, VECTOR)
def add(
    kind: int,
    codes: Any,
    scales: Any,
    segments: Any,
    low: int,
    high: int,
    weight: Any,
    out: Any,
    e0: int,
    c0: int,
    b0: int,
    work: Any,
) -> None:
    """Decode and accumulate: out += weight * values."""
    codes, scales, out, work = as_bytes(codes), as_halves(scales), as_floats(out), as_floats(work)
    t, y, small, padded = buffer(work, 0), buffer(work, 1), make_small(work), make_padded(work)
    at, block = 0, low
    while block < high:
        at = find_segment(segments, block, at)
        element, code, count, n = place(kind, segments, at, block, high)
        element, code, b = element - e0, code - c0, block - b0
        if n < BLOCK:
            unpack(kind, codes, scales, code, b, count, n, t, padded, small)
            load(kind, out, element, count, n, y)
            add_product(y, t, weight, 1)
            store(kind, y, out, element, count, n)
        else:
            following = address_of(out, element + count * BLOCK)
            packed, y_out = codes[code : code + count * code_bytes(kind, BLOCK)], out[element : element + count * BLOCK]
            add_blocks(kind, packed, scales[b : b + count], count, weight, False, y_out, t, small, following)
        block += count


@entry(COUNT, COUNT, BYTES, HALVES, SEGMENTS, COUNT, COUNT, VECTOR, COUNT, COUNT, VECTOR)
def measure(
    kind: int, codes: Any, scales: Any, segments: Any, low: int, high: int, sums: Any, c0: int, b0: int, work: Any
) -> int:
    """Sum of squares of the decoded values of each block.

    Args:
        kind: Of the codec.
        codes, scales: Windows from byte c0 and block b0.
        segments: See `groups`.
        low, high: Blocks.
        sums: float32, by block from b0.
        c0, b0: See above.

    Returns:
        How many blocks have values that aren't finite.
    """
    codes, scales, sums, work = as_bytes(codes), as_halves(scales), as_floats(sums), as_floats(work)
    t, squares, inverses = buffer(work, 0), buffer(work, 1), make_inverses(work)
    small, padded = make_small(work), make_padded(work)
    bad, at, block = 0, 0, low
    while block < high:
        at = find_segment(segments, block, at)
        _, code, count, n = place(kind, segments, at, block, high)
        unpack(kind, codes, scales, code - c0, block - b0, count, n, t, padded, small)
        find_magnitudes(t, count, inverses)
        bad += find_infinite(count, inverses)
        join_halves(kind, t, n)
        sums_of_squares(t, count, squares, sums[block - b0 : block - b0 + count])
        block += count
    return bad
