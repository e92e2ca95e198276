"""The uplink's part in handing moments on: what is looked at, sent, taken, resumed, and never used in part."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import xxhash

from tests.unit.learner.conftest import MakeConfig
from tests.unit.learner.scripted import STATE_BYTES, ScriptedConnection, Uplink, V, play, welcome
from wan_diloco.learner.ipc import Command
from wan_diloco.protocol.deadlines import DONOR_KEEP_S
from wan_diloco.protocol.events import AllowSteps, BoundaryPassed, InstallMoments, PinState
from wan_diloco.protocol.messages import Welcome
from wan_diloco.protocol.rejoin_messages import (
    Donate,
    DonationOver,
    StateDeclined,
    StateManifest,
    StateOffered,
    StateReady,
    StateRefusal,
    StateSettled,
    StateWanted,
    SyncerClock,
)
from wan_diloco.units import Epoch, GlobalStep, LearnerId, LocalStep, Term, TransferId

T1, T2 = TransferId(1), TransferId(2)
ROW = np.linspace(-1, 1, STATE_BYTES // 4, dtype=np.float32).view(np.uint8)
HALF = STATE_BYTES // 2


def offer(transfer: TransferId = T1, row: np.ndarray = ROW, size_bytes: int = STATE_BYTES) -> StateOffered:
    manifest = StateManifest(
        global_step=GlobalStep(38),
        versions=(V[0],) * 3,
        layout="moments",
        size_bytes=size_bytes,
        digest=xxhash.xxh3_128_hexdigest(row.data),
    )
    return StateOffered(transfer=transfer, donor=LearnerId("west"), manifest=manifest)


def late() -> Welcome:
    return replace(welcome(started=True), global_step=GlobalStep(40))


def passed(**more: int) -> BoundaryPassed:
    return BoundaryPassed(
        local_step=LocalStep(0),
        tokens=0,
        unit=0,
        step_time_s=1.0,
        loss=None,
        learning_rate=0.0,
        installed=(),
        snapshots=(),
        **more,  # type: ignore[arg-type]
    )


def of(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_a_fetched_row_is_taken_over_and_its_memory_let_go_of(make_config: MakeConfig) -> None:
    connection = ScriptedConnection()
    connection.states[T1] = [ROW[:HALF], ROW[HALF:]]

    async def script(uplink: Uplink) -> None:
        await uplink.hear(late(), offer())
        (install,) = of(InstallMoments, uplink.commands)
        assert install == InstallMoments(transfer=T1, donor=LearnerId("west"), global_step=GlobalStep(38))
        assert np.array_equal(uplink.slots.state, ROW)
        uplink.service.passed(passed(moments_of=T1))
        await uplink.settle()
        assert len(uplink.said(StateSettled)) == 1
        assert uplink.area.received_bytes == 0

    play(make_config, script, connection)


def test_the_part_of_a_row_that_came_is_not_sent_again_and_another_row_begins_anew(make_config: MakeConfig) -> None:
    connection = ScriptedConnection()
    connection.states[T1] = [ROW[:HALF]]
    other = ROW[::-1].copy()
    other.view(np.float32)[:] = 0.5

    async def script(uplink: Uplink) -> None:
        await uplink.hear(late(), offer())
        assert uplink.said(StateWanted)[-1] == StateWanted(failed=T1, digest=offer().manifest.digest)
        await uplink.hear(offer(T2))
        await uplink.hear(offer(TransferId(3), other))
        assert connection.taken == [(T1, 0), (T2, HALF), (TransferId(3), 0)]
        assert not of(InstallMoments, uplink.commands)
        assert not of(AllowSteps, uplink.commands)

    play(make_config, script, connection)


def test_a_row_that_is_not_what_its_manifest_says_is_never_used(make_config: MakeConfig) -> None:
    connection = ScriptedConnection()
    nan = ROW.copy()
    nan.view(np.float32)[7] = np.nan
    connection.states = {T1: [ROW[:HALF], ROW[:HALF]], T2: [nan]}

    async def script(uplink: Uplink) -> None:
        await uplink.hear(late(), offer())
        await uplink.hear(offer(T2, nan))
        await uplink.hear(offer(TransferId(3), size_bytes=STATE_BYTES + 4))
        assert [said.failed for said in uplink.said(StateWanted)] == [0, 1, 2, 3]
        assert connection.taken == [(T1, 0), (T2, 0)], "spoilt rows aren't built on, other sizes not asked for"
        assert not of(InstallMoments, uplink.commands)

    play(make_config, script, connection)


def test_what_was_pinned_is_described_and_given_until_it_is_over(make_config: MakeConfig) -> None:
    connection = ScriptedConnection()

    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        clock = SyncerClock(term=Term(1), epoch=Epoch(0), global_step=GlobalStep(0))
        await uplink.hear(Donate(transfer=T1, joiner=LearnerId("west"), clock=clock))
        assert of(PinState, uplink.commands) == [PinState(number=1)]
        uplink.slots.state[:] = ROW
        uplink.service.passed(passed(pinned=1))
        await uplink.settle()
        (ready,) = uplink.said(StateReady)
        assert (ready.manifest.digest, ready.manifest.size_bytes) == (offer().manifest.digest, STATE_BYTES)
        ((transfer, given),) = connection.given
        assert transfer == T1
        assert np.array_equal(given, ROW)
        assert not connection.given_up
        await uplink.hear(DonationOver(transfer=T1))
        assert connection.given_up == [T1]

    play(make_config, script, connection, incarnation=1)


def test_moments_with_a_nan_are_given_to_nobody(make_config: MakeConfig) -> None:
    connection = ScriptedConnection()

    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        clock = SyncerClock(term=Term(1), epoch=Epoch(0), global_step=GlobalStep(0))
        await uplink.hear(Donate(transfer=T1, joiner=LearnerId("west"), clock=clock))
        uplink.slots.state.view(np.float32)[:] = np.inf
        uplink.service.passed(passed(pinned=1))
        await uplink.settle()
        assert uplink.said(StateDeclined) == [StateDeclined(transfer=T1, reason=StateRefusal.NON_FINITE)]
        assert not connection.given

    play(make_config, script, connection, incarnation=1)


def test_memory_that_is_let_go_of_is_asked_for_again_only_afterwards(make_config: MakeConfig) -> None:
    """To let go of it takes a while where it is much: what is pinned meanwhile would be gone."""
    connection = ScriptedConnection()

    async def script(uplink: Uplink) -> None:
        await uplink.hear(welcome(started=True))
        clock = SyncerClock(term=Term(1), epoch=Epoch(0), global_step=GlobalStep(0))
        await uplink.hear(Donate(transfer=T1, joiner=LearnerId("west"), clock=clock))
        uplink.slots.state[:] = ROW
        uplink.service.passed(passed(pinned=1))
        await uplink.settle()
        uplink.rows.hold()
        await uplink.hear(DonationOver(transfer=T1))
        # Kept for a while, for whoever comes next.
        await asyncio.sleep(2 * DONOR_KEEP_S)
        await uplink.hear(Donate(transfer=T2, joiner=LearnerId("west"), clock=clock))
        assert of(PinState, uplink.commands) == [PinState(number=1)]
        uplink.rows.let_go()
        await uplink.settle()
        assert of(PinState, uplink.commands) == [PinState(number=1), PinState(number=2)]

    play(make_config, script, connection, incarnation=1)
