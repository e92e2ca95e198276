"""The supervisor, with real processes that play syncer and learner."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from wan_diloco.cli.keeper import Condition, ProcessSpec, last_line, message_of
from wan_diloco.cli.launch import _accompanied
from wan_diloco.cli.lives import RestartPolicy
from wan_diloco.cli.supervise import Outcome, Patience, Supervisor
from wan_diloco.clock import SystemClock
from wan_diloco.protocol.deadlines import DRAIN_S, GOODBYE_S, LAST_SNAPSHOT_S, SHIP_LAST_S, SPARE_S
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.syncer.ending import Ending
from wan_diloco.syncer.main import _GRACE_S
from wan_diloco.telemetry.last_resort import WITHIN_S

# Every process appends a line to a file of its own when it starts and counts its lives by it.
PROLOGUE = """
import os, pathlib, signal, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def wait(path):
    while not (folder / path).exists():
        time.sleep(0.01)
def end(code, words=""):
    print(words, file=sys.stderr, flush=True)
    sys.exit(code)
def drain(*_):
    (folder / f"{name}.drained").touch()
    end(143)
# Before anybody knows that it lives, and tells it to end.
signal.signal(signal.SIGTERM, drain)
with (folder / f"{name}.lives").open("a") as file:
    file.write(f"{' '.join(sys.argv[3:]) or 'first'}\\n")
life = len((folder / f"{name}.lives").read_text().splitlines())
"""
LISTEN = "(folder / 'address').write_text('127.0.0.1:1')\n"
LINGER = "time.sleep(600)\n"


class Stage:
    """A folder, and processes that act in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def supervisor(
        self, syncer: str, learners: Sequence[str], *, quorum: int = 1, patience: Patience | None = None
    ) -> Supervisor:
        return Supervisor(
            syncer=self._spec("syncer", syncer),
            learners=[self._spec(f"r{index}", source) for index, source in enumerate(learners)],
            address_path=self.folder / "address",
            quorum=quorum,
            env=dict(os.environ),
            policy=RestartPolicy(retry=RetryPolicy(initial_s=0.01, max_s=0.02), quick_failures_max=3),
            patience=patience or Patience(),
            rng=random.Random(0),
            clock=SystemClock(),
            say=self.said.append,
        )

    def lives(self, name: str) -> list[str]:
        path = self.folder / f"{name}.lives"
        return path.read_text().splitlines() if path.exists() else []

    def drained(self, name: str) -> bool:
        return (self.folder / f"{name}.drained").exists()

    def _spec(self, name: str, source: str) -> ProcessSpec:
        command = (sys.executable, "-c", PROLOGUE + textwrap.dedent(source), str(self.folder), name)
        return ProcessSpec(name=name, first=command, again=(*command, "--resume"), log_path=self.folder / f"{name}.log")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is another process's doing
        await asyncio.sleep(0.01)


def run(supervisor: Supervisor) -> Outcome:
    outcome = asyncio.run(asyncio.wait_for(supervisor.run(), 60))
    assert psutil.Process().children() == []
    return outcome


def run_past(stage: Stage, supervisor: Supervisor, condition: Condition, path: str) -> Outcome:
    """Run, and make a file that the others wait for when the first learner is so."""

    async def scene() -> Outcome:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.run())
            await until(lambda: supervisor.learners[0].condition is condition)
            (stage.folder / path).touch()
            return await task

    return asyncio.run(asyncio.wait_for(scene(), 60))


def interrupted(stage: Stage, supervisor: Supervisor, signals: Sequence[tuple[str, signal.Signals]]) -> Outcome:
    """Run, and interrupt when files appear."""

    async def scene() -> Outcome:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.run())
            for path, number in signals:
                await until((stage.folder / path).exists)
                supervisor.interrupt(number)
            return await task

    outcome = asyncio.run(asyncio.wait_for(scene(), 60))
    assert psutil.Process().children() == []
    return outcome


