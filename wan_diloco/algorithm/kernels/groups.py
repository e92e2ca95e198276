"""Groups of blocks: which are done together, and how they come into buffers and out of them.

Some blocks at a time are copied into buffers that stay in cache, worked on there by loops over plain vectors, and
copied back. The short block at the end of a row is worked on alone, as a whole one: what isn't there is zeros. Of
codecs that pack halves, its halves stand where those of a whole block do, so that no loop knows of it but those that
copy.

Segments are rows of (first element, row length, blocks a row, first block, stop block, first byte of the codes, bytes a
row), as `segments.BlockMap` has them.
"""

from __future__ import annotations

from typing import Any, Final

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.codes import E3M0, GROUP, INT4, code_bytes, decode_blocks
from wan_diloco.algorithm.kernels.compiled import inner
from wan_diloco.algorithm.kernels.vectors import fill

__all__ = [
    "find_segment",
    "join_halves",
    "load",
    "place",
    "shape",
    "store",
    "sums_of_squares",
    "unpack",
]

_HALF: Final = BLOCK // 2


@inner
def find_segment(segments: Any, block: int, at: int) -> int:
    """The segment that a block is in; not before `at`."""
    while segments[at, 4] <= block:
        at += 1
    return at


@inner
def place(kind: int, segments: Any, at: int, block: int, high: int) -> tuple[int, int, int, int]:
    """First element and first byte of the codes of what is done next, how many blocks it is, and elements of the last.

    That is a group of whole blocks that lie side by side, or one block.
    """
    row, column = divmod(block - segments[at, 3], segments[at, 2])
    element = segments[at, 0] + row * segments[at, 1] + column * BLOCK
    code = segments[at, 5] + row * segments[at, 6] + column * code_bytes(kind, BLOCK)
    n = min(BLOCK, segments[at, 1] - column * BLOCK)
    whole = min(segments[at, 4], high) if segments[at, 2] == 1 else block + (segments[at, 1] - column * BLOCK) // BLOCK
    count = min(GROUP, min(whole, high) - block) if n == BLOCK else 1
    return element, code, count, n


@inner
def shape(kind: int, n: int) -> tuple[int, int]:
    """How the elements of a short block lie in a whole one: so many at its beginning, the rest in its middle."""
    if kind == INT4 or kind == E3M0:
        return (n + 1) // 2, n // 2
    return n, 0


@inner
def load(kind: int, source: Any, element: int, count: int, n: int, t: Any) -> None:
    """A group of a vector into t, zeros behind a short block's elements."""
    if n == BLOCK:
        x = source[element : element + count * BLOCK]
        for j in range(x.size):
            t[j] = x[j]
        return
    first, second = shape(kind, n)
    fill(t, 0, BLOCK)
    for j in range(first):
        t[j] = source[element + j]
    for j in range(second):
        t[_HALF + j] = source[element + first + j]


@inner
def store(kind: int, t: Any, target: Any, element: int, count: int, n: int) -> None:
    """A group in t back into its vector."""
    if n == BLOCK:
        x = target[element : element + count * BLOCK]
        for j in range(x.size):
            x[j] = t[j]
        return
    first, second = shape(kind, n)
    for j in range(first):
        target[element + j] = t[j]
    for j in range(second):
        target[element + first + j] = t[_HALF + j]


@inner
def unpack(
    kind: int,
    codes: Any,
    scales: Any,
    code: int,
    block: int,
    count: int,
    n: int,
    t: Any,
    padded: Any,
    small: Any,
) -> None:
    """Decode a group into t, with zeros where a short block has no elements."""
    if n == BLOCK:
        packed = codes[code : code + count * code_bytes(kind, BLOCK)]
        decode_blocks(kind, packed, scales[block : block + count], count, t, small)
        return
    stop = code_bytes(kind, n)
    for j in range(stop):
        padded[j] = codes[code + j]
    decode_blocks(kind, padded, scales[block : block + 1], 1, t, small)
    first, second = shape(kind, n)
    fill(t, first, _HALF)
    fill(t, max(first, _HALF + second), BLOCK)


@inner
def _halve(t: Any, width: int) -> None:
    for j in range(width):
        t[j] += t[width + j]


@inner
def sums_of_squares(x: Any, count: int, squares: Any, sums: Any) -> None:
    """Squares, then halves added onto halves: `blocks.block_sums_of_squares` says why."""
    for block in range(count):
        y = x[block * BLOCK : (block + 1) * BLOCK]
        for j in range(_HALF):
            squares[j] = y[j] * y[j] + y[_HALF + j] * y[_HALF + j]
        _halve(squares, 32)
        _halve(squares, 16)
        _halve(squares, 8)
        _halve(squares, 4)
        _halve(squares, 2)
        sums[block] = squares[0] + squares[1]


@inner
def join_halves(kind: int, t: Any, n: int) -> None:
    """Bring the elements of a short block into their own order."""
    first, second = shape(kind, n)
    if n < BLOCK and second > 0:
        for j in range(second):
            t[first + j] = t[_HALF + j]
        fill(t, n, BLOCK)
