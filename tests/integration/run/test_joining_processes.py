"""Two regions that are listed become four learners: real processes over gRPC, the others started by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.run.test_run import tiny_text
from tests.support.sources import REPOSITORY
from wan_diloco.errors import EXIT_TEMPORARY, TransportError
from wan_diloco.transport.grpc_client import fetch_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WITHIN_S = 240.0
# Long enough for four small models on two cores to be mostly idle.
STEP_S = 0.5
MORE_STEPS = 20
LISTED, JOINERS = ("a", "b"), ("spot-1", "spot-2")
CONFIG = """
[run]
name = "joined"
tokens = "10M"
[model]
dim = 16
layers = 1
heads = 2
sequence_length = 32
[data]
source = "text:{text}"
shards = 4
[inner]
batch_tokens = 64
warmup_steps = 4
[sync]
fragments = 4
period_steps = 4
membership_lease = "5s"
[evaluation]
every_steps = 100000
[unlisted]
learners_max = 3
step_time_min = "{step_s}s"
[[regions]]
name = "a"
step_time_min = "{step_s}s"
[[regions]]
name = "b"
step_time_min = "{step_s}s"
"""


class Scene:
    """A run under its supervisor, and learners that were started by hand."""

    def __init__(self, folder: Path) -> None:
        (folder / "text.txt").write_text(tiny_text())
        self.config = folder / "joined.toml"
        self.config.write_text(CONFIG.format(text=folder / "text.txt", step_s=STEP_S))
        self.run_folder = folder / "run"
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        env = {key: text for key, text in os.environ.items() if not key.startswith("WAN_DILOCO_")}
        command = [sys.executable, "-m", "wan_diloco", words[0], str(self.config), *words[1:]]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes[name] = process
        return process

    def join(self, name: str) -> subprocess.Popen[bytes]:
        address = (self.run_folder / "address").read_text()
        folder = str(self.folder / name)
        words = ("learner", "--region", name, "--syncer", address, "--run-folder", folder, "--threads", "1")
        return self.start(name, *words)

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(WITHIN_S):
            while True:
                await asyncio.sleep(0.1)
                try:
                    status: dict[str, Any] = await fetch_status((self.run_folder / "address").read_text(), 5.0)
                except (TransportError, OSError):
                    continue
                if holds(status):
                    return status

    async def steps_go_on(self) -> None:
        """Each listed region takes some more; how long they take on a machine that starts others is not said here."""
        first = steps_of(await self.until(lambda _: True))
        await self.until(lambda status: all(steps_of(status)[name] >= first[name] + MORE_STEPS for name in LISTED))

    def clean_up(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()  # guardians end what is below
            process.wait()


def steps_of(status: dict[str, Any]) -> dict[str, int]:
    return {learner["learner_id"]: learner["local_step"] for learner in status["learners"]}


def merged(status: dict[str, Any], *names: str) -> bool:
    found = {learner["learner_id"]: learner["merged_fresh"] for learner in status["learners"]}
    return all(found.get(name, 0) >= 3 for name in names)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.clean_up()


def test_learners_join_a_run_that_goes_on_and_nobody_stops_or_starts_again(scene: Scene) -> None:
    scene.start("run", "run", "--run-folder", str(scene.run_folder))

    async def play() -> None:
        await scene.until(lambda status: merged(status, *LISTED))
        for name in JOINERS:
            scene.join(name)
        await scene.steps_go_on()
        await scene.until(lambda status: merged(status, *LISTED, *JOINERS))
        await scene.steps_go_on()
        one_too_many = scene.join("spot-3")
        assert await asyncio.to_thread(one_too_many.wait, WITHIN_S) == EXIT_TEMPORARY, "all data are lent"
        scene.processes["spot-1"].send_signal(signal.SIGTERM)
        scene.processes["spot-1"].wait(WITHIN_S)
        await scene.until(lambda status: not live(status, "spot-1"))
        scene.join("spot-3")
        status = await scene.until(lambda status: merged(status, "spot-3"))
        shards = {learner["learner_id"]: learner["shard"] for learner in status["learners"]}
        assert shards["spot-1"] is None
        assert sorted(shards[name] for name in (*LISTED, "spot-2", "spot-3")) == [0, 1, 2, 3]
        assert {learner["incarnation"] for learner in status["learners"]} == {1}, "nobody was started again"
        assert status["repeated_units"] == status["balance"] == 0

    asyncio.run(play())


def live(status: dict[str, Any], name: str) -> bool:
    return any(learner["live"] for learner in status["learners"] if learner["learner_id"] == name)
