"""An uplink's service in virtual time, over connections that do what a test says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tests.unit.learner.conftest import MakeConfig
from tests.unit.learner.virtual import HeldExecutor, InlineExecutor, VirtualLoop, run_virtual
from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import Payload, codec_by_name
from wan_diloco.algorithm.publication import apply_update, digest
from wan_diloco.errors import TransportError
from wan_diloco.learner.ipc import Command, FragmentPosition, InstallValue, LearnerPosition
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.state_area import StateArea
from wan_diloco.learner.uplink_plan import held_fragments, learner_machine
from wan_diloco.learner.uplink_rate import UplinkRate
from wan_diloco.learner.uplink_service import UplinkService
from wan_diloco.models import run_layout
from wan_diloco.protocol.events import (
    BoundaryPassed,
    Installed,
    ShowReason,
    SnapshotTaken,
)
from wan_diloco.protocol.messages import (
    ContributionHeader,
    LearnerMessage,
    Pull,
    SegmentKind,
    SyncerMessage,
    UpdateHeader,
    UpdateSegment,
    Welcome,
)
from wan_diloco.transport.interface import Counters, Frames
from wan_diloco.transport.pacer import Pacer
from wan_diloco.transport.state_calls import StateSink
from wan_diloco.units import (
    Epoch,
    FragmentId,
    GlobalStep,
    Incarnation,
    LocalStep,
    RoundId,
    ShardId,
    Term,
    TransferId,
    Version,
)
from wan_diloco.wire.frames import Assembler, Buffers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["STATE_BYTES", "F", "ScriptedConnection", "Uplink", "V", "decoded", "installed", "play", "pull", "welcome"]


T = TypeVar("T")
F = FragmentId(1)
STATE_BYTES = 4096
V = [Version(Epoch(0), count) for count in range(5)]


class ScriptedConnection:
    """What the service says is kept; what the syncer says is put in."""

    def __init__(self, *, refuses: TransportError | None = None, breaks: int = 0) -> None:
        self.counters = Counters()
        self.refuses = refuses
        self.breaks = breaks
        self.said: list[LearnerMessage] = []
        self.uploads: list[tuple[ContributionHeader, Frames]] = []
        self.unasked: list[bool] = []
        self.incoming: asyncio.Queue[SyncerMessage | None] = asyncio.Queue()
        self.arriving: asyncio.Queue[tuple[UpdateHeader, list[Buffers]]] = asyncio.Queue()
        self.closed = False
        self.round_trips: list[float] = []
        self.given: list[tuple[TransferId, NDArray[np.uint8]]] = []
        self.given_up: list[TransferId] = []
        self.taken: list[tuple[TransferId, int]] = []
        self.states: dict[TransferId, list[NDArray[np.uint8]]] = {}

    async def connect(self) -> None:
        if self.refuses is not None:
            raise self.refuses

    def set_round_trip(self, rtt_s: float) -> None:
        self.round_trips.append(rtt_s)

    def send(self, message: LearnerMessage) -> None:
        self.said.append(message)

    async def messages(self) -> AsyncIterator[SyncerMessage]:
        while (message := await self.incoming.get()) is not None:
            yield message
        raise TransportError("the line is cut")

    async def maintain(self) -> None:
        await asyncio.Event().wait()

    async def updates(self) -> AsyncIterator[tuple[UpdateHeader, list[Buffers]]]:
        while True:
            yield await self.arriving.get()

    async def upload(
        self, header: ContributionHeader, frames: Frames, spread_s: float, *, unasked: bool = False
    ) -> bool:
        self.uploads.append((header, frames))
        self.unasked.append(unasked)
        if self.breaks:
            self.breaks -= 1
            raise TransportError("the stream broke")
        return True

    async def give_state(self, transfer: TransferId, row: NDArray[np.uint8]) -> None:
        self.given.append((transfer, row.copy()))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(transfer)
            raise

    async def take_state(self, transfer: TransferId, sink: StateSink) -> None:
        """Give what the test has put there for that transfer, as far as it goes; then break if it isn't whole."""
        self.taken.append((transfer, sink.received_bytes))
        for piece in self.states.get(transfer, []):
            sink.put(piece)
        if sink.received_bytes != sink.size_bytes:
            raise TransportError("the donor died")

    async def close(self) -> None:
        self.closed = True


