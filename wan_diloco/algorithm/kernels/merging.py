"""Passes of a merge over a range of blocks: many payloads into one value, its outer step, and its publication.

Ranges are those of `passes`, segments those of `groups`; `algorithm.merge` has the formulas.

Legend: N elements, B blocks, C bytes of codes, M contributions.
"""

from __future__ import annotations

from typing import Any

from numba import types

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.codes import (
    F32,
    INT4,
    add_blocks,
    code_bytes,
    decode_blocks,
    encode_blocks,
    find_magnitudes,
    find_scales,
    publish_int4,
)
from wan_diloco.algorithm.kernels.compiled import (
    BYTES,
    COUNT,
    HALVES,
    MATRIX_BYTES,
    MATRIX_HALVES,
    PAIR,
    SEGMENTS,
    STATE,
    VECTOR,
    entry,
    f32,
    inner,
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
    make_short,
    make_small,
)
from wan_diloco.algorithm.kernels.prefetch import NOTHING
from wan_diloco.algorithm.kernels.vectors import add_product, add_vectors, copy, fill

__all__ = ["merge_and_publish", "merged_sums"]


@entry(
    types.void,
    COUNT,
    MATRIX_BYTES,
    MATRIX_HALVES,
    VECTOR,
    VECTOR,
    SEGMENTS,
    COUNT,
    COUNT,
    VECTOR,
    VECTOR,
    COUNT,
    VECTOR,
)
def merged_sums(
    kind: int,
    codes: Any,
    scales: Any,
    weights: Any,
    directions: Any,
    segments: Any,
    low: int,
    high: int,
    mean_sums: Any,
    direction_sums: Any,
    s0: int,
    work: Any,
) -> None:
    """What RDA must know before it can begin: sums of squares of the mean and of the direction, block by block.

    Nothing else is kept: decoding everything once more is quicker than to write two vectors and to read them again.

    Args:
        kind: Of the codec.
        codes, scales: uint8 [M, C], uint16 [M, B].
        weights: float32 [M].
        directions: float32 [M], weight over norm; 0 for a contribution without direction.
        segments: See `groups`.
        low, high: Blocks.
        mean_sums, direction_sums: float32, by block.
        s0: The block with which the sums begin.
        work: The thread's workspace.
    """
    codes, scales = as_bytes(codes), as_halves(scales)
    weights, directions = as_floats(weights), as_floats(directions)
    mean_sums, direction_sums, work = as_floats(mean_sums), as_floats(direction_sums), as_floats(work)
    t, d, turned = buffer(work, 0), buffer(work, 1), buffer(work, 2)
    small, padded = make_small(work), make_padded(work)
    at, block = 0, low
    while block < high:
        at = find_segment(segments, block, at)
        _, code, count, n = place(kind, segments, at, block, high)
        fill(d, 0, count * BLOCK)
        fill(turned, 0, count * BLOCK)
        for m in range(weights.size):
            unpack(kind, codes[m], scales[m], code, block, count, n, t, padded, small)
            add_product(d, t, weights[m], count)
            if directions[m] != f32(0):
                add_product(turned, t, directions[m], count)
        join_halves(kind, d, n)
        join_halves(kind, turned, n)
        s = block - s0
        sums_of_squares(d, count, t, mean_sums[s : s + count])
        sums_of_squares(turned, count, t, direction_sums[s : s + count])
        block += count


@inner
def _merge(
    kind: int,
    codes: Any,
    scales: Any,
    weights: Any,
    code: int,
    block: int,
    count: int,
    n: int,
    d: Any,
    t: Any,
    padded: Any,
    small: Any,
) -> None:
    """A weighted sum into d, in the order of the contributions; those without weight are left out."""
    fresh = True
    for m in range(weights.size):
        if weights[m] == f32(0):
            continue
        if n < BLOCK:
            unpack(kind, codes[m], scales[m], code, block, count, n, t, padded, small)
            if fresh:
                fill(d, 0, BLOCK)
            add_product(d, t, weights[m], 1)
        else:
            packed = codes[m, code : code + count * code_bytes(kind, BLOCK)]
            add_blocks(kind, packed, scales[m, block : block + count], count, weights[m], fresh, d, t, small, NOTHING)
        fresh = False
    if fresh:
        fill(d, 0, count * BLOCK)


@inner
def _outer_step(kind: int, d: Any, state: Any, before: Any, mu: Any, eta: Any, t: Any) -> None:
    """The outer step with d, in place; what is then to be published comes into t; `outer` has the formula.

    What exact value and momentum were is kept in `before`. One loop over the whole group, since LLVM looks before each
    loop whether any of its arrays overlap, for seven of them as long as a block takes.
    """
    exact, momentum, published = state
    exact_before, momentum_before = before
    for j in range(exact.size):
        # All are read before any is written: they often lie at the same place of a page, where processors take a read
        # for one of what was just written, and wait.
        x, y, z, step = exact[j], momentum[j], published[j], d[j]
        new_y = y * mu + step
        new_x = x - (step + new_y * mu) * eta
        exact[j], momentum[j] = new_x, new_y
        exact_before[j], momentum_before[j] = x, y
        t[j] = new_x if kind == F32 else new_x - z


