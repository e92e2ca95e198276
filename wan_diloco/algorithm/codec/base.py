"""What every codec is: a fragment's vector of f32 to bytes and back. Compression and framing are not its business.

A payload is two buffers, codes and scales, of a length that the block table alone decides: nothing in
them says how long they are, so a wrong length is always found. Decoding is total: whatever the bytes,
it gives finite values or a typed error.

On the CPU the work is done by `kernels`. A tensor on another device is encoded there, by torch, and only
what is packed leaves it: `encode_on_device`, the same bits.

Legend: N elements of the fragment, B blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from wan_diloco.algorithm.blocks import BlockTable
from wan_diloco.algorithm.kernels import passes
from wan_diloco.algorithm.kernels.memory import workspace
from wan_diloco.algorithm.kernels.segments import BlockMap
from wan_diloco.errors import DecodeError, NonFiniteError

__all__ = ["Codec", "Payload", "PayloadSizes", "PayloadSource", "as_codes", "as_halves", "check_vector"]

Bytes = npt.NDArray[np.uint8]
_NOTHING: Final = np.empty(0, np.float32)
_NO_HALVES: Final = np.empty(0, np.uint16)


class PayloadSource(Protocol):
    """An encoded fragment, wherever it is; read in ascending order, as often as wished."""

    def codes_into(self, start: int, out: Bytes) -> None:
        """Copy the codes from byte `start` on; `out` is filled whole."""
        ...

    def scales(self) -> Bytes:
        """All scales."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """An encoded fragment.

    Attributes:
        codes: uint8, one dimension.
        scales: uint8, one dimension; empty for codecs without scales.
    """

    codes: Bytes
    scales: Bytes

    def source(self) -> PayloadSource:
        """This payload, to be read."""
        return _Held(self)


class _Held:
    """Implements `PayloadSource` over a payload in memory."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def codes_into(self, start: int, out: Bytes) -> None:
        out[:] = self._payload.codes[start : start + out.size]

    def scales(self) -> Bytes:
        return self._payload.scales


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

    Attributes:
        name: As settings and headers have it.
        kind: What kernels call it.
        lossless: It writes the value itself, to the bit.
    """

    name: ClassVar[str]
    kind: ClassVar[int]
    lossless: ClassVar[bool] = False

    def sizes(self, table: BlockTable) -> PayloadSizes:
        """The exact lengths of any payload of this fragment."""
        return PayloadSizes(codes_bytes=BlockMap(self.kind, table).codes_bytes, scales_bytes=self._scales_bytes(table))

    def encode(self, values_N: torch.Tensor, table: BlockTable, minus_N: torch.Tensor | None = None) -> Payload:
        """Encode a fragment, or what it has more than another.

        Args:
            values_N: float32 [N], on any device.
            table: The fragment's blocks.
            minus_N: float32 [N] on the same device, subtracted first; None for nothing.

        Returns:
            The payload, in memory of its own on the CPU.

        Raises:
            NonFiniteError: Any value to encode is NaN or infinite.
        """
        if values_N.device.type == "cpu":
            blocks = BlockMap(self.kind, table)
            codes, scales = np.empty(blocks.codes_bytes, np.uint8), np.empty(self._scales_bytes(table), np.uint8)
            self.encode_range(values_N, table, blocks, 0, table.num_blocks, codes, scales, minus_N)
            return Payload(codes=codes, scales=scales)
        check_vector(values_N, table)
        return self.encode_on_device(values_N if minus_N is None else values_N - minus_N, table)

    def encode_range(
        self,
        values_N: torch.Tensor,
        table: BlockTable,
        blocks: BlockMap,
        low: int,
        high: int,
        codes: Bytes,
        scales: Bytes,
        minus_N: torch.Tensor | None = None,
    ) -> None:
        """Encode some blocks.

        Args:
            values_N: As for `encode`, on the CPU.
            table: The fragment's blocks.
            blocks: Of this codec and this table.
            low: The first of these blocks.
            high: One past the last.
            codes: uint8, of these blocks; filled whole.
            scales: uint8, of these blocks; filled whole.
            minus_N: As for `encode`.

        Raises:
            NonFiniteError: As `encode`.
        """
        vectors = [values_N] if minus_N is None else [values_N, minus_N]
        for vector_N in vectors:
            check_vector(vector_N, table, "cpu")
        x, *rest = (vector_N.detach().contiguous().numpy() for vector_N in vectors)
        bad = passes.encode(
            self.kind,
            x,
            rest[0] if rest else _NOTHING,
            blocks.segments,
            low,
            high,
            codes,
            as_halves(scales),
            0,
            blocks.code(low),
            low,
            workspace(),
        )
        if bad:
            raise NonFiniteError(f"values to encode, in {bad} of {high - low} blocks")

    def encode_chunks(
        self,
        values_N: torch.Tensor,
        table: BlockTable,
        scales: Bytes,
        chunk_bytes: int,
        minus_N: torch.Tensor | None = None,
    ) -> Iterator[Bytes]:
        """Encode a fragment piece by piece, so that its codes are never there as a whole.

        Args:
            values_N: As for `encode`, on the CPU.
            table: The fragment's blocks.
            scales: uint8, of the whole fragment; filled as the chunks are taken.
            chunk_bytes: The most that a chunk has, at least one block's codes.
            minus_N: As for `encode`.

        Yields:
            The codes in order, uint8, each chunk in memory of its own.

        Raises:
            NonFiniteError: As `encode`; chunks before were good.
        """
        blocks = BlockMap(self.kind, table)
        step = max(1, chunk_bytes // blocks.block_bytes)
        for low in range(0, table.num_blocks, step):
            high = min(low + step, table.num_blocks)
            codes = np.empty(blocks.code(high) - blocks.code(low), np.uint8)
            own_scales = scales[2 * low : 2 * high] if scales.size else scales
            self.encode_range(values_N, table, blocks, low, high, codes, own_scales, minus_N)
            yield codes

    @abstractmethod
    def encode_on_device(self, values_N: torch.Tensor, table: BlockTable) -> Payload:
        """The same as `encode`, by torch, wherever the tensor is; only what is packed is copied to the CPU.

        Raises:
            NonFiniteError: As `encode`.
        """

    def decode(self, payload: Payload, table: BlockTable, base_N: torch.Tensor | None = None) -> torch.Tensor:
        """Decode a fragment.

        Args:
            payload: Bytes from anywhere; not kept and not changed.
            table: The fragment's blocks.
            base_N: float32 [N], added to each value; None for nothing.

        Returns:
            float32 [N], in memory of its own; without a base all finite.

        Raises:
            DecodeError: A buffer has another length than `sizes` says, or a scale that no encoder writes.
            NonFiniteError: A scale or value is NaN or infinite.
        """
        self.check(payload, table)
        out_N = torch.empty(table.numel, dtype=torch.float32)
        base = _NOTHING if base_N is None else base_N.detach().contiguous().numpy()
        blocks = BlockMap(self.kind, table)
        codes, halves = as_codes(payload.codes), as_halves(payload.scales)
        passes.decode(
            self.kind, codes, halves, blocks.segments, 0, table.num_blocks, base, out_N.numpy(), 0, 0, 0, workspace()
        )
        return out_N

    def check(self, payload: Payload, table: BlockTable) -> None:
        """See that a payload decodes.

        Raises:
            DecodeError: See `decode`.
            NonFiniteError: See `decode`.
        """
        sizes = self.sizes(table)
        for what, buffer, size_bytes in (
            ("codes", payload.codes, sizes.codes_bytes),
            ("scales", payload.scales, sizes.scales_bytes),
        ):
            if buffer.dtype != np.uint8 or buffer.shape != (size_bytes,):
                detail = f"{self.name} {what}: {buffer.dtype} {buffer.shape}, expected {size_bytes} bytes"
                raise DecodeError("wrong_length", detail)
        self.check_scales(payload.scales)
        if self.codes_may_be_infinite:
            codes, blocks = as_codes(payload.codes), BlockMap(self.kind, table)
            sums = np.empty(table.num_blocks, np.float32)
            bad = passes.measure(
                self.kind,
                codes,
                as_halves(payload.scales),
                blocks.segments,
                0,
                table.num_blocks,
                sums,
                0,
                0,
                workspace(),
            )
            if bad:
                raise NonFiniteError(f"decoded values, in {bad} of {table.num_blocks} blocks")

    @property
    def codes_may_be_infinite(self) -> bool:
        """Whether codes alone can say NaN or infinity; where not, good scales are enough."""
        return True

    def check_scales(self, scales: Bytes) -> None:  # noqa: B027 - most codecs have no scales
        """See that all scales are ones that an encoder writes.

        Raises:
            DecodeError: One is out of range.
            NonFiniteError: One is NaN or infinite.
        """

    def _scales_bytes(self, table: BlockTable) -> int:  # noqa: ARG002 - others need it
        return 0


def check_vector(values_N: torch.Tensor, table: BlockTable, device: str | None = None) -> None:
    """Refuse what isn't the fragment's vector.

    Raises:
        ValueError: Wrong shape, type or device: a bug of ours.
    """
    found = (values_N.shape, values_N.dtype, device if device is None else values_N.device.type)
    if found != ((table.numel,), torch.float32, device) or values_N.is_meta:
        text = f"{values_N.dtype} {tuple(values_N.shape)} on {values_N.device}"
        raise ValueError(f"not a float32 vector of {table.numel} elements{' on the CPU' if device else ''}: {text}")


def as_codes(codes: Bytes) -> Bytes:
    """Codes as kernels take them: contiguous and, for their types' sake, writable; copied only where they aren't."""
    return np.require(codes, requirements=["C", "W"])


def as_halves(scales: Bytes) -> npt.NDArray[np.uint16]:
    """Scales as the 16 bits that each of them is, in the order of this machine; shared where that is the wire's.

    A buffer that begins at an odd address (received ones do) is copied.
    """
    if scales.size == 0:
        return _NO_HALVES
    if scales.ctypes.data % 2 or not (scales.flags.c_contiguous and scales.flags.writeable):
        scales = scales.copy()
    halves: npt.NDArray[np.uint16] = scales.view("<u2").astype(np.uint16, copy=False)
    return halves
