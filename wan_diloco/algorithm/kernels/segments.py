"""A block table as kernels read it, and where a block's codes begin."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from wan_diloco.algorithm.blocks import BLOCK, BlockTable, Segment
from wan_diloco.algorithm.kernels.codes import BF16, E3M0, INT4, INT8

__all__ = ["BlockMap"]


def _block_bytes(kind: int, n: int) -> int:
    if kind in (INT4, E3M0):
        return (n + 1) // 2
    return n * {INT8: 1, BF16: 2}.get(kind, 4)


def _row_bytes(kind: int, segment: Segment) -> int:
    return segment.full_blocks * _block_bytes(kind, BLOCK) + _block_bytes(kind, segment.tail)


class BlockMap:
    """Where each block of a fragment is: its elements in the vector, its codes in the encoded form.

    Args:
        kind: What kernels call the codec.
        table: The fragment's blocks.

    Attributes:
        segments: int64 [S, 7]; `passes` names the columns.
        codes_bytes: Of the whole fragment.
        block_bytes: Of the codes of a whole block.
    """

    def __init__(self, kind: int, table: BlockTable) -> None:
        """Lay the segments' codes one behind the other."""
        self._kind = kind
        self.block_bytes = _block_bytes(kind, BLOCK)
        rows, codes = [], 0
        for segment in table.segments:
            row_bytes = _row_bytes(kind, segment)
            blocks = segment.blocks_per_row
            rows.append(
                (segment.start, segment.row_length, blocks, segment.first_block, segment.stop_block, codes, row_bytes)
            )
            codes += segment.num_rows * row_bytes
        self.segments: npt.NDArray[np.int64] = np.array(rows, np.int64)
        self.codes_bytes = codes
        self._first_blocks = [row[3] for row in rows]
        self._num_blocks = table.num_blocks
        self._numel = table.numel

    def code(self, block: int) -> int:
        """First byte of a block's codes; of one past the last, all their bytes."""
        return self._at(block)[1]

    def element(self, block: int) -> int:
        """First element of a block; of one past the last, all elements."""
        return self._at(block)[0]

    def _at(self, block: int) -> tuple[int, int]:
        if block >= self._num_blocks:
            return self._numel, self.codes_bytes
        start, length, blocks, first, _, code, row_bytes = map(
            int, self.segments[bisect_right(self._first_blocks, block) - 1]
        )
        row, column = divmod(block - first, blocks)
        return (
            start + row * length + column * BLOCK,
            code + row * row_bytes + column * _block_bytes(self._kind, BLOCK),
        )
