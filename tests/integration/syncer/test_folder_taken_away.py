"""Somebody removes or replaces a syncer's state folder under it: it ends, says so, and acknowledges nothing more."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch

from tests.support.syncer import close, open_tiny, tiny_config
from tests.support.syncer_scene import Learner, Syncer, advance, scene
from wan_diloco.errors import EXIT_CONFIG, StateDamaged, StorageLocked
from wan_diloco.protocol.messages import Acknowledged
from wan_diloco.syncer import service
from wan_diloco.syncer.main import _cause

CONFIG = tiny_config()
WAIT_S = 30.0


def acknowledged(group: list[Learner]) -> int:
    return sum(isinstance(message, Acknowledged) for learner in group for message in learner.heard)


async def end_of(made: Syncer) -> BaseException:
    """What a syncer ends with that is to end by itself, for whoever reads its exit code."""
    assert made.task is not None
    await asyncio.wait([made.task], timeout=WAIT_S)
    problem = made.task.exception()
    return _cause(problem) if isinstance(problem, BaseExceptionGroup) else problem


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("part", ["state", "state/journal", "state/journal/0000000001.journal"])
def test_a_journal_that_was_removed_acknowledges_nothing_more(tmp_path, monkeypatch, part):
    monkeypatch.setattr(service, "_LOOK_EVERY_S", 3600.0)  # the flush itself notices

    async def story():
        async with scene(CONFIG, tmp_path) as (made, group):
            await advance(group, made, 3)
            before = acknowledged(group)
            doomed = tmp_path / part
            shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
            for _ in range(3):
                for learner in group:
                    learner.step()
            problem = await end_of(made)
            assert acknowledged(group) == before
            return problem

    problem = asyncio.run(story())
    assert isinstance(problem, StateDamaged)
    assert problem.exit_code == EXIT_CONFIG
    assert "removed" in str(problem)
    assert (tmp_path / "state").exists() is (part != "state")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_moved_is_noticed_while_nobody_says_anything(tmp_path, monkeypatch, replaced):
    monkeypatch.setattr(service, "_LOOK_EVERY_S", 0.02)

    async def story():
        async with scene(CONFIG, tmp_path) as (made, group):
            await advance(group, made, 2)
            (tmp_path / "state").rename(tmp_path / "moved")
            if replaced:
                shutil.copytree(tmp_path / "moved", tmp_path / "state")
            return await end_of(made)

    problem = asyncio.run(story())
    assert isinstance(problem, StateDamaged)
    assert f"{tmp_path / 'state'} was removed, moved away or replaced" in str(problem)
    assert (tmp_path / "state").exists() is replaced
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    (tmp_path / "moved").rename(tmp_path / "state")
    close(open_tiny(tmp_path / "state", CONFIG, resume=True))


def test_a_lock_file_that_was_removed_is_put_back_and_lets_nobody_in(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_LOOK_EVERY_S", 0.02)
    note = tmp_path / "state" / "owner.lock"

    async def story():
        async with scene(CONFIG, tmp_path) as (made, group):
            await advance(group, made, 1)
            note.unlink()
            with pytest.raises(StorageLocked):
                open_tiny(tmp_path / "state", CONFIG, resume=True)
            async with asyncio.timeout(WAIT_S):
                while not note.exists():  # noqa: ASYNC110 -- a thread puts it back
                    await asyncio.sleep(0.01)
            await advance(group, made, 2)

    asyncio.run(story())
    close(open_tiny(tmp_path / "state", CONFIG, resume=True))


def test_a_good_snapshot_under_a_name_that_was_not_given_out_yet_is_another_writers(tmp_path):
    """As where a second syncer, on another machine, has the same network folder."""
    config = tiny_config(syncer={"snapshot_every": "1h"})

    async def story():
        async with scene(config, tmp_path) as (made, group):
            await advance(group, made, 2)
            made.service._next_snapshot_s = 0.0
            await advance(group, made, 1)
            assert made.service._snapshotting is not None
            await made.service._snapshotting
            assert (tmp_path / "state" / "snapshots" / "state-1").is_dir()
            await advance(group, made, 4)
            # The next number is that one's again.
            made.service._parts.snapshots._sequence = 0
            made.service._next_snapshot_s = 0.0
            for learner in group:
                learner.step()
            return await end_of(made)

    problem = asyncio.run(story())
    assert isinstance(problem, StateDamaged)
    assert "another process writes into" in str(problem)
