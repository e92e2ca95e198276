"""The uplink over a scripted connection: the real machine and the real maths, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.learner.conftest import MakeConfig
from tests.unit.learner.scripted import F, ScriptedConnection, Uplink, V, decoded, installed, play, pull, welcome
from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.publication import digest
from wan_diloco.errors import AuthError, PeerUnavailable
from wan_diloco.learner.ipc import Admitted, InstallValue
from wan_diloco.protocol.deadlines import reconnects
from wan_diloco.protocol.events import (
    AllowSteps,
    ExitLearner,
    RequestSnapshot,
    SetPace,
)
from wan_diloco.protocol.messages import (
    Acknowledged,
    Goodbye,
    Hello,
    RefusalReason,
    ResyncRequest,
    SegmentKind,
    Start,
    Stop,
    UpdateHeader,
    UpdateReceived,
    UpdateSegment,
)
from wan_diloco.units import GlobalStep, Incarnation, LocalStep, Term
from wan_diloco.wire.frames import Buffers

RETRY = reconnects(10.0)


def test_it_says_hello_and_tells_the_trainer_its_life_and_its_leave(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        (hello,) = uplink.said(Hello)
        assert (hello.learner_id, hello.incarnation, hello.layout) == ("east", 0, uplink.layout.lines())
        await uplink.hear(welcome(3), Start(global_step=GlobalStep(0), anchor=0))

    uplink = play(make_config, script)
    assert uplink.of(Admitted) == [Admitted(incarnation=Incarnation(3), term=Term(1))]
    assert uplink.of(AllowSteps)[-1] == AllowSteps(until_step=LocalStep(40))
    assert uplink.of(SetPace)[-1].total_steps == 40


def test_the_connection_to_a_syncer_that_has_been_taken_over_is_given_up(make_config: MakeConfig) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(replace(welcome(3), term=Term(5)))
        uplink.connection.incoming.put_nowait(None)
        await asyncio.sleep(30.0)
        await uplink.hear(replace(welcome(7), term=Term(4)))
        assert uplink.used[1].closed
        await asyncio.sleep(30.0)
        assert len(uplink.used) == 3
        assert [hello.term for hello in uplink.said(Hello)] == [5]

    uplink = play(make_config, script, *(ScriptedConnection() for _ in range(3)))
    assert [(told.incarnation, told.term) for told in uplink.of(Admitted)][-1] == (3, 5)


def test_the_connection_to_a_syncer_that_was_started_from_a_copy_is_given_up_and_the_trainer_knows_whose_it_is(
    make_config: MakeConfig,
) -> None:
    async def script(uplink: Uplink) -> None:
        await uplink.hear(replace(welcome(3), term=Term(5), term_id="one"))
        uplink.connection.incoming.put_nowait(None)
        await asyncio.sleep(30.0)
        await uplink.hear(replace(welcome(7), term=Term(5), term_id="another"))
        assert uplink.used[1].closed
        await asyncio.sleep(30.0)
        assert len(uplink.used) == 3
        assert [(hello.term, hello.term_id) for hello in uplink.said(Hello)] == [(5, "one")]

    uplink = play(make_config, script, *(ScriptedConnection() for _ in range(3)))
    assert [(told.incarnation, told.term, told.term_id) for told in uplink.of(Admitted)][-1] == (3, 5, "one")


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


def test_an_hour_of_refusals_is_an_attempt_every_few_seconds_and_never_in_step(make_config: MakeConfig) -> None:
    times: list[float] = []

    async def script(uplink: Uplink) -> None:
        connect = uplink._connect

        def noted() -> ScriptedConnection:
            times.append(uplink.clock.now_s())
            return connect()

        uplink.service._connect = noted
        await asyncio.sleep(3600)

    absent = [ScriptedConnection(refuses=PeerUnavailable("nobody listens")) for _ in range(1600)]
    uplink = play(make_config, script, *absent)
    pauses = np.diff(times)
    # Each takes no time at all, so that only the pauses bound how many there are.
    assert 720 <= len(times) <= 1450
    assert pauses.max() <= RETRY.max_s
    assert pauses[0] < 1 < pauses[-1]
    settled = pauses[-100:]
    assert settled.min() >= (1 - RETRY.jitter) * RETRY.max_s
    assert settled.max() - settled.min() > 1, "learners that lost their syncer together would knock together"
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
