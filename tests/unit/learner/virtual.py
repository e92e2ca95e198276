"""A loop whose time passes only while nothing can happen, and an executor without threads."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waiting costs no time, and the loop is the clock too."""

    def __init__(self) -> None:
        super().__init__(_Selector(self._pass))
        self._virtual_s = 0.0

    def time(self) -> float:
        return self._virtual_s

    def now_s(self) -> float:
        return self._virtual_s

    def wall_s(self) -> float:
        return self._virtual_s

    def _pass(self, duration_s: float) -> None:
        self._virtual_s += duration_s


class _Selector(selectors.SelectSelector):
    def __init__(self, passed: Callable[[float], None]) -> None:
        super().__init__()
        self._passed = passed

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("everybody waits for something that never comes")
            self._passed(timeout)
        return ready


class InlineExecutor(Executor):
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:  # noqa: BLE001 -- what a future is for
            future.set_exception(exc)
        return future


class HeldExecutor(InlineExecutor):
    """Inline as long as it isn't held; what is given to it meanwhile is done when it is let go."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] | None = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._waiting is None:
            return super().submit(fn, *args, **kwargs)
        future: Future[T] = Future()
        self._waiting.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future

    def hold(self) -> None:
        self._waiting = []

    def let_go(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for job in waiting:
            job()


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
