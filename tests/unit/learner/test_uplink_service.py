"""The uplink over a scripted connection: the real machine and the real maths, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from tests.unit.learner.conftest import MakeConfig
from tests.unit.learner.virtual import InlineExecutor, VirtualLoop, run_virtual
from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import Payload, codec_by_name
from wan_diloco.algorithm.publication import apply_update, digest
from wan_diloco.errors import AuthError, PeerUnavailable, TransportError
from wan_diloco.learner.ipc import Admitted, Command, FragmentPosition, InstallValue, LearnerPosition
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.uplink_plan import held_fragments, learner_machine
from wan_diloco.learner.uplink_service import UplinkService
from wan_diloco.models import run_layout
from wan_diloco.protocol.events import (
    AllowSteps,
    BoundaryPassed,
    ExitLearner,
    Installed,
    RequestSnapshot,
    SetPace,
    ShowReason,
    SnapshotTaken,
)
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    Goodbye,
    Hello,
    LearnerMessage,
    Pull,
    RefusalReason,
    ResyncRequest,
    SegmentKind,
    Start,
    Stop,
    SyncerMessage,
    UpdateHeader,
    UpdateReceived,
    UpdateSegment,
    Welcome,
)
from wan_diloco.transport.interface import Counters, Frames
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Incarnation, LocalStep, RoundId, Term, Version
from wan_diloco.wire.frames import Assembler, Buffers

T = TypeVar("T")
F = FragmentId(1)
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

    async def connect(self) -> None:
        if self.refuses is not None:
            raise self.refuses

    def send(self, message: LearnerMessage) -> None:
        self.said.append(message)

    async def messages(self) -> AsyncIterator[SyncerMessage]:
        while (message := await self.incoming.get()) is not None:
            yield message
        raise TransportError("the line is cut")

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

    async def close(self) -> None:
        self.closed = True


class Uplink:
    """A service under test, with what it says to both sides."""

    def __init__(self, config: Any, connections: Sequence[ScriptedConnection], incarnation: int = 0) -> None:
        self.layout = run_layout(config)
        self.codec = codec_by_name(config.wire.codec)
        self.slots = FragmentSlots.private([fragment.numel for fragment in self.layout.fragments])
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
        )
        self.connections = list(connections)
        self.used: list[ScriptedConnection] = []
        self.commands: list[Command] = []
        self.shown: list[ShowReason] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.clock = loop
        self.service = UplinkService(
            machine=learner_machine(config, self.layout, "east", position, random.Random(0)),
            connect=self._connect,
            clock=loop,
            worker=InlineExecutor(),
            sink=self,
            fragments=held_fragments(self.layout, position, self.slots),
            wire=config.wire,
            show=self.shown.append,
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


def test_it_says_hello_and_tells_the_trainer_its_life_and_its_leave(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        (hello,) = uplink.said(Hello)
        assert (hello.learner_id, hello.incarnation, hello.layout) == ("east", 0, uplink.layout.lines())
        await uplink.hear(welcome(3), Start(global_step=GlobalStep(0), anchor=0))

    uplink = play(make_config, script)
    assert uplink.of(Admitted) == [Admitted(incarnation=Incarnation(3))]
    assert uplink.of(AllowSteps)[-1] == AllowSteps(until_step=LocalStep(40))
    assert uplink.of(SetPace)[-1].total_steps == 40


def test_leaving_is_said_to_the_syncer(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome())

    uplink = play(make_config, script)
    assert uplink.said(Goodbye) == [Goodbye(reason="the test is over")]
    assert uplink.connection.closed


def test_a_trainer_that_died_leaves_no_goodbye(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome())
        uplink.service.leave(None)
        await uplink.settle()

    assert play(make_config, script).said(Goodbye) == []


def test_a_contribution_is_base_minus_snapshot(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True), pull())
        assert uplink.of(RequestSnapshot) == [RequestSnapshot(fragment_id=F)]
        base_N = uplink.slots.published(F, 0)
        uplink.slots.outbox(F).copy_(base_N - 0.1)
        await uplink.pass_boundary(2, snapshots=[F])
        ((header, frames),) = uplink.connection.uploads
        assert (header.base, header.key.step_lo, header.step_hi, header.tokens) == (V[0], 0, 2, 64)
        delta_N = decoded(uplink, header, frames)
        torch.testing.assert_close(delta_N, torch.full_like(delta_N, 0.1), rtol=0, atol=1e-6)

    play(make_config, script, codec="f32")


def test_an_update_is_decoded_put_into_the_free_slot_and_told(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        base = digest(uplink.slots.published(F, 0))
        value_N, update = uplink.update(1, uplink.slots.published(F, 0))
        uplink.connection.arriving.put_nowait(update)
        await uplink.settle()
        (command,) = uplink.of(InstallValue)
        assert (command.install.version, command.slot) == (V[1], 1)
        assert digest(uplink.slots.published(F, 1)) == digest(value_N)
        assert digest(uplink.slots.published(F, 0)) == base
        assert uplink.said(UpdateReceived)[-1].version == V[1]

    play(make_config, script)


def test_a_newer_value_waits_until_the_trainer_has_installed_the_one_before(make_config: MakeConfig) -> None:
    """The slot that the trainer may be reading is not written to."""

    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        first_N, first = uplink.update(1, uplink.slots.published(F, 0))
        second_N, second = uplink.update(2, first_N)
        third_N, third = uplink.update(3, second_N)
        for update in (first, second, third):
            uplink.connection.arriving.put_nowait(update)
            await uplink.settle()
        (command,) = uplink.of(InstallValue)
        assert digest(uplink.slots.published(F, 1)) == digest(first_N)
        assert uplink.said(UpdateReceived)[-1].version == V[3]
        await uplink.pass_boundary(1, installed=[installed(command, 1)])
        newest = uplink.of(InstallValue)[-1]
        assert (newest.install.version, newest.slot) == (V[3], 0)
        assert digest(uplink.slots.published(F, 0)) == digest(third_N)
        await uplink.pass_boundary(2, installed=[installed(newest, 2)])
        assert len(uplink.of(InstallValue)) == 2

    play(make_config, script)


def test_a_snapshot_of_the_boundary_of_an_install_is_relative_to_the_new_base(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        value_N, update = uplink.update(1, uplink.slots.published(F, 0))
        uplink.connection.arriving.put_nowait(update)
        await uplink.settle()
        (command,) = uplink.of(InstallValue)
        await uplink.pass_boundary(1, installed=[installed(command, 1)])
        await uplink.hear(pull(version=V[1]))
        uplink.slots.outbox(F).copy_(value_N - 0.5)
        await uplink.pass_boundary(3, snapshots=[F])
        ((header, frames),) = uplink.connection.uploads
        assert (header.base, header.key.step_lo, header.steps) == (V[1], 1, 2)
        delta_N = decoded(uplink, header, frames)
        torch.testing.assert_close(delta_N, torch.full_like(delta_N, 0.5), rtol=0, atol=1e-6)

    play(make_config, script, codec="f32")


def test_a_broken_upload_is_sent_again_with_the_same_bytes(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True), pull())
        await uplink.pass_boundary(2, snapshots=[F])
        uplink.slots.outbox(F).fill_(7.0)
        await asyncio.sleep(10)
        (first, second) = uplink.connection.uploads
        assert first == second
        await uplink.hear(Acknowledged(fragment_id=F, step_lo=LocalStep(0), step_hi=LocalStep(2)))
        await asyncio.sleep(60)
        assert len(uplink.connection.uploads) == 2
        # Of what was tried the syncer may have a part.
        assert uplink.connection.unasked == [True, False]

    play(make_config, script, ScriptedConnection(breaks=1))


def test_after_a_lost_connection_the_same_bytes_go_over_the_next(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True), pull())
        await uplink.pass_boundary(2, snapshots=[F])
        (first,) = uplink.connection.uploads
        uplink.connection.incoming.put_nowait(None)
        await asyncio.sleep(30)
        assert len(uplink.used) == 2
        assert uplink.used[0].closed
        assert uplink.said(Hello)[0].incarnation == 1
        await uplink.hear(welcome(started=True))
        assert uplink.connection.uploads == [first]
        assert uplink.connection.unasked == [False]

    play(make_config, script, ScriptedConnection(), ScriptedConnection())


def test_an_absent_syncer_is_tried_again_with_growing_pauses_of_at_most_ten_seconds(make_config: MakeConfig) -> None:
    times: list[float] = []

    async def script(uplink: Uplink) -> None:
        connect = uplink._connect

        def noted() -> ScriptedConnection:
            times.append(uplink.clock.now_s())
            return connect()

        uplink.service._connect = noted
        await asyncio.sleep(120)

    absent = [ScriptedConnection(refuses=PeerUnavailable("nobody listens")) for _ in range(200)]
    uplink = play(make_config, script, *absent)
    pauses = np.diff(times)
    assert 10 < len(times) < 100
    assert pauses.max() <= 10.0
    assert pauses[-1] > pauses[0]
    assert all(connection.closed for connection in uplink.used)


def test_a_refused_connection_ends_the_learner(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.settle()

    uplink = play(make_config, script, ScriptedConnection(refuses=AuthError("unknown certificate")))
    assert [command.exit_code for command in uplink.of(ExitLearner)] == [77]


def test_the_end_of_the_run_ends_the_learner_well(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True), Stop(reason="done", global_step=GlobalStep(40)))

    uplink = play(make_config, script)
    assert uplink.commands[-1] == ExitLearner(reason="done", exit_code=0)
    assert uplink.connection.closed


@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_weights_that_are_not_finite_are_not_sent_but_cured(make_config: MakeConfig, codec: str) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True), pull())
        uplink.slots.outbox(F).fill_(float("nan"))
        await uplink.pass_boundary(2, snapshots=[F])
        assert uplink.connection.uploads == []
        assert uplink.said(ResyncRequest) == [ResyncRequest(fragment_id=F, reason=RefusalReason.NON_FINITE)]
        uplink.slots.outbox(F).fill_(0.0)
        await uplink.hear(pull(2))
        assert len(uplink.of(RequestSnapshot)) == 2
        await uplink.pass_boundary(3, snapshots=[F])
        assert len(uplink.connection.uploads) == 1

    play(make_config, script, codec=codec)


def test_an_update_that_does_not_lead_to_its_digest_is_not_installed(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        _, update = uplink.update(1, uplink.slots.published(F, 0), wrong=True)
        uplink.connection.arriving.put_nowait(update)
        await uplink.settle()
        assert uplink.of(InstallValue) == []
        assert uplink.said(ResyncRequest) == [ResyncRequest(fragment_id=F, reason=RefusalReason.DIGEST)]
        value_N, update = uplink.update(1, uplink.slots.published(F, 0))
        uplink.connection.arriving.put_nowait(update)
        await uplink.settle()
        assert digest(uplink.slots.published(F, 1)) == digest(value_N)

    play(make_config, script)


def test_a_value_of_a_resync_is_installed_over_the_same_version(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        codec, table = codec_by_name("f32"), build_block_table(uplink.layout.fragments[F])
        value_N = torch.linspace(0, 1, table.numel)
        payload = codec.encode(value_N, table)
        segment = UpdateSegment(
            kind=SegmentKind.VALUE,
            from_version=V[0],
            to_version=V[0],
            digest=digest(value_N),
            codec="f32",
            codes_bytes=payload.codes.size,
            scales_bytes=0,
            merged=(),
        )
        header = UpdateHeader(fragment_id=F, resync=1, segments=(segment,))
        uplink.connection.arriving.put_nowait((header, [Buffers(codes=payload.codes, scales=payload.scales)]))
        await uplink.settle()
        (command,) = uplink.of(InstallValue)
        assert (command.install.version, command.install.resync) == (V[0], 1)
        await uplink.pass_boundary(1, installed=[installed(command, 1)])
        # What comes after the resync carries its number, and is installed like any other.
        next_N, update = uplink.update(1, value_N)
        uplink.connection.arriving.put_nowait(update)
        await uplink.settle()
        assert uplink.of(InstallValue)[-1].install.version == V[1]
        assert digest(uplink.slots.published(F, 0)) == digest(next_N)

    play(make_config, script)


def test_an_uplink_that_was_started_again_keeps_nobody_waiting(make_config: MakeConfig) -> None:
    """While it can't reach the syncer, what its predecessor allowed stands."""

    async def script(uplink: Uplink) -> None:
        await uplink.pass_boundary(8)
        await uplink.pass_boundary(9)
        assert uplink.of(AllowSteps) == []
        assert uplink.said(Hello)[0].incarnation == 4
        await uplink.hear(welcome(4, started=True))
        assert uplink.of(AllowSteps)[-1] == AllowSteps(until_step=LocalStep(49))

    play(make_config, script, incarnation=4)
