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
    GROUP,
    INT4,
    add_blocks,
    code_bytes,
    decode_blocks,
    encode_blocks,
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
    as_integers,
    buffer,
    make_padded,
    make_small,
    make_tools,
    prefetch,
)
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
    tools, padded, bits = make_tools(work), make_padded(work), as_integers(t)
    at, block = 0, low
    while block < high:
        at = find_segment(segments, block, at)
        _, code, count, n = place(kind, segments, at, block, high)
        fill(d, 0, count * BLOCK)
        fill(turned, 0, count * BLOCK)
        for m in range(weights.size):
            unpack(kind, codes[m], scales[m], code, block, count, n, t, bits, padded, tools)
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
    bits: Any,
    padded: Any,
    tools: Any,
) -> None:
    """A weighted sum into d, in the order of the contributions; those without weight are left out."""
    fill(d, 0, count * BLOCK)
    for m in range(weights.size):
        if weights[m] == f32(0):
            continue
        if n < BLOCK:
            unpack(kind, codes[m], scales[m], code, block, count, n, t, bits, padded, tools)
            add_product(d, t, weights[m], 1)
        else:
            packed = codes[m, code : code + count * code_bytes(kind, BLOCK)]
            add_blocks(kind, packed, scales[m, block : block + count], count, weights[m], d, t, bits, tools)


@inner
def _lacking(d: Any, exact: Any, momentum: Any, published: Any, mu: Any, eta: Any, t: Any) -> None:
    """What the published value will lack after the outer step with d, into t; `outer` has the formula."""
    for j in range(exact.size):
        t[j] = exact[j] - (d[j] + (momentum[j] * mu + d[j]) * mu) * eta - published[j]


@inner
def _outer_step(d: Any, exact: Any, momentum: Any, mu: Any, eta: Any) -> None:
    """The step itself, in place: to calculate it twice is quicker than to keep what must not be changed in vain."""
    for j in range(exact.size):
        b = momentum[j] * mu + d[j]
        momentum[j] = b
        exact[j] -= (d[j] + b * mu) * eta


@inner
def _step_finite(
    kind: int, d: Any, exact: Any, momentum: Any, published: Any, mu: Any, eta: Any, t: Any, tools: Any
) -> None:
    """The outer step without the blocks that would not be finite: those stay, and what is published says so."""
    for block in range(exact.size // BLOCK):
        start, stop = block * BLOCK, (block + 1) * BLOCK
        if tools[2][block] == tools[2][block]:
            _outer_step(d[start:stop], exact[start:stop], momentum[start:stop], mu, eta)
            continue
        tools[2][block] = f32(0)
        if kind == F32:
            copy(published[start:stop], t[start:stop], BLOCK)
        else:
            fill(t, start, stop)


@inner
def _make_smalls(work: Any) -> Any:
    """What encoding works with, and the three values of a short block."""
    spares = (make_small(work, 0), as_integers(make_small(work, 0)), as_integers(make_small(work, 1)))
    return spares, (make_small(work, 2), make_small(work, 3), make_small(work, 4))


@inner
def _prefetch_next(kind: int, codes: Any, state: Any, element: int, code: int) -> None:
    """Have the next group on its way while this one is worked on."""
    for part in range(3):
        prefetch(state[part], element, GROUP * BLOCK)
    for m in range(codes.shape[0]):
        prefetch(codes[m], code, GROUP * code_bytes(kind, BLOCK))


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
    d_bits: Any,
    mean: Any,
    t: Any,
    bits: Any,
    padded: Any,
    tools: Any,
) -> None:
    """The merged delta of a group, into d."""
    weights, directions, blend = factors
    if weights.size == 1:
        # One contribution comes out to the bit, also a negative zero.
        unpack(kind, codes[0], scales[0], code, block, count, n, d, d_bits, padded, tools)
        return
    if directions.size == 0:
        _merge(kind, codes, scales, weights, code, block, count, n, d, t, bits, padded, tools)
        return
    _merge(kind, codes, scales, directions, code, block, count, n, d, t, bits, padded, tools)
    for j in range(count * BLOCK):
        d[j] *= blend[1]
    if blend[0] != f32(0):
        _merge(kind, codes, scales, weights, code, block, count, n, mean, t, bits, padded, tools)
        add_product(d, mean, blend[0], count)


@inner
def _step(
    kind: int,
    d: Any,
    exact: Any,
    momentum: Any,
    published: Any,
    lacking_from: Any,
    rule: Any,
    halves: Any,
    count: int,
    t: Any,
    bits: Any,
    tools: Any,
) -> int:
    """The outer step of a group; what is to be published of it comes into t, and its scales where they belong.

    Returns:
        How many blocks would not have been finite.
    """
    mu, eta = rule
    _lacking(d, exact, momentum, lacking_from, mu, eta, t)
    bad = find_scales(kind, bits, count, halves, tools)
    if bad == 0:
        _outer_step(d, exact, momentum, mu, eta)
    else:
        _step_finite(kind, d, exact, momentum, published, mu, eta, t, tools)
    return bad


@inner
def _publish(
    kind: int,
    t: Any,
    bits: Any,
    spares: Any,
    count: int,
    packed: Any,
    halves: Any,
    published: Any,
    d: Any,
    d_bits: Any,
    tools: Any,
) -> None:
    """Encode t, and add what that decodes to, to the published value; d is lost."""
    if kind == INT4:
        publish_int4(t, count, packed, halves, published, tools)
        return
    encode_blocks(kind, t, bits, spares[0], spares[1], spares[2], count, packed, tools)
    decode_blocks(kind, packed, halves, count, d, d_bits, tools)
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
    t, d, mean, zeros = buffer(work, 0), buffer(work, 1), buffer(work, 2), buffer(work, 3)
    tools, padded, bits, d_bits = make_tools(work), make_padded(work), as_integers(t), as_integers(d)
    spares, short = _make_smalls(work)
    fill(zeros, 0, zeros.size)
    bad, at, block = 0, 0, low
    while block < high:
        at = find_segment(segments, block, at)
        element, code, count, n = place(kind, segments, at, block, high)
        factors = (weights, directions, blend)
        _merge_group(kind, codes, scales, factors, code, block, count, n, d, d_bits, mean, t, bits, padded, tools)
        code_stop = code + count * code_bytes(kind, n)
        _prefetch_next(kind, codes, state, element + count * BLOCK, code_stop)
        if n < BLOCK:
            for part in range(3):
                load(kind, state[part], element, 1, n, short[part])
            exact, momentum, published, packed = short[0], short[1], short[2], padded
        else:
            stop = element + count * BLOCK
            exact, momentum, published = state[0][element:stop], state[1][element:stop], state[2][element:stop]
            packed = new_codes[code:code_stop]
        halves = new_scales[block : block + count]
        lacking_from = zeros[: exact.size] if kind == F32 else published
        bad += _step(kind, d, exact, momentum, published, lacking_from, rule, halves, count, t, bits, tools)
        _publish(kind, t, bits, spares, count, packed, halves, published, d, d_bits, tools)
        if n < BLOCK:
            copy(padded, new_codes[code:code_stop], code_stop - code)
            for part in range(3):
                store(kind, short[part], state[part], element, 1, n)
        block += count
    return bad
