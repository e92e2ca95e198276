"""Importing what a long-lived process needs, quickly."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["loading"]


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import within this: nobody looks for garbage meanwhile, nor later in what the modules consist of.

    Torch and numba make objects by the hundred thousand, all of which stay. The collector goes through them again and
    again while they come, which is more than a third of the time that the imports take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
