"""Where a fragment's quantisation blocks begin and end, and block-wise views of its vector.

Blocks have 128 elements and restart at every piece and every row, so that a rank which holds whole
rows holds whole blocks. Rows shorter than 32 would spend too much on scales: such pieces are blocked
flat. The last block of a row is shorter where 128 doesn't divide it.

Legend: N elements of the fragment, B blocks, R rows of a segment, K blocks a row, L = 128 elements a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from wan_diloco.algorithm.layout import Fragment

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK", "FLAT_BELOW", "BlockTable", "Segment", "block_sums_of_squares", "build_block_table", "norm"]

BLOCK: Final = 128
FLAT_BELOW: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive rows of one length, which are blocked alike.

    Attributes:
        start: First element in the fragment's vector.
        num_rows: R.
        row_length: Elements a row.
        first_block: Index of its first block in the table.
    """

    start: int
    num_rows: int
    row_length: int
    first_block: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.num_rows * self.row_length

    @property
    def full_blocks(self) -> int:
        """Whole blocks a row."""
        return self.row_length // BLOCK

    @property
    def tail(self) -> int:
        """Elements in the short block at the end of each row, 0 where there is none."""
        return self.row_length % BLOCK

    @property
    def blocks_per_row(self) -> int:
        """K."""
        return -(-self.row_length // BLOCK)

    @property
    def stop_block(self) -> int:
        """One past its last block."""
        return self.first_block + self.num_rows * self.blocks_per_row

    def padded(self, values_N: torch.Tensor) -> torch.Tensor:
        """Its elements as [R, K, L], zeros after each short block; a view where there are none."""
        rows = values_N[self.start : self.stop].view(self.num_rows, self.row_length)
        if self.tail:
            padded = rows.new_zeros(self.num_rows, self.blocks_per_row * BLOCK)
            padded[:, : self.row_length] = rows
            rows = padded
        return rows.view(self.num_rows, self.blocks_per_row, BLOCK)

    def unpad(self, values_RKL: torch.Tensor, out_N: torch.Tensor) -> None:
        """Copy what `padded` made back into its place in a fragment's vector."""
        rows = values_RKL.view(self.num_rows, self.blocks_per_row * BLOCK)[:, : self.row_length]
        out_N[self.start : self.stop].view(self.num_rows, self.row_length).copy_(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """All blocks of one fragment, in the order of its vector.

    Attributes:
        segments: Cover the vector without gaps.
        piece_elements: For each piece, its first element and one past its last.
        piece_blocks: For each piece, its first block and one past its last.
        numel: N.
        num_blocks: B.
    """

    segments: tuple[Segment, ...]
    piece_elements: tuple[tuple[int, int], ...]
    piece_blocks: tuple[tuple[int, int], ...]
    numel: int
    num_blocks: int

    def lengths(self) -> list[int]:
        """Elements of each block."""
        return [
            length
            for segment in self.segments
            for _ in range(segment.num_rows)
            for length in [BLOCK] * segment.full_blocks + [segment.tail] * bool(segment.tail)
        ]


def build_block_table(fragment: Fragment) -> BlockTable:
    """Cut a fragment into blocks, by the rule at the top of this module."""
    segments: list[Segment] = []
    piece_elements: list[tuple[int, int]] = []
    piece_blocks: list[tuple[int, int]] = []
    start = block = 0
    for piece in fragment.pieces:
        length = piece.numel if piece.row_length < FLAT_BELOW else piece.row_length
        # Rows of whole blocks are the same blocks as rows of one block each: neighbours become one segment.
        length = BLOCK if length % BLOCK == 0 else length
        segment = Segment(start=start, num_rows=piece.numel // length, row_length=length, first_block=block)
        piece_elements.append((start, segment.stop))
        piece_blocks.append((block, segment.stop_block))
        start, block = segment.stop, segment.stop_block
        last = segments[-1] if segments else None
        if last is not None and last.row_length == length == BLOCK:
            rows = last.num_rows + segment.num_rows
            segments[-1] = Segment(start=last.start, num_rows=rows, row_length=BLOCK, first_block=last.first_block)
        else:
            segments.append(segment)
    return BlockTable(
        segments=tuple(segments),
        piece_elements=tuple(piece_elements),
        piece_blocks=tuple(piece_blocks),
        numel=start,
        num_blocks=block,
    )


def block_sums_of_squares(values_N: torch.Tensor, table: BlockTable) -> npt.NDArray[np.float32]:
    """Sum of squares of each block, the same bits on every machine and for every number of threads.

    Squares are rounded to f32, then the upper half of the (zero padded) block is added to the lower,
    64, 32, ... 1: a tree of single additions. torch's own sum adds in an order that depends on the CPU.

    Args:
        values_N: float32 [N].
        table: The fragment's blocks.

    Returns:
        float32 [B].
    """
    sums_B = np.empty(table.num_blocks, np.float32)
    for segment in table.segments:
        padded = segment.padded(values_N)
        sums = padded * padded
        width = BLOCK // 2
        while width:
            sums = sums[..., :width] + sums[..., width:]
            width //= 2
        sums_B[segment.first_block : segment.stop_block] = sums.reshape(-1).numpy()
    return sums_B


def norm(sums_B: npt.NDArray[np.float32]) -> float:
    """Euclidean norm from sums of squares: over blocks in f64, one after the other."""
    # accumulate is sequential by definition; reduce is free to add in pairs and in vector lanes.
    return float(np.sqrt(np.add.accumulate(sums_B, dtype=np.float64)[-1]))
