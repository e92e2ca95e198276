"""The syncer as a process of its own, over gRPC, with its evaluator."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import psutil
import pytest

from tests.support.sources import REPOSITORY
from tests.support.syncer import close, open_tiny, tiny_config
from tests.support.syncer_scene import learners, until
from tests.support.text import write_text_corpus
from wan_diloco.errors import TransportError
from wan_diloco.transport.grpc_client import fetch_status, grpc_connection

# Three programs import torch here, on a machine that may be busy; nothing is asserted about time.
WAIT_S = 120.0
PROGRAM = """
import sys
from pathlib import Path
from wan_diloco.config import load_config
from wan_diloco.syncer.main import run_syncer
folder = Path(sys.argv[1])
load = lambda: load_config([folder / "given.json"], env={}).config
sys.exit(run_syncer(load(), folder, "--resume" in sys.argv, load=load))
"""


class Process:
    """A syncer that was started."""

    def __init__(self, folder, *arguments: str) -> None:
        self.folder = folder
        self.log = folder / "syncer.log"
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder), *arguments], cwd=REPOSITORY, stdout=log, stderr=log
            )

    async def address(self) -> str:
        async with asyncio.timeout(WAIT_S):
            while not (self.folder / "address").exists():
                assert self.popen.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)
        return (self.folder / "address").read_text()

    def kill_evaluator(self) -> None:
        for child in psutil.Process(self.popen.pid).children():
            if "wan_diloco.syncer.evaluator" in child.cmdline():
                child.kill()

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.popen.wait, WAIT_S)


@asynccontextmanager
async def syncer_process(folder, *arguments: str):
    process = Process(folder, *arguments)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()


def _config(folder, steps: int):
    text = write_text_corpus(folder / "text.txt")
    config = tiny_config(
        run={"tokens": 64 * steps},
        data={"source": f"text:{text}"},
        evaluation={"every_steps": 4, "tokens": "500"},
    )
    (folder / "given.json").write_text(config.resolved_json())
    return config


async def _train(address: str, group, steps: int) -> None:
    async with asyncio.timeout(WAIT_S):
        for _ in range(steps):
            before = await fetch_status(address, 5.0)
            for learner in group:
                learner.step()
            while True:
                try:
                    status = await fetch_status(address, 5.0)
                except TransportError:
                    return
                if status["ended"] or (
                    status["global_step"] > before["global_step"]
                    and not status["rounds_open"]
                    and not status["rounds_due"]
                ):
                    break
                assert [learner.problem for learner in group] == [None, None]
                await asyncio.sleep(0.02)


def test_a_run_from_start_to_report(tmp_path):
    config = _config(tmp_path, steps=9)

    async def story():
        async with syncer_process(tmp_path) as process:
            address = await process.address()
            async with learners(config, lambda _: grpc_connection(address)) as group:
                await _train(address, group, 9)
                assert await process.exit_code() == 0, process.log.read_text()
            lines = process.log.read_text().splitlines()
            (limits,) = [line for line in lines if " deadlines " in line]
            assert "config show CONFIG --deadlines" in limits
            assert "start " in limits, "each by its name"
            (listening,) = [line for line in lines if " listening " in line]
            assert f"address={address}" in listening
            assert f"folder={tmp_path}" in listening
            assert "state_written" not in process.log.read_text(), "a run that has ended doesn't go on"

    asyncio.run(story())
    summary = json.loads((tmp_path / "summary.json").read_text())
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert summary["ledger_balance"] == 0
    assert summary["merges_per_fragment_min"] >= 2
    assert summary["validation_nats_per_byte"] == pytest.approx(evaluation["validation_loss"])
    assert summary["test_nats_per_byte"] == pytest.approx(evaluation["test_loss"])
    assert "<html" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "address").exists()
    curve = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line["global_step"] for line in curve if line["kind"] == "evaluation" and line["split"] == "validation"]
    assert steps[0] == 0
    assert len(steps) >= 3
    assert [path.name for path in (tmp_path / "published").iterdir()] == ["final"]


def test_an_evaluator_that_was_killed_is_replaced_for_the_end(tmp_path):
    config = _config(tmp_path, steps=9)

    async def story():
        async with syncer_process(tmp_path) as process:
            address = await process.address()
            process.kill_evaluator()
            async with learners(config, lambda _: grpc_connection(address)) as group:
                await _train(address, group, 9)
                assert await process.exit_code() == 0, process.log.read_text()

    asyncio.run(story())
    summary = json.loads((tmp_path / "summary.json").read_text())
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert summary["validation_nats_per_byte"] == pytest.approx(evaluation["validation_loss"])


def test_a_run_whose_model_can_not_be_evaluated_says_so_and_tries_again_when_it_is_resumed(tmp_path):
    config = _config(tmp_path, steps=5)

    async def story():
        async with syncer_process(tmp_path) as process:
            address = await process.address()
            async with learners(config, lambda _: grpc_connection(address)) as group:
                await _train(address, group, 3)
                # Its text is gone, so the first evaluator ends and no other can begin.
                (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
                process.kill_evaluator()
                await _train(address, group, 2)
                assert await process.exit_code() == 0, process.log.read_text()
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["finished"]
        assert (summary["validation_nats_per_byte"], summary["test_nats_per_byte"]) == (None, None)
        assert "tried 3 times" in summary["evaluation"]
        (tmp_path / "moved.txt").rename(tmp_path / "text.txt")
        async with syncer_process(tmp_path, "--resume") as process:
            assert await process.exit_code() == 0, process.log.read_text()
        again = json.loads((tmp_path / "summary.json").read_text())
        assert again["test_nats_per_byte"] > 0
        assert again["wall_s"] == summary["wall_s"], "the time of the run, not of its evaluation"

    asyncio.run(story())


def test_a_hangup_changes_rates_and_learners_are_granted_theirs(tmp_path):
    config = _config(tmp_path, steps=50)

    async def story():
        async with syncer_process(tmp_path) as process:
            address = await process.address()
            async with learners(config, lambda _: grpc_connection(address)) as group:
                await _train(address, group, 2)
                assert {learner.granted_bytes_per_s for learner in group} == {0.0}
                tree = json.loads(config.resolved_json())
                tree["syncer"]["ingress"] = "80mbit"
                tree["outer"]["lr"] = 0.5
                (tmp_path / "given.json").write_text(json.dumps(tree))
                process.popen.send_signal(signal.SIGHUP)
                await until(lambda: {learner.granted_bytes_per_s for learner in group} == {5e6})
                await _train(address, group, 2)
                log = process.log.read_text()
                assert "syncer.ingress is 80mbit now, was 0B/s (no cap)" in log
                assert "outer.lr differs" in log
                stored = json.loads((tmp_path / "config.json").read_text())
                assert (stored["syncer"]["ingress"], stored["outer"]["lr"]) == ("80mbit", config.outer.lr)
                process.popen.send_signal(signal.SIGTERM)
                assert await process.exit_code() == 143

    asyncio.run(story())


def test_a_signal_drains_and_another_process_takes_the_state_up(tmp_path):
    config = _config(tmp_path, steps=50)

    async def story():
        async with syncer_process(tmp_path) as process:
            address = await process.address()
            async with learners(config, lambda _: grpc_connection(address)) as group:
                await _train(address, group, 5)
                process.popen.send_signal(signal.SIGTERM)
                assert await process.exit_code() == 143, process.log.read_text()
        last = process.log.read_text().splitlines()[-1]
        newest = max((tmp_path / "state" / "snapshots").iterdir(), key=lambda path: int(path.name.partition("-")[2]))
        assert " state_written " in last
        assert f"snapshot {newest.name} and the journal behind it in {tmp_path / 'state'}" in last
        assert "--resume" in last
        assert not (tmp_path / "address").exists()
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert not summary["finished"]
        assert summary["validation_nats_per_byte"] is None
        assert summary["rounds"] >= 2
        assert "not finished" in (tmp_path / "report.html").read_text()
        async with syncer_process(tmp_path, "--resume") as process:
            address = await process.address()
            status = await fetch_status(address, 5.0)
            assert status["term"] == 2
            assert status["rounds"] >= 2
            assert not (tmp_path / "summary.json").exists(), "it would soon be wrong"
            process.popen.send_signal(signal.SIGINT)
            assert await process.exit_code() == 130, process.log.read_text()

    asyncio.run(story())
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert restored.state.term == 2
    close(restored)
