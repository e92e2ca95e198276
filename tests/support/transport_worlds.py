"""The worlds in which the contract of a transport must hold alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.support.transport import EAST, poll, within
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.grpc_client import fetch_status, grpc_connection
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.transport.interface import Connection, SyncerHandler, SyncerServer
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.pacer import Pacer


class World(Protocol):
    """Somewhere to start servers and connections."""

    async def start(self, handler: SyncerHandler) -> SyncerServer: ...

    def connection(self, pacer: Pacer | None = None) -> Connection: ...

    async def status(self) -> dict[str, object]: ...


Scenario = Callable[[World], Coroutine[Any, Any, None]]
Runner = Callable[[Scenario], None]
# Most scenarios have no use for a Hello; virtual time passes quickly.
LIMITS = ServerLimits(hello_timeout_s=1e6, sessions_max=3, uploads_max=2, payload_bytes_max=2**24)


@dataclass
class MemoryWorld:
    network: MemoryNetwork

    async def start(self, handler: SyncerHandler) -> SyncerServer:
        server = self.network.server(handler)
        await server.start()
        return server

    def connection(self, pacer: Pacer | None = None) -> Connection:
        return self.network.connection(EAST, pacer)

    async def status(self) -> dict[str, object]:
        return self.network.fetch_status()


def run_in_memory(scenario: Scenario) -> None:
    async def main() -> None:
        async with MemoryNetwork(link=Link(delay_s=0.05), limits=LIMITS) as network:
            await scenario(MemoryWorld(network))

    run_virtual(main())


@dataclass
class GrpcWorld:
    address: str = "127.0.0.1:1"
    servers: list[SyncerServer] = field(default_factory=list)

    async def start(self, handler: SyncerHandler) -> SyncerServer:
        server = GrpcSyncerServer(handler, limits=LIMITS)
        self.servers.append(server)
        self.address = await server.start()
        return server

    def connection(self, pacer: Pacer | None = None) -> Connection:
        return grpc_connection(self.address, pacer)

    async def status(self) -> dict[str, object]:
        return await fetch_status(self.address, 10.0)


def run_over_grpc(scenario: Scenario, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    async def main() -> None:
        world = GrpcWorld()
        try:
            await scenario(world)
        finally:
            # Stopped a second time where all went well: gRPC complains at servers that are left running.
            for server in world.servers:
                await server.stop(0.0)
        # Nothing of ours or gRPC's may still run.
        with contextlib.suppress(TimeoutError):
            await within(poll(lambda: len(asyncio.all_tasks()) <= 2), 5.0)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
