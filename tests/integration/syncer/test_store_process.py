"""Syncers as processes of their own, with a real S3 server between them: a machine dies, and another takes over."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from tests.support.sources import REPOSITORY
from tests.support.store import S3Server, manifests, s3_server, until_there
from tests.support.syncer import tiny_config
from tests.support.syncer_scene import learners
from tests.support.text import write_text_corpus
from wan_diloco.errors import EXIT_CONFIG, TransportError
from wan_diloco.storage import ObjectStore
from wan_diloco.transport.grpc_client import fetch_status, grpc_connection

# Programs import torch here, on a machine that may be busy; nothing is asserted about time.
WAIT_S = 120.0


@pytest.fixture
def s3():
    with s3_server() as server:
        yield server


class Process:
    """`wan-diloco syncer`, in a folder."""

    def __init__(self, config, folder, *options: str) -> None:
        self.folder = folder
        self.log = folder.parent / f"{folder.name}.log"
        given = folder.parent / "given.json"
        given.write_text(config.resolved_json())
        command = [sys.executable, "-m", "wan_diloco", "syncer", str(given), "--run-folder", str(folder), *options]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)

    async def address(self) -> str:
        async with asyncio.timeout(WAIT_S):
            while not (self.folder / "address").exists():
                assert self.popen.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)
        return (self.folder / "address").read_text()

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.popen.wait, WAIT_S)


@asynccontextmanager
async def _process(config, folder, *options: str):
    process = Process(config, folder, *options)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()


def _config(tmp_path, s3: S3Server, steps: int):
    text = write_text_corpus(tmp_path / "text.txt")
    config = tiny_config(
        run={"tokens": 64 * steps},
        data={"source": f"text:{text}"},
        evaluation={"every_steps": 4, "tokens": "500"},
        syncer={"store": s3.new_place(), "store_endpoint": s3.endpoint, "snapshot_every": "100ms"},
    )
    return config, ObjectStore.open(config.syncer.store, config.syncer.store_endpoint)


async def _train(address: str, group, until_step: int) -> None:
    """Take steps until the syncer has come so far, or has gone."""
    async with asyncio.timeout(WAIT_S):
        status = await fetch_status(address, 5.0)
        while status["global_step"] < until_step and not status["ended"]:
            before = status["global_step"]
            for learner in group:
                learner.step()
            while not status["ended"] and (
                status["global_step"] == before or status["rounds_open"] or status["rounds_due"]
            ):
                assert [learner.problem for learner in group] == [None, None]
                await asyncio.sleep(0.02)
                try:
                    status = await fetch_status(address, 5.0)
                except TransportError:
                    return


def test_a_machine_dies_with_its_disk_and_another_ends_the_run(tmp_path, s3):
    config, store = _config(tmp_path, s3, steps=16)

    async def story():
        async with _process(config, tmp_path / "one") as process:
            address = await process.address()
            async with learners(config, lambda _: grpc_connection(address)) as group:
                await _train(address, group, 6)
                await until_there(lambda: len(manifests(store)) == 2, WAIT_S)
            process.popen.kill()
            process.popen.wait()
        shutil.rmtree(tmp_path / "one")
        # The lock was not given back: it is watched first.
        async with _process(config, tmp_path / "two", "--resume") as process:
            address = await process.address()
            status = await fetch_status(address, 5.0)
            assert (status["term"], status["epoch"]) == (2, 1)
            async with learners(config, lambda _: grpc_connection(address)) as group:
                # A step before that would be overwritten, and the first round wait for others that nobody takes.
                await until_there(lambda: all(v.epoch == 1 for one in group for v in one.versions), WAIT_S)
                await _train(address, group, 16)
                assert await process.exit_code() == 0, process.log.read_text()

    asyncio.run(story())
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["finished"]
    assert summary["ledger_balance"] == 0


def test_who_is_pushed_aside_ends_with_77_and_says_by_whom(tmp_path, s3):
    config, store = _config(tmp_path, s3, steps=100)

    async def story():
        async with _process(config, tmp_path / "one") as first:
            await first.address()
            await until_there(lambda: bool(manifests(store)), WAIT_S)
            async with _process(config, tmp_path / "two", "--resume", "--take-over") as second:
                await second.address()
                assert await first.exit_code() == 77, first.log.read_text()
                assert "was taken over by the syncer with pid" in first.log.read_text()
                assert second.popen.poll() is None
                second.popen.terminate()
                assert await second.exit_code() == 143, second.log.read_text()

    asyncio.run(story())
    newest = manifests(store)[0]
    assert newest.term == 2


def test_a_bucket_that_nobody_made_is_a_mistake_in_the_configuration_for_supervisors(tmp_path, s3):
    config, _ = _config(tmp_path, s3, steps=24)
    syncer = config.syncer.model_copy(update={"store": "s3://nobody-made-this/one"})

    async def story() -> None:
        async with _process(config.model_copy(update={"syncer": syncer}), tmp_path / "run") as process:
            assert await process.exit_code() == EXIT_CONFIG
            assert "there is no bucket nobody-made-this (make it, or correct syncer.store" in process.log.read_text()
        assert not (tmp_path / "run").exists()

    asyncio.run(story())
