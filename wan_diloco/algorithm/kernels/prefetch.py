"""Having memory fetched while something else is worked on.

The processor fetches ahead by itself, but not over the end of a page, and the first pass over a group of blocks does
little beside waiting. So passes that calculate ask for the next group, a block's worth for each block that they do: in
one go, the requests would only wait for each other.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.compiled import inner

__all__ = ["NOTHING", "address_of", "prefetch_block", "prefetch_two"]

_LINE_BYTES: Final = 64
_BLOCK_BYTES: Final = 4 * BLOCK

NOTHING: Final = 0
"""The address of what isn't to be fetched."""


@intrinsic
def _prefetch_line(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - the signature is numba's
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, kind, "llvm.prefetch.p0"
        )
        # To be read, kept in all caches, data.
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@inner
def address_of(x: Any, element: int) -> int:
    """Where an element of a vector of f32 lies, or would lie: it may be beyond the end, where fetching does nothing."""
    return int(x.ctypes.data + 4 * element)


@inner
def prefetch_block(address: int, block: int) -> None:
    """Ask for a block of f32, counted from an address."""
    if address != NOTHING:
        first = address + block * _BLOCK_BYTES
        for line in range(0, _BLOCK_BYTES, _LINE_BYTES):
            _prefetch_line(first + line)  # type: ignore[call-arg]


@inner
def prefetch_two(addresses: tuple[int, int], block: int) -> None:
    """Ask for a block of each of two vectors."""
    prefetch_block(addresses[0], block)
    prefetch_block(addresses[1], block)
