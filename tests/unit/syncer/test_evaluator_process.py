"""A child that dies, hangs or talks nonsense: replaced, given up, and never waited for without bound."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil

import pytest

from wan_diloco.errors import EXIT_CONFIG, StorageUnusable, WanDilocoError
from wan_diloco.syncer.evaluation import Curve
from wan_diloco.syncer.evaluator_process import EvaluatorProcess, Patience
from wan_diloco.syncer.workers import Workers
from wan_diloco.units import GlobalStep

# Counts its lives in a file; each life does what the word of its number says, the last word stands for all others.
CHILD = """
lives=$(($(cat lives 2>/dev/null || echo 0) + 1)); echo $lives > lives
word=$(echo "$WORDS" | cut -d' ' -f$lives); [ -n "$word" ] || word=$(echo "$WORDS" | sed 's/.* //')
while read -r line; do
    echo "$line" >> asked
    name=$(echo "$line" | sed 's/.*"snapshot": "\\([^"]*\\)".*/\\1/')
    case $word in
        die) exit 1;;
        hang) exec sleep 1000;;
        slow) for part in 0.2 0.4 0.6 0.8; do
            echo "{\\"snapshot\\": \\"$name\\", \\"progress\\": $part}"; sleep 0.4
        done;;
        babble) echo 'a library says hello'; echo '[1]';;
        refuse) echo "{\\"snapshot\\": \\"$name\\", \\"problem\\": \\"the disk is full\\"}"; continue;;
    esac
    echo "{\\"snapshot\\": \\"$name\\", \\"validation_loss\\": $lives}"
