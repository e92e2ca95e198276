"""Arrays without owners, for use inside kernels.

numba counts the references to an array's memory at every slice, by atomic operations; in loops over blocks that takes
as long as the work. Memory that numba doesn't own isn't counted: a kernel sees its arguments, and the workspace that
its caller lends it, through plain views. They are valid while the caller holds the arrays, that is, until the kernel
returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.codes import GROUP
from wan_diloco.algorithm.kernels.compiled import inner

__all__ = [
    "as_bytes",
    "as_floats",
    "as_halves",
    "as_integers",
    "buffer",
    "make_padded",
    "make_small",
    "make_tools",
    "prefetch",
    "workspace",
]

_BUFFERS: Final = 4
# Behind the buffers, in floats, each on a cache line of its own: what `make_tools`, `make_padded`, `make_small` give.
_ONE: Final = _BUFFERS * GROUP * BLOCK
_INVERSES: Final = _ONE + 16
_BYTES: Final = _INVERSES + GROUP
_PADDED: Final = _BYTES + GROUP * BLOCK // 4
_SMALL: Final = _PADDED + BLOCK
_SMALLS: Final = 5
WORK_FLOATS: Final = _SMALL + _SMALLS * BLOCK


def _pointer(element: Any) -> Callable[..., Any]:
    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - the signature is numba's
        pointed = types.CPointer(element)  # type: ignore[no-untyped-call]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            return builder.inttoptr(arguments[0], context.get_value_type(pointed))

        return pointed(types.uintp), generate

    return pointer


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
def prefetch(x: Any, start: int, count: int) -> None:
    """Have elements of an array fetched while something else is worked on; beyond its end nothing happens."""
    stop = min(start + count, x.size)
    if start < stop:
        first = x.ctypes.data + start * x.itemsize
        for address in range(first, x.ctypes.data + stop * x.itemsize, 64):
            _prefetch_line(address)  # type: ignore[call-arg]


def _view(element: Any) -> Callable[[Any], Any]:
    """Makes what sees an array of elements of that size as one of that type, in its shape."""
    pointer = _pointer(element)

    @inner
    def view(x: Any) -> Any:
        return carray(pointer(x.ctypes.data), x.shape)

    return view


_byte_pointer = _pointer(types.uint8)
_signed_pointer = _pointer(types.int8)

as_floats = _view(types.float32)
as_integers = _view(types.int32)
"""The bits of floats."""
as_bytes = _view(types.uint8)
as_halves = _view(types.uint16)


@inner
def buffer(work: Any, index: int) -> Any:
    """For the values of a group; there are four. What an earlier kernel left is in it."""
    return work[index * GROUP * BLOCK : (index + 1) * GROUP * BLOCK]


@inner
def make_tools(work: Any) -> Any:
    """What every pass needs to work with: a float, and the same as int32; 1 / scale of each block; small integers."""
    one, small = work[_ONE : _ONE + 1], work[_BYTES:_PADDED]
    return (
        one,
        as_integers(one),
        work[_INVERSES : _INVERSES + GROUP],
        carray(_signed_pointer(small.ctypes.data), GROUP * BLOCK),
    )


@inner
def make_padded(work: Any) -> Any:
    """For the codes of a short block, at the length of a whole one of any codec."""
    return carray(_byte_pointer(work[_PADDED:_SMALL].ctypes.data), 4 * BLOCK)


@inner
def make_small(work: Any, index: int) -> Any:
    """For a block; there are five."""
    return work[_SMALL + index * BLOCK : _SMALL + (index + 1) * BLOCK]


class _Workspaces(threading.local):
    """One a thread: two kernels at once must not share it."""

    def __init__(self) -> None:
        self.floats: npt.NDArray[np.float32] = np.zeros(WORK_FLOATS, np.float32)


_workspaces = _Workspaces()


def workspace() -> npt.NDArray[np.float32]:
    """This thread's, to be lent to a kernel; float32 [WORK_FLOATS]."""
    return _workspaces.floats
