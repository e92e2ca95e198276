"""Tasks that must not outlive what they work for, like an upload its session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from wan_diloco.errors import TransportError

__all__ = ["Lifetime"]


class Lifetime:
    """Ends, once, and takes along whoever is inside `bound`.

    Owner: one event loop.
    """

    def __init__(self) -> None:
        """Begin."""
        self._reason: str | None = None
        # A dict for its order; values tell whom we cancelled ourselves.
        self._inside: dict[asyncio.Task[object], bool] = {}

    @property
    def reason(self) -> str | None:
        """Why it ended; None while it lasts."""
        return self._reason

    def end(self, reason: str) -> None:
        """End it; idempotent. Must not be called from inside `bound`."""
        if self._reason is not None:
            return
        self._reason = reason
        for task in self._inside:
            self._inside[task] = True
            task.cancel()

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Run the body only as long as this lasts.

        Raises:
            TransportError: It had ended, or ended meanwhile.
        """
        if self._reason is not None:
            raise TransportError(self._reason)
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a lifetime binds tasks")
        cancelled_before = task.cancelling()
        self._inside[task] = False
        try:
            yield
        except (asyncio.CancelledError, TransportError) as ended:
            # As in asyncio.timeout: ours to translate only if nobody else cancelled the task as well. A group of tasks
            # in the body may have made an error of what was a cancellation.
            if self._inside[task] and task.uncancel() <= cancelled_before:
                raise TransportError(self._reason) from ended
            raise
        finally:
            del self._inside[task]
            # The task's exception holds this frame: together they would be a cycle.
            del task
