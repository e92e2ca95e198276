"""A network in one process: the same ends as over gRPC, joined by links of given delay and rate.

Every message is real bytes made by `wire`. Under a virtual-time loop a run is exactly repeatable: nothing
here reads a clock but the loop's, and chance comes from the seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Self

from wan_diloco.errors import ConfigError, DecodeError, PeerUnavailable, TransportError
from wan_diloco.protocol.messages import LearnerMessage, SyncerMessage
from wan_diloco.transport.connection import ClientConnection
from wan_diloco.transport.hub import SessionHub
from wan_diloco.transport.interface import SyncerHandler
from wan_diloco.transport.memory_link import Call, Line, Link
from wan_diloco.transport.options import ConnectionOptions, ServerLimits
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.streams import Metadata, Method
from wan_diloco.units import LearnerId
from wan_diloco.wire.convert import decode_learner, decode_status, decode_syncer

__all__ = ["Link", "MemoryNetwork", "MemoryServer"]

Drop = Callable[[LearnerMessage | SyncerMessage], bool]


class MemoryNetwork:
    """Joins one syncer and any learners. An asynchronous context: what it started ends with it.

    Owner: one event loop.

    Args:
        links: Of learners that don't have the default one.
        link: Of all others.
        seed: For jitter and session secrets.
        limits: Of the servers made here.
        options: Of the connections made here.
    """

    def __init__(
        self,
        *,
        links: Mapping[LearnerId, Link] | None = None,
        link: Link | None = None,
        seed: int = 0,
        limits: ServerLimits | None = None,
        options: ConnectionOptions | None = None,
    ) -> None:
        """Nobody is there yet."""
        self.limits = limits or ServerLimits()
        self._options = options or ConnectionOptions()
        self._links = dict(links or {})
        self._link = link or Link()
        self._rng = random.Random(seed)
        self._lines: dict[LearnerId, Line] = {}
        self._group = asyncio.TaskGroup()
        self._hub: SessionHub | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Break every call, then wait for those that served them."""
        for line in self._lines.values():
            line.break_calls("the network is gone")
        await self._group.__aexit__(kind, problem, trace)

    def server(self, handler: SyncerHandler) -> MemoryServer:
        """A syncer's end, to be started; one at a time, as with a port."""
        return MemoryServer(self, handler)

    def connection(self, learner_id: LearnerId, pacer: Pacer | None = None) -> ClientConnection:
        """A learner's end, to be connected.

        Args:
            learner_id: Whose link it goes over.
            pacer: Of its uplink.
        """
        return ClientConnection(_MemoryDialer(self, self.line(learner_id)), pacer or Pacer(), self._options)

    def fetch_status(self) -> dict[str, object]:
        """What `grpc_client.fetch_status` gives.

        Raises:
            PeerUnavailable: No server runs.
        """
        return decode_status(self._serving().status())

    def set_link(self, learner_id: LearnerId, link: Link) -> None:
        """Change a link; messages under way keep the old one's times."""
        self.line(learner_id).link = link

    def cut(self, learner_id: LearnerId, *, noticed_after_s: float = 0.0) -> None:
        """Cut a link: what is under way is lost, nobody can connect, and both ends notice after a while."""
        self.line(learner_id).cut(noticed_after_s)

    def restore(self, learner_id: LearnerId) -> None:
        """Make a cut link usable again; calls that it broke stay broken."""
        self.line(learner_id).restore()

    def drop_next(self, learner_id: LearnerId, which: Drop) -> None:
        """Lose the next control message, of either end, for which this holds; once."""
        self.line(learner_id).drops.append(
            lambda request, data: which(decode_learner(data) if request else decode_syncer(data))
        )

    def line(self, learner_id: LearnerId) -> Line:
        """The state of a learner's link."""
        if learner_id not in self._lines:
            self._lines[learner_id] = Line(self._links.get(learner_id, self._link), self._rng)
        return self._lines[learner_id]

    def open(self, line: Line, method: Method, metadata: Metadata) -> Call:
        """Open a call over a line; used by connections."""
        call = Call(line, metadata, peer=f"memory:{method.name.lower()}", control=method is Method.CONTROL)
        line.after_delay(call, lambda: self.start(self._serve(call, method)))
        return call

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run something as long as the network lives; used by connections."""
        self._group.create_task(work)

    def listen(self, hub: SessionHub) -> None:
        """Let a hub serve; used by servers.

        Raises:
            ConfigError: Another one does.
        """
        if self._hub is not None:
            raise ConfigError("another syncer listens on this network")
        self._hub = hub

    def stop_listening(self, *, in_order: bool) -> None:
        """Let nobody serve, and break the calls that are left; used by servers.

        Args:
            in_order: Whether what was written before still arrives.
        """
        self._hub = None
        for line in self._lines.values():
            line.break_calls("the syncer is gone", finished_too=not in_order)

    def make_token(self) -> str:
        """A secret from the seed."""
        return f"{self._rng.getrandbits(128):032x}"

    def _serving(self) -> SessionHub:
        if self._hub is None:
            raise PeerUnavailable("nobody listens")
        return self._hub

    async def _serve(self, call: Call, method: Method) -> None:
        stream = call.server
        try:
            hub = self._serving()
            with call.served():
                match method:
                    case Method.CONTROL:
                        await hub.control(stream)
                    case Method.UPLOAD:
                        await hub.upload(stream)
                    case Method.DOWNLOAD:
                        await hub.download(stream)
                    case Method.GIVE:
                        await hub.give(stream)
                    case Method.TAKE:
                        await hub.take(stream)
                    case Method.STATUS:
                        raise AssertionError("status is not a call here")
            call.finish(None)
        except DecodeError as problem:
            call.finish(TransportError(f"refused: {problem}"))
        except TransportError as problem:
            call.finish(problem)


class MemoryServer:
    """Implements `interface.SyncerServer`; made by `MemoryNetwork.server`."""

    def __init__(self, network: MemoryNetwork, handler: SyncerHandler) -> None:
        """Not listening yet."""
        self._network = network
        self._hub = SessionHub(handler, network.limits, network.make_token)

    async def start(self) -> str:
        """Begin to listen.

        Returns:
            A name; connections don't need it.

        Raises:
            ConfigError: Another syncer listens.
        """
        self._network.listen(self._hub)
        return "memory:1"

    def set_rates(self, *, ingress_bytes_per_s: float | None, egress_bytes_per_s: float | None) -> None:
        """Cap what all sessions together receive and are sent, from now on; None for no cap."""
        self._hub.set_rates(ingress_bytes_per_s=ingress_bytes_per_s, egress_bytes_per_s=egress_bytes_per_s)

    async def stop(self, grace_s: float) -> None:
        """Close all sessions, giving what was queued that long to leave; every handler call is over after."""
        await self._hub.close(grace_s)
        self._network.stop_listening(in_order=True)
        await self._hub.close(grace_s=1.0)

    async def crash(self) -> None:
        """Vanish without a word, as a process does that is killed."""
        self._network.stop_listening(in_order=False)
        await self._hub.close(grace_s=1.0)


class _MemoryDialer:
    """Implements `streams.Dialer`."""

    def __init__(self, network: MemoryNetwork, line: Line) -> None:
        self._network = network
        self._line = line
        self._calls: list[Call] = []

    def control(self, outgoing: AsyncIterator[bytes]) -> Call:
        call = self._open(Method.CONTROL, {})
        self._network.start(call.pump(outgoing))
        return call

    def call(self, method: Method, metadata: Metadata, channel: int = 0) -> Call:  # noqa: ARG002 - a line has one
        return self._open(method, metadata)

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()

    def _open(self, method: Method, metadata: Metadata) -> Call:
        self._calls = [call for call in self._calls if not call.over]
        call = self._network.open(self._line, method, metadata)
        self._calls.append(call)
        return call
