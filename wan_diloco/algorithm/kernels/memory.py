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
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from wan_diloco.algorithm.blocks import BLOCK
from wan_diloco.algorithm.kernels.codes import GROUP
from wan_diloco.algorithm.kernels.compiled import inner

__all__ = [
    "as_bytes",
    "as_floats",
    "as_halves",
    "buffer",
    "make_inverses",
    "make_padded",
    "make_short",
    "make_small",
    "workspace",
]

_BUFFERS: Final = 4
# Behind the buffers, in floats, each on a cache line of its own: what `make_inverses`, `make_small`, `make_padded`,
# `make_short` give.
_INVERSES: Final = _BUFFERS * GROUP * BLOCK
_BYTES: Final = _INVERSES + max(GROUP, 16)
_PADDED: Final = _BYTES + GROUP * BLOCK // 4
_SHORT: Final = _PADDED + BLOCK
_SHORTS: Final = 3
WORK_FLOATS: Final = _SHORT + _SHORTS * BLOCK


def _pointer(element: Any) -> Callable[..., Any]:
    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - the signature is numba's
        pointed = types.CPointer(element)  # type: ignore[no-untyped-call]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            return builder.inttoptr(arguments[0], context.get_value_type(pointed))

        return pointed(types.uintp), generate

    return pointer


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
as_bytes = _view(types.uint8)
as_halves = _view(types.uint16)


@inner
def buffer(work: Any, index: int) -> Any:
    """For the values of a group; there are four. What an earlier kernel left is in it."""
    return work[index * GROUP * BLOCK : (index + 1) * GROUP * BLOCK]


@inner
def make_inverses(work: Any) -> Any:
    """For 1 / scale of each block of a group."""
    return work[_INVERSES : _INVERSES + GROUP]


@inner
def make_small(work: Any) -> Any:
    """For the elements of a group as int8."""
    return carray(_signed_pointer(work[_BYTES:_PADDED].ctypes.data), GROUP * BLOCK)


@inner
def make_padded(work: Any) -> Any:
    """For the codes of a short block, at the length of a whole one of any codec."""
    return carray(_byte_pointer(work[_PADDED:_SHORT].ctypes.data), 4 * BLOCK)


@inner
def make_short(work: Any, index: int) -> Any:
    """For the values of a short block; there are three."""
    return work[_SHORT + index * BLOCK : _SHORT + (index + 1) * BLOCK]


class _Workspaces(threading.local):
    """One a thread: two kernels at once must not share it."""

    def __init__(self) -> None:
        self.floats: npt.NDArray[np.float32] = np.zeros(WORK_FLOATS, np.float32)


_workspaces = _Workspaces()


def workspace() -> npt.NDArray[np.float32]:
    """This thread's, to be lent to a kernel; float32 [WORK_FLOATS]."""
    return _workspaces.floats
