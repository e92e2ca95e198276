"""Inner moments on their way from and to peers: the uplink's streams that carry them, and the row that they lie in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import TransportError
from wan_diloco.protocol.events import StateBroken, StateDescribed, StateFetched, StateProgress

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    import numpy as np
    from numpy.typing import NDArray

    from wan_diloco.learner.state_area import StateArea
    from wan_diloco.learner.upload_keeper import Spawn
    from wan_diloco.protocol.events import LearnerEvent
    from wan_diloco.protocol.rejoin_messages import StateOffered
    from wan_diloco.transport.interface import Connection
    from wan_diloco.units import TransferId

__all__ = ["StateKeeper"]

_SAY_EVERY_S: Final = 1.0


class StateKeeper:
    """What a learner gives and takes.

    Owner: the uplink's event loop.

    Args:
        area: The row.
        spawn: Of the owner's task group.
        worker: Where rows are looked at and let go of, for seconds where they are long: one thread that keeps the order
            of its jobs, and has no contribution's.
        tell: The machine.
    """

    def __init__(
        self, area: StateArea, *, spawn: Spawn, worker: Executor, tell: Callable[[LearnerEvent], None]
    ) -> None:
        """Nothing is under way."""
        self._area = area
        self._spawn = spawn
        self._worker = worker
        self._tell = tell
        self._giving: dict[TransferId, asyncio.Task[None]] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None

    def pin(self, ask: Callable[[], None]) -> None:
        """Have the trainer asked for its moments, when the row is free for them."""
        if self._releasing is None:
            ask()
        else:
            self._spawn(_after(self._releasing, ask))

    def describe(self, number: int) -> None:
        """Look at what the trainer pinned."""
        self._spawn(self._describe(number))

    def give(self, transfer: TransferId, connection: Connection) -> None:
        """Send what is pinned, until it is through or `end_giving`."""
        self._giving[transfer] = self._spawn(self._give(transfer, connection))

    def end_giving(self, transfer: TransferId) -> None:
        """Stop; does nothing when it is over."""
        task = self._giving.pop(transfer, None)
        if task is not None:
            task.cancel()

    def fetch(self, offer: StateOffered, connection: Connection) -> None:
        """Take what is offered, in place of any other."""
        before = self._stop_fetching()
        self._fetching = self._spawn(self._fetch(offer, connection, before))

    def stop(self) -> None:
        """The connection ended; what came stays."""
        for transfer in tuple(self._giving):
            self.end_giving(transfer)
        self._stop_fetching()

    def release(self) -> None:
        """Let go of what is pinned or fetched."""
        self.stop()
        self._area.spoilt()
        self._releasing = self._spawn(self._release())

    def _stop_fetching(self) -> asyncio.Task[None] | None:
        task, self._fetching = self._fetching, None
        if task is not None:
            task.cancel()
        return task

    async def _release(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, self._area.release)
        if self._releasing is asyncio.current_task():
            self._releasing = None

    async def _describe(self, number: int) -> None:
        digest, finite = await asyncio.get_running_loop().run_in_executor(self._worker, self._area.describe)
        size_bytes = self._area.size_bytes
        self._tell(StateDescribed(number=number, size_bytes=size_bytes, digest=digest, finite=finite))

    async def _give(self, transfer: TransferId, connection: Connection) -> None:
        try:
            await connection.give_state(transfer, self._area.row)
        except TransportError:
            # The taker knows as well, and says so to the syncer.
            pass
        finally:
            self._giving.pop(transfer, None)

    async def _fetch(self, offer: StateOffered, connection: Connection, before: asyncio.Task[None] | None) -> None:
        # Two must not write into the row, nor one while it is let go of.
        if busy := [task for task in (before, self._releasing) if task is not None]:
            await asyncio.wait(busy)
        transfer, manifest = offer.transfer, offer.manifest
        if manifest.size_bytes != self._area.size_bytes:
            reason = f"a state of {manifest.size_bytes} bytes, not {self._area.size_bytes}"
            self._tell(StateBroken(transfer=transfer, reason=reason))
            return
        self._area.begin(manifest.digest)
        try:
            await connection.take_state(transfer, _Sink(self._area, self._on_progress(transfer)))
        except TransportError as problem:
            self._tell(StateBroken(transfer=transfer, reason=str(problem)))
            return
        digest, finite = await asyncio.get_running_loop().run_in_executor(self._worker, self._area.describe)
        if digest == manifest.digest and finite:
            self._tell(StateFetched(transfer=transfer))
        else:
            self._area.spoilt()
            self._tell(StateBroken(transfer=transfer, reason="it isn't what its donor pinned"))

    def _on_progress(self, transfer: TransferId) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        told_s = loop.time()

        def came() -> None:
            nonlocal told_s
            if loop.time() - told_s >= _SAY_EVERY_S:
                told_s = loop.time()
                self._tell(StateProgress(transfer=transfer))

        return came


async def _after(task: asyncio.Task[None], ask: Callable[[], None]) -> None:
    await asyncio.wait([task])
    ask()


class _Sink:
    """Implements `transport.state_calls.StateSink`; tells when something came."""

    def __init__(self, area: StateArea, came: Callable[[], None]) -> None:
        self._area = area
        self._came = came

    @property
    def size_bytes(self) -> int:
        return self._area.size_bytes

    @property
    def received_bytes(self) -> int:
        return self._area.received_bytes

    def put(self, raw: NDArray[np.uint8]) -> None:
        self._area.put(raw)
        self._came()
