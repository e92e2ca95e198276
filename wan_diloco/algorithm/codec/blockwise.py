"""Codecs with one bf16 scale a block: int8, int4 and e3m0. Their formulas, and how torch does them on a device.

For a block with largest magnitude a:

    scale = bf16(a / D), at most the codec's `scale_max`, and 0 if below 2^-100
    inv   = 1 / scale, or 0 where the scale is 0
    int8  code = clamp(floor(x * inv + 128.5), 1, 255)          value = (code - 128) * scale      D = 127
    int4  code = clamp(floor(x * inv + 8.5), 1, 15)             value = (code - 8) * scale        D = 7
    e3m0  level = clamp(exponent(r * 4/3) + 7, low, 7)          value = +-2^(level - 7) * scale   D = 1
          r = |x| * inv, low = 1 if r >= 2^-6.5 else 0          value = 0 for level 0
          code = level, + 8 if x < 0 and level > 0

each operation rounded once to f32. Rounding the scale moves it by 2^-9 of itself, which never moves the
largest code; the clamps act only where `scale_max` did. The 4/3 puts e3m0's borders halfway between its
values, which loses less than halfway between their logarithms (0.192 against 0.201 of a Gaussian).

Four-bit codes are packed in halves of their block: byte j = element j | element (j + h) << 4, with
h = ceil(n / 2), for a block of n elements; the spare half byte of an odd block holds the code of zero.
Buffers follow the order of the blocks.

Legend: N elements of the fragment, B blocks, R rows of a segment, K blocks a row, L = 128 elements a block.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

import numpy as np
import torch

from wan_diloco.algorithm.blocks import BLOCK, BlockTable, Segment
from wan_diloco.algorithm.codec.base import Bytes, Codec, Payload, as_halves
from wan_diloco.algorithm.codec.plain import BF16_MAX
from wan_diloco.algorithm.kernels.codes import E3M0, INT4, INT8
from wan_diloco.algorithm.kernels.segments import row_bytes
from wan_diloco.errors import DecodeError, NonFiniteError

__all__ = ["SCALE_MIN", "BlockCodec", "E3m0Codec", "Int4Codec", "Int8Codec"]

# Smaller scales are written as 0. Every decoded value and every 1 / scale is then a normal f32, so
# that processors which flush denormals give the same bits.
SCALE_MIN: Final = 2.0**-100

_HALF: Final = BLOCK // 2
_FOUR_THIRDS: Final = float(np.float32(4 / 3))
_E3M0_ZERO_BELOW: Final = float(np.float32(2.0**-6.5))
_BF16_EXPONENT: Final = 0x7F80


def _bf16_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


class BlockCodec(Codec):
    """What the codecs with a scale a block share."""

    divisor: ClassVar[float]
    # The largest bf16 with which no code decodes to infinity, not even those that no encoder writes.
    scale_max: ClassVar[float]

    def encode_on_device(self, values_N: torch.Tensor, table: BlockTable) -> Payload:
        """Scale each block to its largest magnitude, round, and pack; one copy from the device for each buffer.

        Raises:
            NonFiniteError: Any value is NaN or infinite.
        """
        device = values_N.device
        codes = torch.empty(self.sizes(table).codes_bytes, dtype=torch.uint8, device=device)
        scales_B = torch.empty(table.num_blocks, dtype=torch.bfloat16, device=device)
        offset = 0
        for segment in table.segments:
            x_RKL = segment.padded(values_N.detach())
            absmax_RK = x_RKL.abs().amax(dim=-1)
            if not bool(torch.isfinite(absmax_RK).all()):
                blocks = int((~torch.isfinite(absmax_RK)).sum())
                raise NonFiniteError(f"values to encode, in {blocks} of {table.num_blocks} blocks")
            scale_RK = (absmax_RK / self.divisor).to(torch.bfloat16).float().clamp_(max=self.scale_max)
            scale_RK[scale_RK < SCALE_MIN] = 0.0
            scales_B[segment.first_block : segment.stop_block] = scale_RK.reshape(-1)
            inv_RK = torch.where(scale_RK > 0, 1.0 / scale_RK, 0.0)
            size_bytes = segment.num_rows * row_bytes(self.kind, segment)
            out = codes[offset : offset + size_bytes].view(segment.num_rows, -1)
            self._pack(self._quantise(x_RKL, inv_RK.unsqueeze(-1)), segment, out)
            offset += size_bytes
        scales = scales_B.view(torch.int16).cpu().numpy().astype("<i2", copy=False).view(np.uint8)
        return Payload(codes=codes.cpu().numpy(), scales=scales)

    @property
    def codes_may_be_infinite(self) -> bool:
        """They are small integers or powers of two."""
        return False

    def check_scales(self, scales: Bytes) -> None:
        """See that all scales are ones that an encoder writes: 0, or between two bounds.

        Raises:
            DecodeError: One is out of range.
            NonFiniteError: One is NaN or infinite.
        """
        halves = as_halves(scales)
        # Positive floats are ordered as their bits are, and negative ones lie above them all.
        good = (halves >= _bf16_bits(SCALE_MIN)) & (halves <= _bf16_bits(self.scale_max))
        good |= halves == 0
        if bool(good.all()):
            return
        infinite = int(((halves & _BF16_EXPONENT) == _BF16_EXPONENT).sum())
        if infinite:
            raise NonFiniteError(f"{infinite} of {halves.size} scales")
        raise DecodeError("scale_out_of_range", f"{self.name} has scales that no encoder writes")

    def _scales_bytes(self, table: BlockTable) -> int:
        return 2 * table.num_blocks

    @abstractmethod
    def _quantise(self, x_RKL: torch.Tensor, inv_RK1: torch.Tensor) -> torch.Tensor:
        """Codes, uint8 [R, K, L]."""

    @abstractmethod
    def _pack(self, codes_RKL: torch.Tensor, segment: Segment, out: torch.Tensor) -> None:
        """Write codes as bytes [R, row bytes], without the padding."""


class Int8Codec(BlockCodec):
    """-127 to 127, one byte an element."""

    name: ClassVar[str] = "int8"
    divisor: ClassVar[float] = 127.0
    scale_max: ClassVar[float] = BF16_MAX / 128
    kind: ClassVar[int] = INT8

    def _quantise(self, x_RKL: torch.Tensor, inv_RK1: torch.Tensor) -> torch.Tensor:
        return (x_RKL * inv_RK1).add_(128.5).floor_().clamp_(1, 255).to(torch.uint8)

    def _pack(self, codes_RKL: torch.Tensor, segment: Segment, out: torch.Tensor) -> None:
        out.copy_(codes_RKL.view(segment.num_rows, -1)[:, : segment.row_length])


class _NibbleCodec(BlockCodec):
    """Four bits an element, in halves of the block."""

    def _pack(self, codes_RKL: torch.Tensor, segment: Segment, out: torch.Tensor) -> None:
        full = codes_RKL[:, : segment.full_blocks]
        body = out[:, : segment.full_blocks * _HALF].view(segment.num_rows, segment.full_blocks, _HALF)
        body.copy_(full[..., :_HALF] | (full[..., _HALF:] << 4))
        if segment.tail:
            half = (segment.tail + 1) // 2
            # The padding is zeros, and a zero's code is what an odd block's spare half byte must hold.
            last = codes_RKL[:, -1]
            out[:, -half:] = last[:, :half] | (last[:, half : 2 * half] << 4)


class Int4Codec(_NibbleCodec):
    """-7 to 7."""

    name: ClassVar[str] = "int4"
    divisor: ClassVar[float] = 7.0
    scale_max: ClassVar[float] = BF16_MAX / 8
    kind: ClassVar[int] = INT4

    def _quantise(self, x_RKL: torch.Tensor, inv_RK1: torch.Tensor) -> torch.Tensor:
        return (x_RKL * inv_RK1).add_(8.5).floor_().clamp_(1, 15).to(torch.uint8)


class E3m0Codec(_NibbleCodec):
    """A sign and seven powers of two, for heavy tails."""

    name: ClassVar[str] = "e3m0"
    divisor: ClassVar[float] = 1.0
    scale_max: ClassVar[float] = BF16_MAX
    kind: ClassVar[int] = E3M0

    def _quantise(self, x_RKL: torch.Tensor, inv_RK1: torch.Tensor) -> torch.Tensor:
        ratio = x_RKL.abs().mul_(inv_RK1)
        low = (ratio >= _E3M0_ZERO_BELOW).int()
        # A float's exponent is its bits above the 23 of the mantissa, biased by 127.
        level = ratio.mul_(_FOUR_THIRDS).view(torch.int32).bitwise_right_shift_(23).sub_(127 - 7).clamp_(max=7)
        level = torch.maximum(level, low)
        sign = (x_RKL < 0).logical_and_(level > 0).to(torch.uint8)
        return level.to(torch.uint8).bitwise_or_(sign.bitwise_left_shift_(3))
