"""`wan-diloco run` as a user runs it: real processes, real gRPC, a tiny model on a tiny text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.sources import REPOSITORY
from wan_diloco.clock import SystemClock

pytestmark = pytest.mark.timeout(600)

# A machine that is busy with other things takes minutes to start seven Python processes; an idle one takes seconds.
_WITHIN_S = 240.0
WORDS = ("the", "of", "and", "to", "in", "that", "we", "our", "for", "is", "it", "this", "with", "as", "by", "have")
CONFIG = """
[run]
name = "tiny"
tokens = "{tokens}"
start_timeout = "240s"
[model]
dim = 16
layers = 1
heads = 2
sequence_length = 32
[data]
source = "text:{text}"
[inner]
batch_tokens = 64
warmup_steps = 4
[sync]
fragments = 4
period_steps = 4
overlap_steps = 1
[evaluation]
every_steps = 20
tokens = "2k"
[[regions]]
name = "a"
step_time_min = "{step_time}"
[[regions]]
name = "b"
step_time_min = "{step_time}"
"""


def tiny_text() -> str:
    """Some 150 kB in which there is something to learn."""
    lines = [" ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(12)) for i in range(3000)]
    return "".join(f"{line}.\n\n" if i % 5 == 0 else f"{line},\n" for i, line in enumerate(lines))


class Tiny:
    """A configuration and the folder of its run."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "tiny.toml"
        self.run_folder = folder / "runs" / "tiny"
        self._text = folder / "text.txt"
        self._text.write_text(tiny_text())
        self._started: list[subprocess.Popen[str]] = []
        self.configure()

    def configure(self, *, steps: int = 60, step_time: str = "0s") -> None:
        self.config.write_text(CONFIG.format(tokens=steps * 128, text=self._text, step_time=step_time))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        env = {name: text for name, text in os.environ.items() if not name.startswith("WAN_DILOCO_")}
        command = [sys.executable, "-m", "wan_diloco", "run", str(self.config), "--run-folder", str(self.run_folder)]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], exit_code: int) -> tuple[str, str]:
        """What it printed; it must end by itself, with this exit code, and leave no process."""
        family = psutil.Process(process.pid).children(recursive=True)
        stdout, stderr = process.communicate(timeout=_WITHIN_S)
        assert process.returncode == exit_code, f"{stderr}\n{self.logs()}"
        assert psutil.wait_procs(family, timeout=20)[1] == []
        return stdout, stderr

    def tape(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_folder / "tape.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["type"] == kind]

    def logs(self) -> str:
        paths = sorted((self.run_folder / "logs").glob("*.log"))
        return "\n".join(f"---- {path.name}\n{path.read_text()[-2000:]}" for path in paths)

    def clean_up(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()  # its guardians end the rest
            process.communicate()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    run = Tiny(tmp_path)
    yield run
    run.clean_up()


def until(condition: Callable[[], bool], process: subprocess.Popen[str], tiny: Tiny) -> None:
    clock, never = SystemClock(), threading.Event()
    end_s = clock.now_s() + _WITHIN_S
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}: {process.communicate()}\n{tiny.logs()}"
        assert clock.now_s() < end_s, tiny.logs()
        never.wait(0.05)


def learner(process: subprocess.Popen[str], region: str) -> psutil.Process:
    """The training process of a region: below its guardian."""
    (found,) = (
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "learner" in (words := child.cmdline()) and region in words and "wan_diloco.cli.guardian" not in words
    )
    return found


def test_two_regions_train_one_model_from_start_to_export(tiny: Tiny, tmp_path: Path) -> None:
    tiny.configure(step_time="40ms")
    process = tiny.start("--json")
    stdout, stderr = tiny.finish(process, 0)

    summary = json.loads(stdout)
    assert summary == json.loads((tiny.run_folder / "summary.json").read_text())
    assert summary["tokens_trained"] >= 60 * 64  # of the quicker region alone
    assert summary["ledger_balance"] == 0
    assert summary["merges_per_fragment_min"] >= 1  # how many more is up to the machine: bench/quality.py counts them
    assert summary["validation_nats_per_byte"] < 4.5  # it begins at log(256) = 5.55
    said = [line for line in stderr.splitlines() if line.startswith("wan-diloco: ")]
    assert len(said) == 2, "what runs where, and nothing went wrong"
    assert "this is process" in said[0]
    assert "all are there; their processes: syncer" in said[1]
    assert {path.name for path in (tiny.run_folder / "logs").iterdir()} >= {"syncer.log", "a.log", "b.log"}
    assert json.loads((tiny.run_folder / "evaluation.json").read_text())["sample"]

    command = [sys.executable, "-m", "wan_diloco", "export", str(tiny.run_folder), "--out", str(tmp_path / "model")]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=_WITHIN_S, stdout=subprocess.DEVNULL)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["global_step"] >= 60


def test_a_killed_learner_is_taken_back_and_a_killed_supervisor_leaves_no_process(tiny: Tiny) -> None:
    tiny.configure(steps=100_000, step_time="50ms")
    process = tiny.start()
    until(lambda: len(tiny.tape("RoundClosed")) > 4, process, tiny)
    learner(process, "b").kill()

    def merged_again() -> bool:
        keys = [record["header"]["key"] for record in tiny.tape("ContributionJournalled")]
        return any(key["learner_id"] == "b" and key["incarnation"] == 2 for key in keys)

    until(merged_again, process, tiny)
    admitted = [(record["learner_id"], record["incarnation"]) for record in tiny.tape("LearnerAdmitted")]
    assert sorted(admitted) == [("a", 1), ("b", 1), ("b", 2)]

    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 8  # three guardians, the syncer, its evaluator, two learners, their uplinks
    process.kill()
    assert psutil.wait_procs(family, timeout=_WITHIN_S)[1] == []
    assert "b died (killed by SIGKILL)" in process.communicate()[1]


def test_an_interrupted_run_owns_its_folder_says_how_to_go_on_and_does(tiny: Tiny) -> None:
    tiny.configure(steps=300, step_time="40ms")
    first = tiny.start()
    until((tiny.run_folder / "state").exists, first, tiny)

    others = tiny.start("--resume"), tiny.start()
    _, stderr = tiny.finish(others[0], 78)
    assert f"in use by the run with pid {first.pid}" in stderr
    _, stderr = tiny.finish(others[1], 78)
    assert "give --resume" in stderr

    until(lambda: len(tiny.tape("FragmentPublished")) > 4, first, tiny)
    first.send_signal(signal.SIGINT)
    _, stderr = tiny.finish(first, 130)
    assert f"--run-folder {tiny.run_folder} --resume" in stderr
    published = len(tiny.tape("FragmentPublished"))
    assert not tiny.tape("RunEnded")

    stdout, _ = tiny.finish(tiny.start("--resume"), 0)
    assert "The published model writes:" in stdout
    assert len(tiny.tape("FragmentPublished")) > published
    assert len(tiny.tape("RunStarted")) == 1
    assert len(tiny.tape("RunEnded")) == 1


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("inner.lr=fast", "inner.lr"),
        ("data.source=text:/nowhere/text.txt", "there is no file or folder"),
        ("syncer.listen=192.0.2.1:7000", "is reachable from outside"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(tiny: Tiny, setting: str, sentence: str) -> None:
    stdout, stderr = tiny.finish(tiny.start("--set", setting), 78)
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert sentence in stderr
    assert not tiny.run_folder.parent.exists()
