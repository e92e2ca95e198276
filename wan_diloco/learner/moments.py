"""Inner moments as one row of bytes, in the order of their names: what a donor pins and a joiner takes over.

Views and copies of bytes only; nothing here knows of a peer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MomentsLayout"]


@dataclass(frozen=True, slots=True)
class MomentsLayout:
    """Where each tensor lies in the row.

    Attributes:
        places: Of each tensor: name, shape, dtype, first byte, number of bytes.
    """

    places: tuple[tuple[str, tuple[int, ...], torch.dtype, int, int], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> MomentsLayout:
        """The layout of an optimizer's state."""
        places = []
        start = 0
        for name in sorted(tensors):
            tensor = tensors[name]
            size_bytes = tensor.numel() * tensor.element_size()
            places.append((name, tuple(tensor.shape), tensor.dtype, start, size_bytes))
            start += size_bytes
        return cls(tuple(places))

    @property
    def size_bytes(self) -> int:
        """Of the row."""
        return sum(place[-1] for place in self.places)

    @property
    def fingerprint(self) -> str:
        """The same for the same names, shapes and types."""
        lines = "\n".join(f"{name} {dtype} {shape}" for name, shape, dtype, _, _ in self.places)
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def write(self, row: NDArray[np.uint8], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into their places; takes about as long as copying that much memory."""
        places = self._views(row)
        for name, place in places.items():
            place.copy_(tensors[name].detach())

    def read(self, row: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """The tensors that a row holds; they share its memory."""
        return self._views(row)

    def _views(self, row: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        flat = torch.from_numpy(row)
        return {
            name: flat[start : start + size_bytes].view(dtype).view(shape)
            for name, shape, dtype, start, size_bytes in self.places
        }
