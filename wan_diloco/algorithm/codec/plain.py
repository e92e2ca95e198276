"""Codecs that write each value by itself: f32, exact, and bf16, nearly so. Little-endian, no scales."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import torch

from wan_diloco.algorithm.blocks import BlockTable
from wan_diloco.algorithm.codec.base import Codec, Payload
from wan_diloco.algorithm.kernels.codes import BF16, F32
from wan_diloco.errors import NonFiniteError

__all__ = ["BF16_MAX", "Bf16Codec", "F32Codec"]

# The largest finite bf16; larger floats round to it, since rounding to nearest would give infinity.
BF16_MAX: Final = (2.0 - 2.0**-7) * 2.0**127


def _refuse_non_finite(values_N: torch.Tensor) -> None:
    if not bool(torch.isfinite(values_N).all()):
        raise NonFiniteError(f"{int((~torch.isfinite(values_N)).sum())} of {values_N.numel()} values to encode")


class F32Codec(Codec):
    """The values themselves: 4 bytes an element."""

    name: ClassVar[str] = "f32"
    kind: ClassVar[int] = F32
    lossless: ClassVar[bool] = True

    def encode_on_device(self, values_N: torch.Tensor, table: BlockTable) -> Payload:  # noqa: ARG002 - one value, one code
        """Copy the values' bytes.

        Raises:
            NonFiniteError: Any value is NaN or infinite.
        """
        _refuse_non_finite(values_N)
        codes = values_N.detach().cpu().numpy().astype("<f4").view(np.uint8)
        return Payload(codes=codes, scales=np.empty(0, np.uint8))


class Bf16Codec(Codec):
    """The upper half of each f32, rounded to nearest even, never to infinity: 2 bytes an element."""

    name: ClassVar[str] = "bf16"
    kind: ClassVar[int] = BF16

    def encode_on_device(self, values_N: torch.Tensor, table: BlockTable) -> Payload:  # noqa: ARG002 - one value, one code
        """Round on the device.

        Raises:
            NonFiniteError: Any value is NaN or infinite.
        """
        _refuse_non_finite(values_N)
        rounded = values_N.detach().clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)
        codes = rounded.view(torch.int16).cpu().numpy().astype("<i2").view(np.uint8)
        return Payload(codes=codes, scales=np.empty(0, np.uint8))