def test_the_syncers_end_is_the_end_and_learners_may_finish_by_themselves(stage: Stage) -> None:
    syncer = LISTEN + "wait('r0.lives'); wait('r1.lives'); (folder / 'over').touch()"
    learner = "wait('over'); time.sleep(0.2); (folder / f'{name}.finished').touch()"
    assert run(stage.supervisor(syncer, [learner, learner])) == Outcome(exit_code=0)
    assert (stage.folder / "r0.finished").exists()
    assert (stage.folder / "r1.finished").exists()
    assert stage.said == []


def test_what_fails_beside_a_run_ends_it_in_order(stage: Stage) -> None:
    supervisor = stage.supervisor(LISTEN + LINGER, [LINGER] * 2)

    async def beside(_: Supervisor) -> None:
        await until(lambda: all(stage.lives(name) for name in ("syncer", "r0", "r1")))
        raise ValueError("no such thing")

    async def scene() -> Outcome:
        async with asyncio.TaskGroup() as group:
            group.create_task(_accompanied(supervisor, beside))
            return await supervisor.run()

    outcome = asyncio.run(asyncio.wait_for(scene(), 60))
    assert outcome == Outcome(exit_code=70, problem="internal error beside the run: ValueError: no such thing")
    assert all(stage.drained(name) for name in ("syncer", "r0", "r1"))


def test_a_reload_reaches_everybody_and_ends_nobody(stage: Stage) -> None:
    listen = """
        signal.signal(signal.SIGHUP, lambda *_: (folder / f"{name}.reloaded").touch())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
        (folder / f"{name}.ready").touch()
    """
    listen = textwrap.dedent(listen)
    supervisor = stage.supervisor(LISTEN + listen + LINGER, [listen + LINGER] * 2)
    names = ("syncer", "r0", "r1")

    async def scene() -> Outcome:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.run())
            await until(lambda: all((stage.folder / f"{name}.ready").exists() for name in names))
            supervisor.reload()
            await until(lambda: all((stage.folder / f"{name}.reloaded").exists() for name in names))
            supervisor.interrupt(signal.SIGTERM)
            return await task

    assert asyncio.run(asyncio.wait_for(scene(), 60)).exit_code == 143
    assert [stage.lives(name) for name in names] == [["first"]] * 3


def test_learners_start_when_the_syncer_listens(stage: Stage) -> None:
    syncer = "time.sleep(0.3); assert not list(folder.glob('r0.*'))\n" + LISTEN + "wait('r0.lives')"
    assert run(stage.supervisor(syncer, ["pass"])).exit_code == 0


def test_the_process_that_is_named_is_the_one_that_trains_and_not_its_guardian(stage: Stage) -> None:
    own = "(folder / f'{name}.pid').write_text(str(os.getpid()))\n(folder / f'{name}.ready').touch()\n"
    supervisor = stage.supervisor(LISTEN + LINGER, [own + LINGER])
    named: list[int | None] = [supervisor.learners[0].command_pid]

    async def scene() -> Outcome:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.run())
            await until((stage.folder / "r0.ready").exists)
            named.append(supervisor.learners[0].command_pid)
            supervisor.interrupt(signal.SIGTERM)
            return await task

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert named == [None, int((stage.folder / "r0.pid").read_text())]
    assert supervisor.learners[0].command_pid is None


def test_a_killed_learner_is_started_again_and_resumes(stage: Stage) -> None:
    learner = "(folder / 'again').touch() if life > 1 else os.kill(os.getpid(), signal.SIGKILL)"
    supervisor = stage.supervisor(LISTEN + "wait('again')", [learner])
    assert run(supervisor).exit_code == 0
    assert stage.lives("r0") == ["first", "--resume"]
    assert "r0 died (killed by SIGKILL)" in stage.said[0]
    assert supervisor.learners[0].restarts == 1


def test_a_syncer_that_asks_for_it_is_resumed_and_learners_live_on(stage: Stage) -> None:
    syncer = LISTEN + "wait('r0.lives')\nif life == 1: end(75, 'disk full')"
    learner = "wait('nothing')"
    assert run(stage.supervisor(syncer, [learner], patience=Patience(finish_s=0.1))).exit_code == 0
    assert stage.lives("syncer") == ["first", "--resume"]
    assert stage.lives("r0") == ["first"]


