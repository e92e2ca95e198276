"""The worlds in which the contract of a transport must hold alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.interface import Connection, SyncerHandler, SyncerServer
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.pacer import Pacer
from tests.support.transport import EAST


class World(Protocol):
    """Somewhere to start servers and connections."""

    async def start(self, handler: SyncerHandler) -> SyncerServer: ...

    def connection(self, pacer: Pacer | None = None) -> Connection: ...

    async def status(self) -> dict[str, object]: ...


Scenario = Callable[[World], Coroutine[Any, Any, None]]
Runner = Callable[[Scenario], None]
LIMITS = ServerLimits(sessions_max=3, uploads_max=2, payload_bytes_max=2**24)


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


@pytest.fixture(params=["memory"])
def run(request: pytest.FixtureRequest) -> Runner:
    return run_in_memory
