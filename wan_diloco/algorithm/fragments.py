"""Between a model's tensors and a fragment's flat vector of f32: copies, and nothing else.

Legend: N elements of the fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from wan_diloco.algorithm.layout import Fragment, Piece, row_length
from wan_diloco.errors import LayoutMismatch

__all__ = ["read_fragment", "write_fragment"]


def _rows(piece: Piece, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The piece's rows as a view of its tensor, whatever its strides.

    Raises:
        LayoutMismatch: The tensor is missing or has another shape.
    """
    tensor = tensors.get(piece.tensor)
    if tensor is None:
        raise LayoutMismatch("unknown_tensor", f"there is no tensor {piece.tensor}")
    if row_length(tensor.shape) != piece.row_length or tensor.numel() < piece.stop:
        raise LayoutMismatch("wrong_shape", f"{piece.tensor} has shape {tuple(tensor.shape)}")
    if tensor.dim() < 2:
        return tensor.detach()
    return tensor.detach()[piece.start // piece.row_length : piece.stop // piece.row_length]


def _parts(
    fragment: Fragment, tensors: Mapping[str, torch.Tensor], flat_N: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece's rows, and the same elements of the flat vector in the same shape."""
    if flat_N.shape != (fragment.numel,) or flat_N.dtype is not torch.float32:
        raise ValueError(f"not a float32 vector of {fragment.numel} elements: {flat_N.dtype}, {tuple(flat_N.shape)}")
    offset = 0
    for piece in fragment.pieces:
        rows = _rows(piece, tensors)
        yield rows, flat_N[offset : offset + piece.numel].view(rows.shape)
        offset += piece.numel


def read_fragment(
    fragment: Fragment, tensors: Mapping[str, torch.Tensor], out_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy the fragment's elements out of whole tensors.

    Args:
        fragment: What to copy.
        tensors: By canonical name; whole, of any floating type and strides.
        out_N: Where to; a new vector on the CPU if None.

    Returns:
        float32 [N].

    Raises:
        LayoutMismatch: A tensor is missing or has another shape; nothing is skipped.
    """
    flat_N = torch.empty(fragment.numel, dtype=torch.float32) if out_N is None else out_N
    for rows, part in _parts(fragment, tensors, flat_N):
        part.copy_(rows)
    return flat_N


def write_fragment(fragment: Fragment, tensors: Mapping[str, torch.Tensor], values_N: torch.Tensor) -> None:
    """Copy a flat vector into the tensors, in place, so that tied weights and optimizers keep their storage.

    Args:
        fragment: What to copy.
        tensors: As in `read_fragment`; autograd doesn't see the change.
        values_N: float32 [N].

    Raises:
        LayoutMismatch: A tensor is missing or has another shape; then none is changed.
    """
    for rows, part in list(_parts(fragment, tensors, values_N)):
        rows.copy_(part)