@pytest.mark.parametrize("code", [2, 78])
def test_a_learner_that_was_started_wrongly_ends_the_run_with_its_own_words(stage: Stage, code: int) -> None:
    outcome = run(stage.supervisor(LISTEN + LINGER, [f"end({code}, 'wan-diloco: no such thing')", LINGER]))
    assert outcome == Outcome(exit_code=code, problem="r0 failed: no such thing")
    assert stage.drained("syncer")


@pytest.mark.parametrize(
    ("learner", "last_life"),
    [
        ("end(77, 'another has our place')", "first"),
        ("os.kill(os.getpid(), signal.SIGKILL) if life == 1 else end(78, 'the text is gone')", "--resume"),
    ],
    ids=["fenced", "can't come back"],
)
def test_the_run_goes_on_without_a_learner_that_is_out(stage: Stage, learner: str, last_life: str) -> None:
    supervisor = stage.supervisor(LISTEN + "wait('over')", [learner, "wait('out'); (folder / 'over').touch()"])

    assert run_past(stage, supervisor, Condition.HOPELESS, "out") == Outcome(exit_code=0)
    assert stage.lives("r0")[-1] == last_life
    words = "another has our place" if last_life == "first" else "the text is gone"
    assert stage.said[-2:] == [f"r0 is out: {words}", "the run goes on with 1 of 2 regions"]


def test_a_fenced_learner_ends_a_run_that_needs_it(stage: Stage) -> None:
    words = "wan-diloco: r0: another has our place"
    outcome = run(stage.supervisor(LISTEN + LINGER, [f"end(77, {words!r})", LINGER], quorum=2))
    assert outcome == Outcome(exit_code=77, problem="r0 failed: another has our place")


def test_a_hopeless_syncer_ends_the_run_before_any_learner_starts(stage: Stage) -> None:
    outcome = run(stage.supervisor("end(78, 'port in use')", [LINGER]))
    assert outcome == Outcome(exit_code=78, problem="syncer failed: port in use")
    assert stage.lives("r0") == []


def test_a_region_that_dies_again_and_again_is_given_up_and_the_others_go_on(stage: Stage) -> None:
    syncer = LISTEN + "wait('over')"
    dying = "end(70, 'a bug')"
    other = "wait('given-up'); (folder / 'over').touch()"
    supervisor = stage.supervisor(syncer, [dying, other])

    assert run_past(stage, supervisor, Condition.GIVEN_UP, "given-up").exit_code == 0
    assert stage.lives("r0") == ["first", "--resume", "--resume"]
    assert stage.said[-2:] == [
        "r0 is given up after dying 3 times in a row (a bug)",
        "the run goes on with 1 of 2 regions",
    ]


def test_too_few_regions_for_a_quorum_end_the_run(stage: Stage) -> None:
    outcome = run(stage.supervisor(LISTEN + LINGER, ["end(75, 'no memory')", LINGER], quorum=2))
    assert outcome == Outcome(exit_code=75, problem="r0 dies again and again: no memory")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_lets_everybody_drain_the_syncer_last(stage: Stage, number: signal.Signals, code: int) -> None:
    syncer = LISTEN + "signal.signal(signal.SIGTERM, lambda *_: (wait('r0.drained'), drain()))\n" + LINGER
    supervisor = stage.supervisor(syncer, ["time.sleep(0.2)\n" + LINGER])
    assert interrupted(stage, supervisor, [("r0.lives", number)]).exit_code == code
    assert stage.drained("syncer")
    assert supervisor.learners[0].condition is Condition.STOPPED


def test_a_second_interrupt_kills_those_who_dont_listen(stage: Stage) -> None:
    deaf = "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch()); (folder / 'up').touch()\n"
    linger = "while True: time.sleep(1)\n"
    supervisor = stage.supervisor(
        LISTEN + LINGER, [deaf + linger], patience=Patience(drain_s=600, hurry_s=0.2, kill_s=10)
    )
    outcome = interrupted(stage, supervisor, [("up", signal.SIGINT), ("asked", signal.SIGINT)])
    assert outcome.exit_code == 130
    assert stage.said == ["r0 doesn't end, is killed"]
    assert stage.drained("syncer")


