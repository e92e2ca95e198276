"""A TCP proxy that can go silent without closing anything, as a pulled cable does."""

from __future__ import annotations

import asyncio
from typing import Self


class StallingProxy:
    """Forwards connections to an address until told to stall. An asynchronous context.

    Args:
        target: "host:port".
    """

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.forwarded_bytes = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        """Forward nothing any more; connections stay open on both sides."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, what was held back too."""
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._forward(reader, far_writer))
                    group.create_task(self._forward(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
                self.forwarded_bytes += len(data)
        except OSError:
            pass
        finally:
            writer.close()
