"""TCP proxies that make a link bad: one goes silent without closing anything, one is far away."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self

__all__ = ["DelayingProxy", "StallingProxy"]


class _Proxy(ABC):
    """Forwards connections to an address. An asynchronous context; leaving it closes every connection.

    Args:
        target: "host:port".
    """

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
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
            await self._carry(reader, writer)
        except* OSError:
            pass
        finally:
            writer.close()

    @abstractmethod
    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, until the end."""

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.forwarded_bytes += len(data)


class StallingProxy(_Proxy):
    """Forwards until told to stall, as a cable does that is pulled.

    Args:
        target: "host:port".
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._flowing = asyncio.Event()
        self._flowing.set()

    def stall(self) -> None:
        """Forward nothing any more; connections stay open on both sides."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, what was held back too."""
        self._flowing.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            await self._flowing.wait()
            await self._write(writer, data)


class DelayingProxy(_Proxy):
    """Forwards everything a fixed time later, in either direction, as a long cable does; its rate isn't limited.

    Args:
        target: "host:port".
        delay_s: One way.
    """

    def __init__(self, target: str, delay_s: float) -> None:
        super().__init__(target)
        self._delay_s = delay_s

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # What is on its way, with its time of arrival; the end of the stream is the empty piece. The peers' own
        # flow control bounds it.
        travelling: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._arrive(travelling, writer))
            data = b"-"
            while data:
                data = await reader.read(2**16)
                travelling.put_nowait((asyncio.get_running_loop().time() + self._delay_s, data))

    async def _arrive(self, travelling: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            arrives_s, data = await travelling.get()
            await asyncio.sleep(arrives_s - asyncio.get_running_loop().time())
            if not data:
                return
            await self._write(writer, data)
