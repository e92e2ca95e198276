"""What every codec is: a fragment's vector of f32 to bytes and back. Compression and framing are not its business.

A payload is two buffers, codes and scales, of a length that the block table alone decides: nothing in
them says how long they are, so a wrong length is always found. Decoding is total: whatever the bytes,
it gives finite values or a typed error.

Legend: N elements of the fragment, B blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from wan_diloco.algorithm.blocks import BlockTable
from wan_diloco.errors import DecodeError

__all__ = ["Codec", "Payload", "PayloadSizes", "as_tensor", "check_vector"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """An encoded fragment.

    Attributes:
        codes: uint8, one dimension.
        scales: uint8, one dimension; empty for codecs without scales.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSizes:
    """Lengths of a payload's buffers, known before anything is received."""

    codes_bytes: int
    scales_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both buffers."""
        return self.codes_bytes + self.scales_bytes


class Codec(ABC):
    """One way of writing values. Stateless.

    Thread: safe from any thread.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def sizes(self, table: BlockTable) -> PayloadSizes:
        """The exact lengths of any payload of this fragment."""

    @abstractmethod
    def encode(self, values_N: torch.Tensor, table: BlockTable) -> Payload:
        """Encode a fragment.

        Args:
            values_N: float32 [N] on the CPU.
            table: The fragment's blocks.

        Raises:
            NonFiniteError: Any value is NaN or infinite.
        """

    def decode(self, payload: Payload, table: BlockTable) -> torch.Tensor:
        """Decode a fragment.

        Args:
            payload: Bytes from anywhere; not kept and not changed.
            table: The fragment's blocks.

        Returns:
            float32 [N], all finite, in memory of its own.

        Raises:
            DecodeError: A buffer has another length than `sizes` says, or a scale that no encoder writes.
            NonFiniteError: A scale or value is NaN or infinite.
        """
        sizes = self.sizes(table)
        for what, buffer, size_bytes in (
            ("codes", payload.codes, sizes.codes_bytes),
            ("scales", payload.scales, sizes.scales_bytes),
        ):
            if buffer.dtype != np.uint8 or buffer.shape != (size_bytes,):
                detail = f"{self.name} {what}: {buffer.dtype} {buffer.shape}, expected {size_bytes} bytes"
                raise DecodeError("wrong_length", detail)
        return self._decode(payload, table)

    @abstractmethod
    def _decode(self, payload: Payload, table: BlockTable) -> torch.Tensor:
        """Decode buffers of the right length."""


def check_vector(values_N: torch.Tensor, table: BlockTable) -> None:
    """Refuse what isn't the fragment's vector.

    Raises:
        ValueError: Wrong shape, type or device: a bug of ours.
    """
    if values_N.shape != (table.numel,) or values_N.dtype is not torch.float32 or values_N.device.type != "cpu":
        found = f"{values_N.dtype} {tuple(values_N.shape)} on {values_N.device}"
        raise ValueError(f"not a float32 vector of {table.numel} elements on the CPU: {found}")


def as_tensor(buffer: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A buffer as a uint8 tensor, copied only where torch can't share it (received bytes are read-only)."""
    return torch.from_numpy(buffer if buffer.flags.writeable and buffer.flags.c_contiguous else buffer.copy())
