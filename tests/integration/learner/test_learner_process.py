"""The learner as a process, against a syncer that a test plays: its ends, its deaths, its returns."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch

from tests.integration.learner.stub_syncer import (
    LearnerProcess,
    StubSyncer,
    goodbyes,
    learner,
    read_config,
    serving,
    write_config,
)
from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.layout import Fragment
from wan_diloco.algorithm.publication import digest
from wan_diloco.learner.checkpoint import load_checkpoint, save_checkpoint
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import open_shard
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.trainer import checkpoint_folder
from wan_diloco.models import build_model, run_layout
from wan_diloco.protocol.messages import (
    ContributionHeader,
    Hello,
    Pull,
    RefusalReason,
    Report,
    SegmentKind,
    Stop,
    UpdateHeader,
    UpdateSegment,
)
from wan_diloco.units import Epoch, FragmentId, GlobalStep, RoundId, Version
from wan_diloco.wire.frames import pack

T = TypeVar("T")
F = FragmentId(0)


def play(scene: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(240):
            return await scene

    return asyncio.run(bounded())


def update_to(value_N: torch.Tensor, fragment: Fragment) -> tuple[UpdateHeader, list[bytes]]:
    """Version 0.1 of F, and its frames."""
    payload = codec_by_name("f32").encode(value_N, build_block_table(fragment))
    segment = UpdateSegment(
        kind=SegmentKind.VALUE,
        from_version=Version(Epoch(0), 0),
        to_version=Version(Epoch(0), 1),
        digest=digest(value_N),
        codec="f32",
        codes_bytes=payload.codes.size,
        scales_bytes=0,
        merged=(),
    )
    return UpdateHeader(fragment_id=F, resync=0, segments=(segment,)), pack(payload.codes, payload.scales)


def pull_of_first() -> Pull:
    return Pull(
        round_id=RoundId(1), attempt=1, fragment_id=F, version=Version(Epoch(0), 0), window_s=60.0, upload_s=0.0
    )


async def uplink_is_killed(syncer: StubSyncer, process: LearnerProcess, fragment: Fragment) -> None:
    """A reconnect of the same life; the base of the next delta is the value that was installed before."""
    await syncer.until(lambda: syncer.steps >= 3)
    value_N = torch.full((fragment.numel,), 2.0)
    header, frames = update_to(value_N, fragment)
    await syncer.session.send_update(header, [frames])
    await syncer.until(lambda: syncer.of(Report)[-1].fragments[F].version == header.to_version)
    before = syncer.steps
    process.uplink.kill()
    hello = (await syncer.until(lambda: syncer.of(Hello)[1:]))[0]
    assert hello.incarnation == 1
    assert hello.local_step >= before
    await syncer.until(lambda: syncer.steps > hello.local_step)
    report = syncer.of(Report)[-1]
    assert report.fragments[F].version == header.to_version
    syncer.session.send(
        Pull(round_id=RoundId(2), attempt=1, fragment_id=F, version=header.to_version, window_s=30.0, upload_s=0.0)
    )
    contribution, buffers = (await syncer.until(lambda: syncer.uploads))[0]
    assert contribution.base == header.to_version
    assert contribution.key.step_lo == report.fragments[F].step_lo
    delta_N = torch.from_numpy(buffers.codes.copy()).view(torch.float32)
    # A few tiny steps away from the installed value; the initial weights are nowhere near it.
    assert 0 < float(delta_N.abs().max()) < 0.5


async def syncer_moves(syncer: StubSyncer, second: StubSyncer) -> None:
    """Training goes on meanwhile, and the same life comes back."""
    before = syncer.steps
    syncer.session.close("the test moves the syncer")
    hello = (await second.until(lambda: second.of(Hello)))[0]
    assert hello.incarnation == 1
    # On a busy machine the uplink may be back before another step is taken.
    assert hello.local_step >= before
    await second.until(lambda: second.steps > hello.local_step)


def test_a_life_with_a_killed_uplink_a_moved_syncer_and_a_clean_leave(tmp_path: Path) -> None:
    # Many steps are taken while another uplink starts; they must not lead far.
    config, folder = write_config(tmp_path, lr=1e-6), tmp_path / "run"
    fragment = run_layout(read_config(config)).fragments[F]

    async def scene() -> None:
        async with serving(folder) as first, learner(config, folder) as process:
            await uplink_is_killed(first, process, fragment)
            async with serving(folder) as second:
                await syncer_moves(first, second)
                process.send_signal(signal.SIGTERM)
                assert await process.exit_code() == 143
                assert goodbyes(second) == ["the learner stops"]

    play(scene())
    found = load_checkpoint(checkpoint_folder(folder, "east"), "stub")
    assert found is not None
    assert found[0].local_step >= 5


def test_a_resumed_life_goes_on_from_its_checkpoint_under_torchruns_variables(tmp_path: Path) -> None:
    config_path, folder = write_config(tmp_path), tmp_path / "run"
    config = read_config(config_path)
    layout = run_layout(config)
    slots = FragmentSlots.private([fragment.numel for fragment in layout.fragments])
    trainer = LocalTrainer(config, Replica(config, build_model(config), open_shard(config, 0)), layout, slots)
    for _ in range(3):
        trainer.step()
    save_checkpoint(checkpoint_folder(folder, "east"), trainer.counters, trainer.moments)
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

    async def scene() -> int:
        async with serving(folder) as syncer, learner(config_path, folder, "--resume", env=env) as process:
            hello = (await syncer.until(lambda: syncer.of(Hello)))[0]
            assert (hello.incarnation, hello.local_step, hello.tokens) == (0, 3, 96)
            await syncer.until(lambda: syncer.steps >= 5)
            syncer.session.send(Stop(reason="enough", global_step=GlobalStep(5)))
            return await process.exit_code()

    assert play(scene()) == 0
    found = load_checkpoint(checkpoint_folder(folder, "east"), "stub")
    assert found is not None
    assert found[0].local_step >= 5


def test_a_learner_that_is_told_to_end_during_an_upload_leaves_at_once_and_goes_on_from_there(tmp_path: Path) -> None:
    """The upload would never end: who waited for it would be killed."""
    config, folder = write_config(tmp_path), tmp_path / "run"

    async def scene() -> tuple[ContributionHeader, Hello]:
        async with serving(folder, stalls=True) as syncer:
            async with learner(config, folder) as process:
                await syncer.until(lambda: syncer.steps >= 1)
                syncer.session.send(pull_of_first())
                (header,) = await syncer.until(lambda: syncer.begun)
                process.send_signal(signal.SIGTERM)
                assert await process.exit_code() == 143
            await syncer.until(lambda: syncer.live == 0)
            assert goodbyes(syncer) == ["the learner stops"]
            # It closed its connection itself; that of a process which is killed only breaks.
            assert syncer.ended == ["goodbye"]
            assert syncer.uploads == []
            async with learner(config, folder, "--resume"):
                (_, resumed) = await syncer.until(lambda: syncer.of(Hello)[1:] and syncer.of(Hello))
            return header, resumed

    header, resumed = play(scene())
    found = load_checkpoint(checkpoint_folder(folder, "east"), "stub")
    assert found is not None
    assert found[0].local_step == resumed.local_step >= header.step_hi


def test_a_life_that_took_no_step_leaves_no_checkpoint(tmp_path: Path) -> None:
    config, folder = write_config(tmp_path), tmp_path / "run"
    lock = folder / "learners" / "east" / "owner.lock"

    async def scene() -> int:
        # No syncer has written its address.
        async with learner(config, folder) as process:
            while not lock.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            return await process.exit_code()

    assert play(scene()) == 143
    # It would replace that of an earlier life.
    assert not checkpoint_folder(folder, "east").exists()


def test_a_refusal_is_told_by_the_exit_code(tmp_path: Path) -> None:
    config, folder = write_config(tmp_path), tmp_path / "run"

    async def scene() -> int:
        async with (
            serving(folder, refusal=RefusalReason.OTHER_LAYOUT) as syncer,
            learner(config, folder, stderr=PIPE) as process,
        ):
            last = (await process.said()).splitlines()[-1]
            assert last.startswith("wan-diloco: east: refused (other_layout)")
            code = await process.exit_code()
            assert syncer.steps == 0
            return code

    assert play(scene()) == 78
    # It may be the double of a learner that stands, whose checkpoint must stay.
    assert not checkpoint_folder(folder, "east").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_region_of_several_ranks_is_refused_before_anybody_is_waited_for(tmp_path: Path, rank: str) -> None:
    """With a rank missing, none may take a step; nor may any wait for what never comes."""
    config, folder = write_config(tmp_path), tmp_path / "run"
    # Nobody is there: who joined the group would be there for minutes.
    env = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

    async def scene() -> str:
        async with serving(folder) as syncer, learner(config, folder, env=env, stderr=PIPE) as process:
            said = await process.said()
            assert await process.exit_code() == 78
            assert (syncer.sessions, syncer.steps) == ([], 0)
            return said

    said = play(scene())
    assert "WORLD_SIZE" in said
    assert "a region trains with one rank, not 2" in said
    assert not (folder / "learners").exists()


def test_an_uplink_does_not_outlive_its_trainer(tmp_path: Path) -> None:
    config, folder = write_config(tmp_path), tmp_path / "run"

    async def scene() -> None:
        async with serving(folder) as syncer, learner(config, folder) as process:
            await syncer.until(lambda: syncer.steps >= 1)
            uplink = process.uplink
            process.send_signal(signal.SIGKILL)
            await syncer.until(lambda: syncer.live == 0)
            assert goodbyes(syncer) == []
            await asyncio.to_thread(psutil.wait_procs, [uplink], 30)
            assert not uplink.is_running() or uplink.status() == psutil.STATUS_ZOMBIE

    play(scene())