class Uplink:
    """A service under test, with what it says to both sides."""

    def __init__(self, config: Any, connections: Sequence[ScriptedConnection], incarnation: int = 0) -> None:
        self.layout = run_layout(config)
        self.codec = codec_by_name(config.wire.codec)
        self.slots = FragmentSlots.private([fragment.numel for fragment in self.layout.fragments], STATE_BYTES)
        self.area = StateArea(self.slots.state, self.slots.release_state)
        generator = torch.Generator().manual_seed(3)
        for fragment in self.layout.fragments:
            self.slots.published(fragment.fragment_id, 0).uniform_(-1, 1, generator=generator)
        position = LearnerPosition(
            incarnation=Incarnation(incarnation),
            local_step=LocalStep(0),
            tokens=0,
            unit=0,
            initial_digests=tuple(digest(self.slots.published(index, 0)) for index in range(3)),
            fragments=(FragmentPosition(version=V[0], resync=0, step_lo=LocalStep(0), tokens_lo=0, slot=0),) * 3,
            has_trained=incarnation > 0,
            state_bytes=self.slots.state.size,
            state_layout="moments",
        )
        self.connections = list(connections)
        self.used: list[ScriptedConnection] = []
        self.commands: list[Command] = []
        self.shown: list[ShowReason] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.clock = loop
        self.pacer = Pacer()
        self.rows = HeldExecutor()
        self.service = UplinkService(
            machine=learner_machine(config, self.layout, "east", position, random.Random(0)),
            connect=self._connect,
            clock=loop,
            worker=InlineExecutor(),
            rows=self.rows,
            sink=self,
            fragments=held_fragments(self.layout, position, self.slots),
            wire=config.wire,
            rate=UplinkRate(self.pacer),
            show=self.shown.append,
            state=self.area,
        )

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def _connect(self) -> ScriptedConnection:
        self.used.append(self.connections.pop(0))
        return self.used[-1]

    @property
    def connection(self) -> ScriptedConnection:
        return self.used[-1]

    async def settle(self) -> None:
        """Let everything happen that needs no time to pass."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def hear(self, *messages: SyncerMessage) -> None:
        for message in messages:
            self.connection.incoming.put_nowait(message)
        await self.settle()

    async def pass_boundary(
        self, local_step: int, *, installed: Sequence[Installed] = (), snapshots: Sequence[FragmentId] = ()
    ) -> None:
        self.service.passed(
            BoundaryPassed(
                local_step=LocalStep(local_step),
                tokens=32 * local_step,
                unit=local_step,
                step_time_s=1.0,
                loss=2.0,
                learning_rate=1e-3,
                installed=tuple(installed),
                snapshots=tuple(SnapshotTaken(fragment_id=fragment_id) for fragment_id in snapshots),
            )
        )
        await self.settle()

    def update(self, count: int, base_N: torch.Tensor, *, wrong: bool = False) -> tuple[torch.Tensor, Any]:
        """An update of F from version count - 1, and the value that it leads to."""
        table = build_block_table(self.layout.fragments[F])
        moved = torch.linspace(-1, 1, base_N.numel()) * count
        payload = self.codec.encode(moved, table)
        value_N = apply_update(base_N, payload, self.codec, table)
        segment = UpdateSegment(
            kind=SegmentKind.DIFFERENCE,
            from_version=V[count - 1],
            to_version=V[count],
            digest="0" * 32 if wrong else digest(value_N),
            codec=self.codec.name,
            codes_bytes=payload.codes.size,
            scales_bytes=payload.scales.size,
            merged=(),
        )
        header = UpdateHeader(fragment_id=F, resync=0, segments=(segment,))
        return value_N, (header, [Buffers(codes=payload.codes, scales=payload.scales)])

    def of(self, kind: type[T]) -> list[T]:
        return [command for command in self.commands if isinstance(command, kind)]

    def said(self, kind: type[T]) -> list[T]:
        return [message for message in self.connection.said if isinstance(message, kind)]


def welcome(incarnation: int = 1, *, started: bool = False) -> Welcome:
    return Welcome(
        incarnation=Incarnation(incarnation),
        term=Term(1),
        epoch=Epoch(0),
        global_step=GlobalStep(0),
        anchor=0,
        total_steps=GlobalStep(40),
        versions=(V[0],) * 3,
        data_shard=ShardId(0),
        next_unit=0,
        shards=("",) * 3,
        started=started,
    )


def pull(round_id: int = 1, version: Version = V[0]) -> Pull:
    return Pull(round_id=RoundId(round_id), attempt=1, fragment_id=F, version=version, window_s=10.0, upload_s=1.0)


def installed(command: InstallValue, step_lo: int) -> Installed:
    install = command.install
    return Installed(
        fragment_id=install.fragment_id,
        version=install.version,
        resync=install.resync,
        step_lo=LocalStep(step_lo),
        tokens_lo=32 * step_lo,
    )


def play(
    make_config: MakeConfig,
    script: Callable[[Uplink], Awaitable[None]],
    *connections: ScriptedConnection,
    incarnation: int = 0,
    codec: str = "int4",
) -> Uplink:
    """Run a script beside the service, which the script may end and which is left otherwise."""

    async def scene() -> Uplink:
        given = connections or (ScriptedConnection(),)
        uplink = Uplink(make_config(wire={"codec": codec}), given, incarnation)

        async def act() -> None:
            await uplink.settle()
            await script(uplink)
            uplink.service.leave("the test is over")

        async with asyncio.TaskGroup() as group:
            group.create_task(uplink.service.run())
            group.create_task(act())
        return uplink

    return run_virtual(scene())


def decoded(uplink: Uplink, header: ContributionHeader, frames: Frames) -> torch.Tensor:
    assembler = Assembler(header.codes_bytes, header.scales_bytes)
    for frame in frames:
        assembler.add(frame)
    result = assembler.result()
    return uplink.codec.decode(
        Payload(codes=result.codes, scales=result.scales), build_block_table(uplink.layout.fragments[F])
    )
