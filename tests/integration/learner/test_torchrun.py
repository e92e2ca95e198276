"""A learner that torchrun starts, against a real syncer: what is left of a rank that dies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.integration.syncer.test_process import WAIT_S, syncer_process
from tests.support.sources import REPOSITORY
from tests.support.syncer_scene import begun_by_one, learners, merged, trains_on
from wan_diloco.transport.grpc_client import fetch_status, grpc_connection


class Torchrun:
    """One rank, which is started again once."""

    def __init__(self, config: Path, syncer: str) -> None:
        self.log = config.parent / "torchrun.log"
        agent = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
        agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        learner = ["-m", "wan_diloco", "learner", str(config), "--region", "east", "--syncer", syncer, "--resume"]
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *agent, *learner, "--run-folder", str(config.parent / "east")],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def family(self) -> list[psutil.Process]:
        """The rank of the moment, and what it started."""
        return psutil.Process(self.popen.pid).children(recursive=True)

    @property
    def rank(self) -> psutil.Process:
        (found,) = (child for child in self.family if child.cmdline()[2:5] == ["-m", "wan_diloco", "learner"])
        return found


@contextmanager
def torchrun(config: Path, syncer: str) -> Iterator[Torchrun]:
    """Ranks have sessions of their own: they are ended one by one, whatever happened."""
    started = Torchrun(config, syncer)
    try:
        yield started
    finally:
        family = started.family if started.popen.poll() is None else []
        started.popen.kill()
        started.popen.wait()
        for process in family:
            if process.is_running():
                process.kill()


async def until_merged(address: str, process: Torchrun, *, incarnation: int, rounds: int) -> dict[str, Any]:
    """East lives that life, and was in so many rounds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            assert process.popen.poll() is None, process.log.read_text()
            status: dict[str, Any] = await fetch_status(address, 5.0)
            lives = {one["learner_id"]: one["incarnation"] for one in status["learners"]}
            if lives.get("east") == incarnation and merged(status, "east") >= rounds:
                return status
            await asyncio.sleep(0.05)


def test_a_rank_that_is_killed_is_started_again_and_nothing_of_it_counts_twice(tmp_path: Path) -> None:
    config = begun_by_one(tmp_path)
    tree = json.loads(config.resolved_json())
    tree["regions"][0]["step_time_min"] = "20ms"
    (tmp_path / "given.json").write_text(json.dumps(tree))

    async def story() -> dict[str, Any]:
        async with syncer_process(tmp_path) as process:
            address = await process.address()
            async with learners(config, lambda _: grpc_connection(address), names=["west"]) as (west,):
                with torchrun(tmp_path / "given.json", address) as east:
                    await until_merged(address, east, incarnation=1, rounds=4)
                    rank = east.rank
                    rank.kill()
                    await trains_on(address, west)
                    second = await until_merged(address, east, incarnation=2, rounds=0)
                    # Of each of the two fragments one of the first life's may still be merged.
                    rounds = merged(second, "east") + 4
                    await until_merged(address, east, incarnation=2, rounds=rounds)
                    assert east.rank.pid != rank.pid
                    return await trains_on(address, west)

    status = asyncio.run(story())
    assert {one["learner_id"]: one["incarnation"] for one in status["learners"]} == {"east": 2, "west": 1}
    assert (status["balance"], status["repeated_units"]) == (0, 0)
    assert "other_data" not in status["rejected"], "its second life goes on behind the data of its first"