def test_an_interrupt_of_a_run_that_ends_already_hurries_those_who_linger(stage: Stage) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (folder / 'up').touch()\nwhile True: time.sleep(1)\n"
    patience = Patience(finish_s=600, drain_s=600, total_s=1200, hurry_s=0.2, kill_s=10)
    supervisor = stage.supervisor(LISTEN + "wait('up')\n", [deaf], patience=patience)

    async def scene() -> Outcome:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.run())
            await until(lambda: supervisor.finished)
            supervisor.interrupt(signal.SIGTERM)
            return await task

    assert asyncio.run(asyncio.wait_for(scene(), 60)) == Outcome(exit_code=0), "the run came to its end"
    assert stage.said == ["r0 doesn't end, is killed"]


def test_nobody_who_is_told_to_end_is_killed_before_it_can_and_all_is_over_within_30_s() -> None:
    patience = Patience()
    assert patience.total_s + patience.kill_s <= 30 - 2
    # A learner says goodbye and writes a checkpoint; a syncer finishes merges and writes a snapshot.
    assert patience.drain_s > GOODBYE_S
    assert patience.syncer_s > DRAIN_S + LAST_SNAPSHOT_S + _GRACE_S
    # Where it hangs it says so itself, before it is killed.
    assert patience.drain_s + patience.syncer_s <= patience.total_s
    assert patience.syncer_s <= WITHIN_S < 30
    ending = Ending(within_s=patience.syncer_s)
    ending.signalled(signal.SIGTERM)
    assert ending.left_s(SHIP_LAST_S, spare_s=SPARE_S) <= patience.syncer_s - SPARE_S


def test_whoever_leaves_early_leaves_its_time_to_the_syncer(stage: Stage) -> None:
    """The learners go at once, and the syncer needs longer than learners were to have: the whole time is its own."""
    slow = """
        def late(*_):
            time.sleep(2.0)
            (folder / 'settled').touch()
            end(143)
        signal.signal(signal.SIGTERM, late)
        (folder / 'ready').touch()
    """
    patience = Patience(finish_s=600, drain_s=600, total_s=601, hurry_s=0.2, kill_s=10)
    supervisor = stage.supervisor(LISTEN + textwrap.dedent(slow) + LINGER, [LINGER], patience=patience)
    assert interrupted(stage, supervisor, [("ready", signal.SIGTERM)]).exit_code == 143
    assert (stage.folder / "settled").exists()
    assert stage.said == []


def test_a_run_that_is_cancelled_leaves_no_process(stage: Stage) -> None:
    async def scene() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(stage.supervisor(LISTEN + LINGER, [LINGER]).run())
            await until(lambda: stage.lives("r0") != [])
            task.cancel()

    asyncio.run(scene())
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    assert [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE] == []


def test_the_last_line_of_a_log_is_its_last_words(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert last_line(path) == ""
    path.write_bytes(b"first\n" + b"x" * 100_000 + b"\n wan-diloco: it broke \xff\n\n")
    assert last_line(path) == "wan-diloco: it broke \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("wan-diloco: no such thing", "wan-diloco: no such thing"),
        (
            '{"event": "learner_ends", "reason": "incarnation 1 is\\n fenced", "level": "info"}',
            "incarnation 1 is fenced",
        ),
        ('{"event": "insecure", "detail": "anybody is believed"}', "anybody is believed"),
        ('{"event": "listening", "level": "info"}', "listening"),
        ('{"level": "info"}', '{"level": "info"}'),
        ('{"event": "cut o', '{"event": "cut o'),
        ("75", "75"),
        ("", ""),
    ],
)
def test_a_structured_log_line_is_shown_by_what_it_says(line: str, message: str) -> None:
    assert message_of(line) == message


def test_a_failure_is_told_in_the_words_of_a_structured_log(stage: Stage) -> None:
    line = '{"event": "learner_ends", "reason": "settings differ"}'
    outcome = run(stage.supervisor(LISTEN + LINGER, [f"end(78, {line!r})"]))
    assert outcome.problem == "r0 failed: settings differ"
