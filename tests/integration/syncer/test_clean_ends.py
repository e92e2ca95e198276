"""SIGTERM at each moment of a syncer's life: the right exit code, a summary or why there is none, and all that it had.

The process itself says when the moment has come, and stays in it until it is told to go on, or for ever.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import REPOSITORY
from tests.support.syncer import close, contribution, open_tiny, small_delta, tiny_config
from tests.support.syncer_scene import learners
from tests.support.text import write_text_corpus
from wan_diloco.config import RunConfig
from wan_diloco.errors import TransportError
from wan_diloco.transport.grpc_client import grpc_connection
from wan_diloco.units import FragmentId
from wan_diloco.wire.frames import pack

FIRST = FragmentId(0)
WAIT_S = 120.0
PROGRAM = """
import errno, os, sys, threading
from pathlib import Path
from wan_diloco.clock import SystemClock
from wan_diloco.config import load_config
from wan_diloco.errors import StorageError
from wan_diloco.storage import Journal
from wan_diloco.syncer import main, service
from wan_diloco.syncer.spool import Spool
from wan_diloco.syncer.workers import in_executor
from wan_diloco.telemetry import configure_logging

configure_logging(SystemClock())
folder, where = Path(sys.argv[1]), sys.argv[2]

def here():
    print("moment", flush=True)

def stay():
    here()
    threading.Event().wait()

def wrapped(name, before):
    right = getattr(main, name)
    def wrong(*arguments, **options):
        before()
        return right(*arguments, **options)
    setattr(main, name, wrong)

def until_told():
    here()
    sys.stdin.readline()

def disk_is_full(self, *_arguments, **_options):
    here()
    raise StorageError(os.strerror(errno.ENOSPC))

right_decide = service.SyncerService._decide

async def decide(self):
    here()
    if where == "stuck":
        await in_executor(self._parts.workers.maths, threading.Event().wait)
    await right_decide(self)

async def write(self, capture):
    await in_executor(self._parts.workers.files, threading.Event().wait)

right_append = Spool._append

def append(self, pieces):
    right_append(self, pieces)
    Spool._append = right_append
    here()

if where == "opening":
    wrapped("open_state", stay)
elif where == "building":
    wrapped("build_service", stay)
elif where == "concluding":
    wrapped("conclude", until_told)
elif where == "full":
    Journal.append = disk_is_full
elif where == "uploading":
    Spool._append = append
else:
    service.SyncerService._decide = decide
    service._DRAIN_S = service._LAST_SNAPSHOT_S = 0.2
    if where == "slow disk":
        service.SyncerService._write_snapshot = write
