"""A block table as kernels read it, and where a block's codes begin."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from wan_diloco.algorithm.blocks import BLOCK, BlockTable, Segment
from wan_diloco.algorithm.kernels.codes import block_bytes

__all__ = ["BlockMap", "row_bytes"]


def row_bytes(kind: int, segment: Segment) -> int:
    """Bytes of the codes of one row of a segment."""
    return segment.full_blocks * block_bytes(kind, BLOCK) + block_bytes(kind, segment.tail)


class BlockMap:
    """Where each block of a fragment is.

    Args:
        kind: What kernels call the codec.
        table: The fragment's blocks.

    Attributes:
        segments: int64 [S, 7]; `groups` names the columns.
        codes_bytes: Of the whole fragment.
        block_bytes: Of the codes of a whole block.
    """

    def __init__(self, kind: int, table: BlockTable) -> None:
        """Lay the segments' codes one behind the other."""
        self.block_bytes = block_bytes(kind, BLOCK)
        rows, codes = [], 0
        for segment in table.segments:
            own_bytes = row_bytes(kind, segment)
            blocks = segment.blocks_per_row
            rows.append(
                (segment.start, segment.row_length, blocks, segment.first_block, segment.stop_block, codes, own_bytes)
            )
            codes += segment.num_rows * own_bytes
        self.segments: npt.NDArray[np.int64] = np.array(rows, np.int64)
        self.codes_bytes = codes
        self._first_blocks = [row[3] for row in rows]
        self._num_blocks = table.num_blocks

    def code(self, block: int) -> int:
        """First byte of a block's codes; of one past the last, all their bytes."""
        if block >= self._num_blocks:
            return self.codes_bytes
        _, _, blocks, first, _, code, own_bytes = map(int, self.segments[bisect_right(self._first_blocks, block) - 1])
        row, column = divmod(block - first, blocks)
        return code + row * own_bytes + column * self.block_bytes
