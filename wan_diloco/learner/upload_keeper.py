"""Contributions between snapshot and drop: encoded once, kept, and sent as often as streams break."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from wan_diloco.errors import NonFiniteError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

    from wan_diloco.protocol.messages import ContributionHeader
    from wan_diloco.transport.interface import Connection

__all__ = ["Spawn", "UploadKeeper"]

T = TypeVar("T")

# When only the stream broke, trying again at once would find the same trouble; when the connection did, its
# end is usually a moment behind, and cancels this.
_BROKEN_PAUSE_S: Final = 0.5


class Spawn(Protocol):
    """Runs a coroutine in somebody's task group."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Begin, and return the task."""
        ...


class UploadKeeper:
    """The encoded contributions of a learner, and the streams that carry them.

    Owner: the uplink's event loop.

    Args:
        spawn: Of the owner's task group.
        worker: Where encoding happens.
        broken: Told which upload's stream broke.
        unusable: Told which contribution can't be encoded, since it isn't finite; it isn't kept.
    """

    def __init__(
        self,
        *,
        spawn: Spawn,
        worker: Executor,
        broken: Callable[[ContributionHeader], None],
        unusable: Callable[[ContributionHeader], None],
    ) -> None:
        """Keep nothing yet."""
        self._spawn = spawn
        self._worker = worker
        self._broken = broken
        self._unusable = unusable
        self._encoded: dict[ContributionHeader, asyncio.Task[list[bytes] | None]] = {}
        self._sending: dict[ContributionHeader, asyncio.Task[None]] = {}
        # Of these the syncer may have a part, or all.
        self._tried: set[ContributionHeader] = set()

    def __contains__(self, header: ContributionHeader) -> bool:
        """Whether the contribution is kept."""
        return header in self._encoded

    def encode(self, header: ContributionHeader, job: Callable[[], list[bytes]], then: Callable[[], None]) -> None:
        """Begin to encode a contribution, and keep it until `drop`.

        Args:
            header: Which; not yet kept.
            job: Gives its frames; run on the worker.
            then: Called when the job has read what it reads, however it ended.
        """
        self._encoded[header] = self._spawn(self._encode(header, job, then))

    def send(self, header: ContributionHeader, connection: Connection, spread_s: float) -> None:
        """Send a contribution that is kept, unless it is being sent already."""
        if header not in self._sending:
            encoded = self._encoded[header]
            self._sending[header] = self._spawn(self._send(header, encoded, connection, spread_s))

    def drop(self, header: ContributionHeader) -> None:
        """Forget a contribution, and end its stream."""
        self._encoded.pop(header, None)
        self._tried.discard(header)
        task = self._sending.pop(header, None)
        if task is not None:
            task.cancel()

    def stop_sending(self) -> None:
        """End all streams, since their connection ended; everything is still kept."""
        for task in self._sending.values():
            task.cancel()
        self._sending.clear()

    async def _encode(
        self, header: ContributionHeader, job: Callable[[], list[bytes]], then: Callable[[], None]
    ) -> list[bytes] | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, job)
        except NonFiniteError:
            self._encoded.pop(header, None)
            self._unusable(header)
            return None
        finally:
            then()

    async def _send(
        self,
        header: ContributionHeader,
        encoded: asyncio.Task[list[bytes] | None],
        connection: Connection,
        spread_s: float,
    ) -> None:
        # Shielded: the end of a stream must not end the encoding that the next stream will wait for.
        frames = await asyncio.shield(encoded)
        if frames is not None:
            unasked = header not in self._tried
            self._tried.add(header)
            try:
                await connection.upload(header, frames, spread_s, unasked=unasked)
            except TransportError:
                await asyncio.sleep(_BROKEN_PAUSE_S)
                self._sending.pop(header, None)
                self._broken(header)
                return
        self._sending.pop(header, None)