done
"""


class Heard:
    """What the process told."""

    def __init__(self, folder, words: str = "", command: list[str] | None = None, **patience: float) -> None:
        self.answers: list[dict] = []
        self.shares: list[float] = []
        self.problems: list[str] = []
        self.folder = folder
        self.process = EvaluatorProcess(
            folder,
            answered=lambda answer: self.answers.append(dict(answer)),
            progressed=self.shares.append,
            report=self.problems.append,
            command=command or ["sh", "-c", f"cd {folder}; WORDS='{words}'; {CHILD}"],
            patience=Patience(**{"silent_s": 60.0, "pause_s": 0.01, "leave_s": 10.0, **patience}),
        )

    async def play(self, *names: str) -> str:
        await self.process.start()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(self.process.run())
            for name in names:
                self.process.ask(name, final=name == "final")
        return await self.process.finished()

    @property
    def lives(self) -> int:
        return int((self.folder / "lives").read_text())


def test_all_that_is_asked_for_is_evaluated_by_one_child(tmp_path):
    heard = Heard(tmp_path, "work")
    assert asyncio.run(heard.play("step-1", "step-2", "final")) == ""
    assert [answer["snapshot"] for answer in heard.answers] == ["step-1", "step-2", "final"]
    assert heard.lives == 1
    assert heard.problems == []


def test_a_child_that_died_is_replaced_and_nothing_that_was_asked_for_is_lost(tmp_path):
    heard = Heard(tmp_path, "die work")
    assert asyncio.run(heard.play("step-1", "final")) == ""
    assert [(answer["snapshot"], answer["validation_loss"]) for answer in heard.answers] == [
        ("step-1", 2),
        ("final", 2),
    ]


def test_a_child_that_is_silent_is_replaced(tmp_path):
    heard = Heard(tmp_path, "hang work", silent_s=1.0)
    assert asyncio.run(heard.play("final")) == ""
    assert heard.answers[0]["validation_loss"] == 2


def test_a_child_that_gets_on_is_waited_for_and_its_progress_told(tmp_path):
    """The whole takes longer than a silence may last."""
    heard = Heard(tmp_path, "slow", silent_s=1.5)
    assert asyncio.run(heard.play("final")) == ""
    assert heard.shares == [0.2, 0.4, 0.6, 0.8]
    assert heard.lives == 1


def test_what_can_not_be_evaluated_is_given_up_in_words(tmp_path):
    heard = Heard(tmp_path, "die", tries=3)
    problem = asyncio.run(heard.play("final"))
    assert "ended by itself" in problem
    assert "tried 3 times" in problem
    assert heard.answers == []
    assert heard.lives == 3
    assert heard.problems == [f"snapshot final wasn't evaluated: {problem}"]


def test_a_curve_that_was_given_up_does_not_take_the_final_evaluation_its_tries(tmp_path):
    heard = Heard(tmp_path, "die die die work", tries=3)
    assert asyncio.run(heard.play("step-1", "step-2", "final")) == ""
    assert [answer["snapshot"] for answer in heard.answers] == ["final"]
    assert heard.lives == 4, "the second point isn't tried any more"
    assert len(heard.problems) == 2


def test_lines_that_are_no_answers_end_nothing(tmp_path):
    heard = Heard(tmp_path, "babble")
    assert asyncio.run(heard.play("final")) == ""
    assert heard.answers[0]["snapshot"] == "final"


def test_a_problem_is_an_answer(tmp_path):
    heard = Heard(tmp_path, "refuse")
    assert asyncio.run(heard.play("final")) == "the disk is full"
    assert heard.lives == 1


def test_what_the_runs_end_waits_for_is_done_in_a_hurry(tmp_path):
    heard = Heard(tmp_path, "work")
    asyncio.run(heard.play("step-1", "final"))
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert [request["hurry"] for request in asked] == [True, True], "the final one was asked for already"


def test_a_child_that_can_not_be_started_is_a_problem_in_words(tmp_path, monkeypatch):
    (tmp_path / "child").write_text("#!/bin/sh\nrm child\n")
    (tmp_path / "child").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    heard = Heard(tmp_path, command=[str(tmp_path / "child")])
    problem = asyncio.run(heard.play("final"))
    assert "the evaluator can't be started with" in problem
    assert "No such file" in problem


@pytest.mark.parametrize("what", ["a file", "a link", "a folder for the log"])
def test_a_log_that_can_not_be_is_refused_at_the_start_and_told_later(tmp_path, what):
    heard = Heard(tmp_path, "die")

    def spoil() -> None:
        logs = tmp_path / "logs"
        if what == "a folder for the log":
            (logs / "evaluator.log").mkdir(parents=True)
        elif what == "a file":
            logs.write_text("x")
        else:
            logs.symlink_to("nowhere")

    spoil()
    with pytest.raises(WanDilocoError, match=r"it is a (file|symbolic link that leads nowhere|folder)") as caught:
        asyncio.run(heard.process.start())
    assert caught.value.exit_code == EXIT_CONFIG

    (tmp_path / "later").mkdir()
    heard = Heard(tmp_path / "later", "die")

    async def story() -> str:
        await heard.process.start()
        shutil.rmtree(tmp_path / "later" / "logs")
        (tmp_path / "logs").rename(tmp_path / "later" / "logs")
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(heard.process.run())
            heard.process.ask("final", final=True)
        return await heard.process.finished()

    assert "it is a " in asyncio.run(story()), "who merges goes on"


@pytest.mark.parametrize(("name", "ends"), [("EAGAIN", False), ("ENOMEM", False), ("ENOENT", False), ("EACCES", True)])
def test_a_system_that_has_no_process_to_give_now_does_not_end_who_merges(tmp_path, monkeypatch, name, ends):
    number = getattr(errno, name)

    async def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    heard, said = Heard(tmp_path), []
    curve = Curve(
        tmp_path, None, heard.process, Workers.inline(), every_steps=1, from_step=GlobalStep(0), report=said.append
    )
    if ends:
        with pytest.raises(StorageUnusable, match="the evaluator can't be started"):
            asyncio.run(curve.start())
        return
    asyncio.run(curve.start())
    (sentence,) = said
    assert "the evaluator can't be started" in sentence
    assert os.strerror(number) in sentence


def test_stopping_ends_the_child_and_whoever_waits(tmp_path):
    heard = Heard(tmp_path, "hang")

    async def story() -> str:
        await heard.process.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(heard.process.run())
            heard.process.ask("final", final=True)
            await asyncio.sleep(0)
            running.cancel()
        assert heard.process.pid is None
        return await heard.process.finished()

    assert asyncio.run(story()) == "the evaluator was stopped"