@inner
def _take_back(kind: int, state: Any, before: Any, t: Any, inverses: Any) -> None:
    """Have blocks that would not be finite as they were before; what is published says so."""
    exact, momentum, published = state
    for block in range(exact.size // BLOCK):
        if inverses[block] == inverses[block]:
            continue
        start, stop = block * BLOCK, (block + 1) * BLOCK
        inverses[block] = f32(0)
        copy(before[0][start:stop], exact[start:stop], BLOCK)
        copy(before[1][start:stop], momentum[start:stop], BLOCK)
        if kind == F32:
            copy(published[start:stop], t[start:stop], BLOCK)
        else:
            fill(t, start, stop)


@inner
def _merge_group(
    kind: int,
    codes: Any,
    scales: Any,
    factors: Any,
    code: int,
    block: int,
    count: int,
    n: int,
    d: Any,
    mean: Any,
    t: Any,
    padded: Any,
    small: Any,
) -> None:
    """The merged delta of a group, into d."""
    weights, directions, blend = factors
    if weights.size == 1:
        # One contribution comes out to the bit, also a negative zero.
        unpack(kind, codes[0], scales[0], code, block, count, n, d, padded, small)
        return
    if directions.size == 0:
        _merge(kind, codes, scales, weights, code, block, count, n, d, t, padded, small)
        return
    _merge(kind, codes, scales, directions, code, block, count, n, d, t, padded, small)
    for j in range(count * BLOCK):
        d[j] *= blend[1]
    if blend[0] != f32(0):
        _merge(kind, codes, scales, weights, code, block, count, n, mean, t, padded, small)
        add_product(d, mean, blend[0], count)


@inner
def _publish(
    kind: int, t: Any, count: int, packed: Any, halves: Any, published: Any, d: Any, inverses: Any, small: Any
) -> None:
    """Encode t, and add what that decodes to, to the published value; d is lost."""
    if kind == INT4:
        publish_int4(t, count, packed, halves, published, inverses)
        return
    encode_blocks(kind, t, count, packed, inverses, (NOTHING, NOTHING))
    decode_blocks(kind, packed, halves, count, d, small)
    if kind == F32:
        copy(d, published, published.size)
    else:
        add_vectors(published, d, published)


@entry(
    COUNT,
    COUNT,
    MATRIX_BYTES,
    MATRIX_HALVES,
    VECTOR,
    VECTOR,
    PAIR,
    SEGMENTS,
    COUNT,
    COUNT,
    STATE,
    PAIR,
    BYTES,
    HALVES,
    VECTOR,
)
def merge_and_publish(
    kind: int,
    codes: Any,
    scales: Any,
    weights: Any,
    directions: Any,
    blend: Any,
    segments: Any,
    low: int,
    high: int,
    state: Any,
    rule: Any,
    new_codes: Any,
    new_scales: Any,
    work: Any,
) -> int:
    """Merge, take the outer step, and publish, in one pass over everything; values change in place.

    Args:
        kind: Of the codec.
        codes, scales: uint8 [M, C], uint16 [M, B].
        weights: float32 [M].
        directions: float32 [M], see `merged_sums`; empty for the plain mean.
        blend: Factors of mean and direction.
        segments: See `groups`.
        low, high: Blocks.
        state: Exact value, momentum, published value; float32 [N] each.
        rule: Outer momentum and rate.
        new_codes, new_scales: Of the publication of the whole fragment.
        work: The thread's workspace.

    Returns:
        How many blocks would not have been finite; those are as they were before.
    """
    codes, scales = as_bytes(codes), as_halves(scales)
    weights, directions = as_floats(weights), as_floats(directions)
    state = (as_floats(state[0]), as_floats(state[1]), as_floats(state[2]))
    new_codes, new_scales, work = as_bytes(new_codes), as_halves(new_scales), as_floats(work)
    t, d, mean, spare = buffer(work, 0), buffer(work, 1), buffer(work, 2), buffer(work, 3)
    inverses, small, padded = make_inverses(work), make_small(work), make_padded(work)
    short = (make_short(work, 0), make_short(work, 1), make_short(work, 2))
    factors, before = (weights, directions, blend), (mean, spare)
    bad, at, block = 0, 0, low
    while block < high:
        at = find_segment(segments, block, at)
        element, code, count, n = place(kind, segments, at, block, high)
        _merge_group(kind, codes, scales, factors, code, block, count, n, d, mean, t, padded, small)
        stop, code_stop = element + count * BLOCK, code + count * code_bytes(kind, n)
        if n < BLOCK:
            for part in range(3):
                load(kind, state[part], element, 1, n, short[part])
            group, packed = short, padded
        else:
            group = (state[0][element:stop], state[1][element:stop], state[2][element:stop])
            packed = new_codes[code:code_stop]
        halves = new_scales[block : block + count]
        _outer_step(kind, d, group, before, rule[0], rule[1], t)
        find_magnitudes(t, count, inverses)
        worse = find_scales(kind, count, halves, inverses)
        if worse > 0:
            _take_back(kind, group, before, t, inverses)
            bad += worse
        _publish(kind, t, count, packed, halves, group[2], d, inverses, small)
        if n < BLOCK:
            copy(padded, new_codes[code:code_stop], code_stop - code)
            for part in range(3):
                store(kind, short[part], state[part], element, 1, n)
        block += count
    return bad
