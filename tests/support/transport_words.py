"""Short words of which conversations over a transport are made."""

from __future__ import annotations

from tests.support.transport import (
    RecordingHandler,
    within,
)
from tests.support.transport_worlds import World
from wan_diloco.errors import TransportError
from wan_diloco.protocol.messages import (
    Acknowledged,
    Pace,
    Report,
    Start,
    SyncerMessage,
)
from wan_diloco.transport.interface import Connection, Session
from wan_diloco.units import FragmentId, GlobalStep, LocalStep

__all__ = ["START", "acknowledged", "collect", "connected", "pace", "report"]


START = Start(global_step=GlobalStep(0), anchor=0)


def pace(step: int) -> Pace:
    return Pace(global_step=GlobalStep(step), anchor=-step)


def report(step: int) -> Report:
    return Report(local_step=LocalStep(step), tokens=step, step_time_s=0.1, loss=None, learning_rate=1e-3, fragments=())


def acknowledged(step_hi: int) -> Acknowledged:
    return Acknowledged(fragment_id=FragmentId(1), step_lo=LocalStep(0), step_hi=LocalStep(step_hi))


async def collect(connection: Connection, into: list[SyncerMessage]) -> str:
    try:
        async for message in connection.messages():
            into.append(message)  # noqa: PERF401 - it must be there when the stream ends by raising
    except TransportError as problem:
        return str(problem)
    raise AssertionError("messages end by raising")


async def connected(world: World, handler: RecordingHandler) -> tuple[Connection, Session]:
    connection = world.connection()
    await within(connection.connect())
    await within(handler.until(lambda: len(handler.sessions) > len(handler.ended)))
    return connection, handler.sessions[-1]
