"""A region's link to its syncer as a TCP proxy: cut, half-open, slow, late or noisy, as it is told.

No packets: what is lost of a TCP stream on a real link comes later, and is held here. What is carried isn't looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final, Self

from wan_diloco.lab.lanes import Lane
from wan_diloco.lab.links import GOOD, LinkCounts, LinkState, Passage

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["LinkProxy", "loopback_socket"]

# Pieces on their way at once in one direction of a connection: what a long and fast link holds.
_TRAVELLING_MAX: Final = 1024
_CONNECT_S: Final = 10.0


def loopback_socket() -> socket.socket:
    """A socket that listens on a free port of this machine: whoever comes before it is served waits in its queue."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    listening.setblocking(False)
    return listening


class _Connection:
    """One connection of a peer and its continuation to the target."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.writers = (near, far)
        # Bytes of it vanished, so that what follows makes no sense.
        self.torn = False

    def reset(self) -> None:
        """End both sides at once; what wasn't sent yet is dropped."""
        for writer in self.writers:
            writer.transport.abort()

    def close(self) -> None:
        """End both sides when what was written is out."""
        for writer in self.writers:
            writer.close()


class LinkProxy:
    """Forwards connections to a syncer. An asynchronous context: leaving it resets what is open.

    Owner: the event loop.

    Args:
        target: Where connections go on to, "host:port", asked anew for each; "" when there is nobody, which resets it.
        rng: For noise.
        listening: Where connections come in; a free port of this machine when not given.
    """

    def __init__(self, target: Callable[[], str], rng: random.Random, listening: socket.socket | None = None) -> None:
        """Listen, and serve nobody yet."""
        self._target = target
        self._listening = listening or loopback_socket()
        self._state = GOOD
        self._up, self._down = Lane(rng), Lane(rng)
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = 0
        self._server: asyncio.Server | None = None
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"

    async def __aenter__(self) -> Self:
        """Serve."""
        self._server = await asyncio.start_server(self._accept, sock=self._listening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reset everything."""
        assert self._server is not None, "it was entered"
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def state(self) -> LinkState:
        """How the link is."""
        return self._state

    @property
    def counts(self) -> LinkCounts:
        """What went over it."""
        return LinkCounts(
            up_bytes=self._up.carried_bytes,
            down_bytes=self._down.carried_bytes,
            lost_bytes=self._up.lost_bytes + self._down.lost_bytes,
            flipped_bits=self._up.flipped_bits + self._down.flipped_bits,
            opened=self._opened,
            open=len(self._connections),
        )

    def change(self, state: LinkState) -> None:
        """Be so from now on, for connections that are open too."""
        self._state = state
        self._up.change(state.up)
        self._down.change(state.down)
        lossy = Passage.LOST in (state.up.passage, state.down.passage)
        for connection in list(self._connections):
            if state.cut or (connection.torn and not lossy):
                connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if (connection := await self._connected(near)) is not None:
                await self._serve(reader, *connection)
        except asyncio.CancelledError:
            # Ours, at the end of the proxy: the server that started this task awaits nothing of it.
            near.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _connected(self, near: asyncio.StreamWriter) -> tuple[asyncio.StreamReader, _Connection] | None:
        """The continuation of a connection; None, and its reset, when there is none."""
        host, _, port = self._target().rpartition(":")
        if host and not self._state.cut:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_CONNECT_S):
                    far_reader, far = await asyncio.open_connection(host.strip("[]"), int(port))
                connection = _Connection(near, far)
                if not self.state.cut:  # meanwhile
                    return far_reader, connection
                connection.reset()
        near.transport.abort()
        return None

    async def _serve(
        self, reader: asyncio.StreamReader, far_reader: asyncio.StreamReader, connection: _Connection
    ) -> None:
        near, far = connection.writers
        self._connections.add(connection)
        self._opened += 1
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(self._up, connection, reader, far))
                group.create_task(self._carry(self._down, connection, far_reader, near))
            connection.close()
        except BaseException:
            connection.reset()
            raise
        finally:
            self._connections.discard(connection)

    async def _carry(
        self, lane: Lane, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Everything that comes in one direction, until its end; what breaks resets the connection."""
        # With the time of each arrival; the end of the stream is the empty piece.
        travelling: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_TRAVELLING_MAX)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._deliver(lane, connection, travelling, writer))
                await self._collect(lane, connection, travelling, reader)
        except* OSError:
            connection.reset()

    async def _collect(
        self,
        lane: Lane,
        connection: _Connection,
        travelling: asyncio.Queue[tuple[float, bytes]],
        reader: asyncio.StreamReader,
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(lane.piece_bytes):
            if lane.direction.passage is Passage.LOST:
                self._lose(lane, connection, data)
                continue
            await lane.admit(len(data))
            await travelling.put((loop.time() + lane.direction.delay_s, data))
        await travelling.put((loop.time() + lane.direction.delay_s, b""))

    async def _deliver(
        self,
        lane: Lane,
        connection: _Connection,
        travelling: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
    ) -> None:
        while True:
            arrives_s, data = await travelling.get()
            await lane.pass_gate(arrives_s)
            if lane.direction.passage is Passage.LOST:
                # It was on its way; the end of a stream vanishes as bytes do.
                self._lose(lane, connection, data)
                if not data:
                    return
            elif not data:
                if not connection.torn:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                return
            else:
                writer.write(lane.spoil(data))
                await writer.drain()
                lane.carried_bytes += len(data)

    def _lose(self, lane: Lane, connection: _Connection, data: bytes) -> None:
        lane.lost_bytes += len(data)
        connection.torn = True
