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
import functools
import glob
import logging
import os
import tempfile
import threading
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
    "lock_path",
    "sources_digest",
    "u8",
    "u16",
]

_LOG: Final = logging.getLogger(__name__)
_POLL_S: Final = 0.1
_POLLS_MAX = 3000
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


def lock_path() -> Path:
    """What processes that compile these sources in this folder meet at; those of another checkout have their own."""
    name = xxhash.xxh3_64_hexdigest(f"{Path(__file__).parent}:{_SOURCES}".encode())
    return Path(tempfile.gettempdir()) / f"wan-diloco-kernels-{os.getuid()}-{name}.lock"


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes that are started together compile one after the other, so that all but the first find it done.

    Whoever has waited for far longer than compiling takes goes on by itself: that costs time, and the holder may hang.
    """
    try:
        descriptor = os.open(lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # no place for a lock either: each for itself
        yield
        return
    try:
        for poll in range(_POLLS_MAX):
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if poll == 0:
                _LOG.info("another process compiles the kernels: waiting for it")
            threading.Event().wait(_POLL_S)
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
        with contextlib.ExitStack() as held:
            # Who finds it waits for nobody: a syncer that comes back must not hang on whoever compiles something else.
            if not _is_kept(function):
                held.enter_context(_one_at_a_time())
                if not _is_kept(function):
                    _say_once()
            return cast("_Function", _compiled(function, result(*arguments)))

    return compile_now


@functools.cache
def _say_once() -> None:
    _LOG.info("compiling the kernels, which takes about a minute, once on a machine")


def _is_kept(function: Any) -> bool:
    """Whether there is machine code of it; it may still turn out to be damaged."""
    with contextlib.suppress(Exception):  # as below
        return any(Path(_uncompiled(function).stats.cache_path).glob(f"*{glob.escape(function.__qualname__)}*.nbi"))
    return False


def _uncompiled(function: Any) -> Any:
    """Knows where the files are, and nothing else."""
    return numba.njit(cache=True, **_HOW)(function)


def _compiled(function: Any, signature: Any) -> Any:
    for _ in range(2):
        # Any error: numba lets through what unpickling raises, and what the system does. One of our own comes again.
        with contextlib.suppress(Exception):
            return numba.njit(signature, cache=True, **_HOW)(function)
        with contextlib.suppress(Exception):
            _uncompiled(function)._cache.flush()  # noqa: SLF001 - numba has no other way
    return numba.njit(signature, **_HOW)(function)
