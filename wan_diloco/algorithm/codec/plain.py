"""Codecs that write each value by itself: f32, exact, and bf16, nearly so. Little-endian, no scales."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import torch

from wan_diloco.algorithm.blocks import BlockTable
from wan_diloco.algorithm.codec.base import Codec, Payload, PayloadSizes, check_vector
from wan_diloco.errors import NonFiniteError

__all__ = ["BF16_MAX", "Bf16Codec", "F32Codec"]

# The largest finite bf16; larger floats round to it, since rounding to nearest would give infinity.
BF16_MAX: Final = (2.0 - 2.0**-7) * 2.0**127


def _refuse_non_finite(values_N: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(values_N).all()):
        raise NonFiniteError(f"{int((~torch.isfinite(values_N)).sum())} of {values_N.numel()} {what}")


class F32Codec(Codec):
    """The values themselves."""

    name: ClassVar[str] = "f32"
    lossless: ClassVar[bool] = True

    def sizes(self, table: BlockTable) -> PayloadSizes:
        """Four bytes an element."""
        return PayloadSizes(codes_bytes=4 * table.numel, scales_bytes=0)

    def encode(self, values_N: torch.Tensor, table: BlockTable) -> Payload:
        """Copy the values' bytes."""
        check_vector(values_N, table)
        _refuse_non_finite(values_N, "values to encode")
        codes = values_N.detach().numpy().astype("<f4").view(np.uint8)
        return Payload(codes=codes, scales=np.empty(0, np.uint8))

    def _decode(self, payload: Payload, table: BlockTable) -> torch.Tensor:
        values_N = torch.from_numpy(np.frombuffer(payload.codes.tobytes(), "<f4", table.numel).astype(np.float32))
        _refuse_non_finite(values_N, "decoded values")
        return values_N


class Bf16Codec(Codec):
    """The upper half of each f32, rounded to nearest even."""

    name: ClassVar[str] = "bf16"
    lossless: ClassVar[bool] = False

    def sizes(self, table: BlockTable) -> PayloadSizes:
        """Two bytes an element."""
        return PayloadSizes(codes_bytes=2 * table.numel, scales_bytes=0)

    def encode(self, values_N: torch.Tensor, table: BlockTable) -> Payload:
        """Round, never to infinity."""
        check_vector(values_N, table)
        _refuse_non_finite(values_N, "values to encode")
        rounded = values_N.detach().clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)
        codes = rounded.view(torch.int16).numpy().astype("<i2").view(np.uint8)
        return Payload(codes=codes, scales=np.empty(0, np.uint8))

    def _decode(self, payload: Payload, table: BlockTable) -> torch.Tensor:
        halves = torch.from_numpy(np.frombuffer(payload.codes.tobytes(), "<i2", table.numel).astype(np.int16))
        values_N = halves.view(torch.bfloat16).to(torch.float32)
        _refuse_non_finite(values_N, "decoded values")
        return values_N
