"""How a run stands, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import in_this_process
from tests.support.transport import RecordingHandler
from wan_diloco.cli.status import status_text
from wan_diloco.transport.grpc_server import GrpcSyncerServer

STATUS: dict[str, Any] = {
    "global_step": 120,
    "total_steps": 2441,
    "term": 2,
    "epoch": 1,
    "learners": [
        {
            "learner_id": "us-east",
            "live": True,
            "connected": True,
            "incarnation": 1,
            "local_step": 121,
            "behind_steps": 0,
            "tokens": 123_904,
            "loss": 2.5,
            "step_time_s": 0.02,
            "silent_s": 0.3,
            "merged_fresh": 59,
        },
        {"learner_id": "eu-west", "live": True, "connected": False, "incarnation": 2, "behind_steps": 30},
    ],
    "rounds": 118,
    "rounds_due": 3,
    "rounds_open": [{"round_id": 7, "fragment_id": 4, "reason": "1 of 2 learners"}],
    "waiting": {"quorum": "1 of 2 learners are live"},
    "reasons": {"store": "the bucket is gone\x1b[2J"},
    "traffic": {"us-east": {"uplink_bytes": 2**20, "downlink_bytes": 3 * 2**20}},
    "store": {"place": "s3://bucket/run", "newest_snapshot": "state-4", "shipped_bytes": 5, "failures": 2},
}


def test_a_person_is_told_who_is_there_what_is_open_and_what_is_waited_for() -> None:
    lines = status_text(STATUS, "host:7000").splitlines()
    assert lines[0] == "syncer host:7000, term 2, epoch 1"
    assert lines[1].startswith("step 120/2441, ")
    assert lines[2] == "rounds: 1 open, 3 due"
    (east,) = [line for line in lines if line.startswith("us-east")]
    assert east.split() == ["us-east", "live", "121", "0", "50%", "124k", "2.500", "20ms", "0s", "ago", "1MiB", "3MiB"]
    (west,) = [line for line in lines if line.startswith("eu-west")]
    assert west.split() == ["eu-west", "not", "connected", "-", "30", *"-------"]
    assert lines[-4:] == [
        "waits: 1 of 2 learners are live",
        "waits: the bucket is gone[2J",
        "waits: fragment 4: 1 of 2 learners",
        "store: s3://bucket/run has state-4; 2 failures",
    ]


def test_whatever_an_answer_lacks_is_no_error() -> None:
    assert status_text({}, "host:7000").splitlines()[0] == "syncer host:7000, term -, epoch -"


class Answering(RecordingHandler):
    """Knows how the run stands."""

    def status(self) -> dict[str, object]:
        return STATUS


@contextmanager
def _syncer() -> Iterator[str]:
    """Answers on another thread; its address."""
    found: list[str] = []
    listens, over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = GrpcSyncerServer(Answering(), "127.0.0.1:0")
        found.append(await server.start())
        listens.set()
        await asyncio.to_thread(over.wait)
        await server.stop(0.0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert listens.wait(60)
        yield found[0]
    finally:
        over.set()
        thread.join()


def test_a_syncer_is_asked_by_its_address_or_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _syncer() as address:
        (tmp_path / "address").write_text(address)
        for words in ((address,), ("--run-folder", str(tmp_path))):
            outcome = in_this_process(capsys, "status", *words, "--json")
            assert (outcome.exit_code, json.loads(outcome.stdout)) == (0, STATUS)
        outcome = in_this_process(capsys, "status", address)
        assert outcome.stdout.startswith(f"syncer {address}, term 2")


@pytest.mark.parametrize("words", [(), ("host:7000", "--run-folder", "runs/x"), ("host",), ("host:port",)])
def test_words_that_make_no_sense_are_a_usage_error(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert in_this_process(capsys, "status", *words).exit_code == 2


def test_where_nobody_answers_the_exit_code_asks_to_come_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = in_this_process(capsys, "status", "127.0.0.1:1")
    assert outcome.exit_code == 69
    assert outcome.stderr.startswith("wan-diloco: no syncer answers at 127.0.0.1:1: ")
    (tmp_path / "state").mkdir()
    outcome = in_this_process(capsys, "status", "--run-folder", str(tmp_path))
    assert outcome.exit_code == 69
    assert "no syncer listens for the run in" in outcome.stderr


@pytest.mark.parametrize("holds", [None, "nonsense"])
def test_a_folder_without_a_run_is_no_place_to_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], holds: str | None
) -> None:
    if holds is not None:
        (tmp_path / "address").write_text(holds)
    outcome = in_this_process(capsys, "status", "--run-folder", str(tmp_path))
    assert outcome.exit_code == 78
    assert str(tmp_path) in outcome.stderr
