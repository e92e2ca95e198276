"""An event loop whose time is a number: it jumps to the next timer when nothing is left to do.

Real drivers run on it unchanged. A run is repeatable as long as nothing in it depends on real I/O, on
threads, on hash order or on chance that isn't seeded; work given to an executor is done on the spot.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from wan_diloco.clock import ManualClock

__all__ = ["NothingScheduledError", "VirtualTimeLoop", "run_virtual"]

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class NothingScheduledError(RuntimeError):
    """Every task waits for another, and no timer is set: in real time this would hang for ever."""


class _JumpingSelector(selectors.BaseSelector):
    """Looks at real files without waiting, and moves the clock instead."""

    def __init__(self, clock: ManualClock) -> None:
        self._real = selectors.DefaultSelector()
        self._clock = clock

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise NothingScheduledError("nothing is ready and no timer is set")
        self._clock.advance(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop under virtual time.

    Args:
        clock: Its time; whoever else needs the time should be given the same clock.
    """

    def __init__(self, clock: ManualClock) -> None:
        """Start at the clock's time."""
        super().__init__(_JumpingSelector(clock))
        self._clock = clock

    @property
    def clock(self) -> ManualClock:
        """The loop's time as a clock."""
        return self._clock

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now_s()

    def run_in_executor(
        self,
        executor: Executor | None,  # noqa: ARG002 - the signature is the base class's
        func: Callable[[*_Arguments], _Result],
        *args: *_Arguments,
    ) -> asyncio.Future[_Result]:
        """Do the work now, in no virtual time, so that threads can't change the order of things."""
        done: asyncio.Future[_Result] = self.create_future()
        try:
            result = func(*args)
        except Exception as problem:  # noqa: BLE001 - it belongs to whoever awaits
            done.set_exception(problem)
        else:
            done.set_result(result)
        return done


def run_virtual(main: Coroutine[Any, Any, _Result], clock: ManualClock | None = None) -> _Result:
    """Run a coroutine to its end under virtual time, as `asyncio.run` does under real time.

    Raises:
        NothingScheduledError: It waits for something that nothing will bring.
    """
    chosen = clock or ManualClock()
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(chosen)) as runner:
        return runner.run(main)