resume = "--resume" in sys.argv
sys.exit(main.run_syncer(load_config([folder / "given.json"], env={}).config, folder, resume))
"""


class Ended:
    """A syncer that is held at a moment of its life."""

    def __init__(self, folder: Path, where: str, *arguments: str) -> None:
        self.folder = folder
        self.log = folder / "syncer.log"
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder), where, *arguments],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def moment(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line == "moment\n":
                return
        raise AssertionError(self.log.read_text())

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return self.exit_code()

    def address(self) -> str:
        """It serves when that is there."""
        path = self.folder / "address"
        while not path.exists():
            assert self.popen.poll() is None, self.log.read_text()
            threading.Event().wait(0.05)
        return path.read_text()

    def exit_code(self) -> int:
        # What it still prints must not hold it up.
        self.popen.communicate(timeout=WAIT_S)
        return self.popen.returncode


@contextmanager
def started(folder: Path, where: str, *arguments: str) -> Iterator[Ended]:
    process = Ended(folder, where, *arguments)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


@contextmanager
def held_at(folder: Path, where: str, *arguments: str) -> Iterator[Ended]:
    with started(folder, where, *arguments) as process:
        process.moment()
        yield process


def _config(folder: Path, **tables: dict[str, Any]) -> RunConfig:
    text = write_text_corpus(folder / "text.txt")
    config = tiny_config(run={"tokens": 64 * 50}, data={"source": f"text:{text}"}, **tables)
    (folder / "given.json").write_text(config.resolved_json())
    return config


def _summary(folder: Path) -> dict[str, object]:
    summary: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_before_it_has_the_state_it_changes_nothing_and_says_why_there_is_no_summary(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    _config(tmp_path)
    with held_at(tmp_path, "opening") as process:
        assert process.end(number) == code
    assert "it writes no summary" in process.log.read_text()
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "state").exists()


def test_an_interim_summary_of_before_stays_until_there_is_another(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with held_at(tmp_path, "building") as process:
        assert process.end() == 143
    assert _summary(tmp_path)["finished"] is False
    with held_at(tmp_path, "opening", "--resume") as process:
        assert process.end() == 143
    assert _summary(tmp_path)["finished"] is False
    assert "not finished" in (tmp_path / "report.html").read_text()
    with held_at(tmp_path, "building", "--resume") as process:
        assert not (tmp_path / "summary.json").exists(), "it would soon be wrong"
        assert process.end() == 143
    assert _summary(tmp_path)["ledger_balance"] == 0
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert restored.state.term == 0, "it never served"
    close(restored)


def test_while_it_waits_for_learners(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with held_at(tmp_path, "serving") as process:
        assert process.end() == 143
    assert _summary(tmp_path)["finished"] is False
    assert not (tmp_path / "address").exists()
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert restored.state.term == 1
    close(restored)


@pytest.mark.parametrize("where", ["stuck", "slow disk"])
def test_what_never_ends_is_left_to_the_next_start(tmp_path: Path, where: str) -> None:
    config = _config(tmp_path)
    with held_at(tmp_path, where) as process:
        assert process.end() == 143
    assert "gave_up" in process.log.read_text()
    assert _summary(tmp_path)["finished"] is False
    close(open_tiny(tmp_path / "state", config, resume=True))


def test_a_contribution_of_which_a_part_has_come_is_none(tmp_path: Path) -> None:
    # So large that it comes in many pieces.
    config = _config(tmp_path, model={"dim": 256})

    async def story(process: Ended) -> None:
        address = await asyncio.to_thread(process.address)
        async with learners(config, lambda _: grpc_connection(address)) as (east, _):
            east.step()
            header = contribution(east.maths, "east", FIRST, step_lo=0, step_hi=1, base=east.versions[FIRST])
            payload = small_delta(east.maths, FIRST, 1)
            frames = pack(payload.codes, payload.scales, chunk_bytes=2**14)
            sending = asyncio.ensure_future(east._connection.upload(header, frames, WAIT_S))  # noqa: TID251
            await asyncio.to_thread(process.moment)
            assert await asyncio.to_thread(process.end) == 143
            with pytest.raises(TransportError):
                await sending

    with started(tmp_path, "uploading") as process:
        asyncio.run(story(process))
    summary = _summary(tmp_path)
    assert (summary["finished"], summary["ledger_balance"]) == (False, 0)
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert restored.state.incarnations == {"east": 1, "west": 1}
    assert restored.state.pool == [{}, {}]
    close(restored)


def test_a_full_disk_neither_holds_it_up_nor_changes_its_code(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with held_at(tmp_path, "full") as process:
        assert process.end() == 143
    assert "ended_unsettled" in process.log.read_text()
    close(open_tiny(tmp_path / "state", config, resume=True))


def test_a_signal_while_it_writes_its_summary_is_no_reason_to_leave_it_out(tmp_path: Path) -> None:
    _config(tmp_path)
    with started(tmp_path, "concluding") as process:
        process.address()
        process.popen.send_signal(signal.SIGTERM)
        process.moment()
        process.popen.send_signal(signal.SIGTERM)
        process.popen.communicate("go\n", timeout=WAIT_S)
        assert process.popen.returncode == 143
    assert _summary(tmp_path)["finished"] is False
