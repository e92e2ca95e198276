"""The C library's allocator, set up for processes that move bulk.

A message of a mebibyte is mapped afresh by glibc, page by page, and given back at once: that costs more processor time
than everything else that a message needs. With the thresholds raised its memory stays and is used again. They are
raised by `mallopt`, since environment variables would have to be there before the process starts.
"""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

# From malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
# No message is as big. What is, is mapped by itself and gone when it is let go: glibc takes up to 32 MiB here, but
# Python's protobuf gives the whole heap's free pages back at every 10,000th block it frees, on whatever thread that
# happens to be, and what lay free for bigger things held the event loop up for some 15 ms then.
_MAPPED_BYTES_MIN: Final = 4 * 2**20
# Never give back the end of the heap: the next message needs it.
_TRIM_BYTES: Final = 2**31 - 1
# The heap grows by as much at a time; address space only, a page is taken when something is written to it.
_GROWTH_BYTES: Final = 64 * 2**20
# One heap for all threads: in heaps of their own, what one thread frees is kept and the next allocates anew.
_ARENAS: Final = 1
_PROBE_BYTES: Final = 2 * 2**20


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2`: what the allocator holds."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def keep_freed_memory() -> str:
    """Make this process's allocator keep the memory of messages for the next ones.

    Ordering: at the process's start, before anything big is allocated.

    Returns:
        Why it has no effect, in a sentence; empty when it has. Without it everything works, for more processor time.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "mallinfo2"):
        return "the C library isn't glibc 2.33 or newer"
    settings = (
        (_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN),
        (_M_TRIM_THRESHOLD, _TRIM_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
        (_M_ARENA_MAX, _ARENAS),
    )
    if not all(library.mallopt(parameter, value) for parameter, value in settings):
        return "glibc refused the thresholds"
    return "" if _is_kept(library) else "another allocator is in the place of glibc's"


def give_back_freed_memory() -> None:
    """Let the system have what is free now, wherever in the heap it lies; later messages are kept as before.

    For once, after something big that won't come again. Nothing happens where the C library isn't glibc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _is_kept(library: ctypes.CDLL) -> bool:
    """Whether a block as big as a message comes from glibc's heap now, and not from a mapping of its own."""
    library.mallinfo2.restype = _MallocInfo
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    before = library.mallinfo2()
    block = library.malloc(_PROBE_BYTES)
    after = library.mallinfo2()
    library.free(block)
    in_heap: int = after.uordblks - before.uordblks
    return in_heap >= _PROBE_BYTES and after.hblkhd == before.hblkhd
