"""How kernels are compiled.

Strict arithmetic: each operation is rounded once, in the order written. So no fastmath: contraction into fused
multiply-adds and reassociated sums change bits between machines, and `nnan` makes checks for NaN disappear. What is not
finite is found in the integer bits of the floats, which no floating-point flag can optimise away.

`nogil`: kernels run beside the event loop. Integers are cast to 32 bits everywhere, and blocks are slices of constant
length, because only then does LLVM use whole vectors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
import xxhash
from numba import types

__all__ = [
    "BYTES",
    "COUNT",
    "FACTOR",
    "HALVES",
    "MATRIX_BYTES",
    "MATRIX_HALVES",
    "PAIR",
    "SEGMENTS",
    "STATE",
    "VECTOR",
    "entry",
    "f32",
    "i8",
    "i32",
    "inner",
    "sources_digest",
    "u8",
    "u16",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

f32 = np.float32
i8 = np.int8
i32 = np.int32
u8 = np.uint8
u16 = np.uint16


# Read-only arrays are types of their own, and each function would be compiled for both: all are writable here.
COUNT: Final = types.int64
FACTOR: Final = types.float32
VECTOR: Final = types.Array(types.float32, 1, "C")
BYTES: Final = types.Array(types.uint8, 1, "C")
HALVES: Final = types.Array(types.uint16, 1, "C")
MATRIX_BYTES: Final = types.Array(types.uint8, 2, "C")
MATRIX_HALVES: Final = types.Array(types.uint16, 2, "C")
SEGMENTS: Final = types.Array(types.int64, 2, "C")
PAIR: Final[Any] = types.Tuple((types.float32, types.float32))  # type: ignore[no-untyped-call]
STATE: Final[Any] = types.Tuple((VECTOR, VECTOR, VECTOR))  # type: ignore[no-untyped-call]


def sources_digest(package: Path) -> str:
    """Tells apart machine code of different sources.

    Args:
        package: The folder of the kernels; the block size comes from a module beside it.
    """
    digest = xxhash.xxh3_64()
    for path in (*sorted(package.glob("*.py")), package.parent / "blocks.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_HOW: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}
_SOURCES: Final = sources_digest(Path(__file__).parent)


def inner(function: _Function) -> _Function:
    """A part of a kernel, called from kernels only.

    Always inlined: a call hands over arrays as half a dozen words each, which took up to a third of a kernel's time.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return cast("_Function", compiled)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes that are started together compile one after the other, so that all but the first find it done."""
    path = Path(tempfile.gettempdir()) / f"wan-diloco-kernels-{os.getuid()}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # no place for a lock either: each for itself
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def entry(result: Any, *arguments: Any) -> Callable[[_Function], _Function]:
    """A kernel that Python calls, compiled when its module is imported.

    The machine code is kept beside the module, or in the user's cache where that can't be written, so that only the
    first process on a machine compiles. Where nothing can be written each process does, and what is kept and can't be
    read, since power went or a disk was full, is thrown away. numba finds machine code by a function's name and by the
    age of its own module; here all modules of the package become part of it, so the name says which sources it is of.

    Args:
        result: Its type.
        arguments: Theirs; arrays are contiguous, and writable also where they are only read.
    """

    def compile_now(function: _Function) -> _Function:
        function.__qualname__ = f"{function.__qualname__}-{_SOURCES}"
        signature = result(*arguments)
        # Who only reads waits for nobody: a process that is stopped while it compiles must not keep others from
        # starting, a syncer least of all.
        with contextlib.nullcontext() if _is_kept(function, signature) else _one_at_a_time():
            return cast("_Function", _compiled(function, signature))

    return compile_now


def _is_kept(function: Any, signature: Any) -> bool:
    """Whether there is machine code, as far as the index of it says."""
    # Any error, as below: then whoever compiles finds out.
    with contextlib.suppress(Exception):
        dispatcher: Any = numba.njit(cache=True, **_HOW)(function)
        cache = dispatcher._cache  # noqa: SLF001 - numba has no other way
        key = cache._index_key(signature, dispatcher.targetctx.codegen())  # noqa: SLF001
        return key in cache._cache_file._load_index()  # noqa: SLF001
    return False


def _compiled(function: Any, signature: Any) -> Any:
    for _ in range(2):
        # Any error: numba lets through what unpickling raises, and what the system does. One of our own comes again.
        with contextlib.suppress(Exception):
            return numba.njit(signature, cache=True, **_HOW)(function)
        with contextlib.suppress(Exception):
            # Not compiled, this one only knows where the files are.
            lazy: Any = numba.njit(cache=True, **_HOW)(function)
            lazy._cache.flush()  # noqa: SLF001 - numba has no other way
    return numba.njit(signature, **_HOW)(function)
