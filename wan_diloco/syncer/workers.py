"""Where slow work runs: named threads, or right here for runs that must be deterministic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar

__all__ = ["InlineExecutor", "Workers", "in_executor"]

T = TypeVar("T")


class InlineExecutor(Executor):
    """Runs each call before `submit` returns, in the caller's thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the call and return what it gave as a future that is done."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as exc:  # noqa: BLE001 -- a future's very contract: whatever was raised is its result
            future.set_exception(exc)
        return future


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The executors of one service.

    Attributes:
        maths: Merges, codecs, packing; as many threads as the configuration says.
        intake: As many, for what comes in: a merge must not hold up the wire.
        journal: One thread for the tape, and for flushing.
        files: One thread for snapshots, so that a slow disk delays neither maths nor the journal's queue.
    """

    maths: Executor
    intake: Executor
    journal: Executor
    files: Executor

    @classmethod
    def threads(cls, num_maths: int) -> Self:
        """Real threads."""
        return cls(
            maths=ThreadPoolExecutor(num_maths, thread_name_prefix="maths"),
            intake=ThreadPoolExecutor(num_maths, thread_name_prefix="intake"),
            journal=ThreadPoolExecutor(1, thread_name_prefix="journal"),
            files=ThreadPoolExecutor(1, thread_name_prefix="files"),
        )

    @classmethod
    def inline(cls) -> Self:
        """No threads: everything happens in the order in which it is asked for."""
        executor = InlineExecutor()
        return cls(maths=executor, intake=executor, journal=executor, files=executor)

    def shutdown(self) -> None:
        """Wait for what runs, drop what waits."""
        for executor in (self.maths, self.intake, self.journal, self.files):
            executor.shutdown(wait=True, cancel_futures=True)


async def in_executor(executor: Executor, fn: Callable[[], T]) -> T:
    """Run a call in an executor and wait for it; a cancelled wait doesn't stop the call."""
    return await asyncio.get_running_loop().run_in_executor(executor, fn)
