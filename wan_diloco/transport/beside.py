"""Work that runs for as long as a piece of code does, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from wan_diloco.errors import TransportError

__all__ = ["beside"]


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the body, at whose end they are cancelled; whatever fails first ends all, and is raised.

    Raises:
        TransportError: One of them, or the body, said so. What isn't of the network goes first.
    """
    group, tasks = asyncio.TaskGroup(), []
    try:
        async with group:
            tasks = [group.create_task(each) for each in work]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as problems:
        raise _first_of(problems) from problems
    finally:
        # A frame that holds a group, and is held by the exception of the group's own task, is a cycle, and keeps
        # sockets open until the garbage collector comes by.
        del group, tasks


def _first_of(problems: BaseExceptionGroup) -> BaseException:
    flat: list[BaseException] = []
    waiting: list[BaseException] = [problems]
    while waiting:
        problem = waiting.pop(0)
        if isinstance(problem, BaseExceptionGroup):
            waiting += problem.exceptions
        else:
            flat.append(problem)
    return next((each for each in flat if not isinstance(each, TransportError)), flat[0])
