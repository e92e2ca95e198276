"""What a running run shows, from status answers."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.cli import in_this_process
from wan_diloco.cli.history import History
from wan_diloco.cli.progress import LineDisplay, TableDisplay, make_display, run_table, watch
from wan_diloco.cli.run import result_text
from wan_diloco.cli.supervise import Outcome
from wan_diloco.cli.view import RunView, progress_line, view_of
from wan_diloco.cli.words import invocation, resume_command
from wan_diloco.clock import ManualClock
from wan_diloco.errors import PeerUnavailable

BAR = "\N{BOX DRAWINGS LIGHT VERTICAL}"
PROCESSES = {"syncer": ("running", 0), "us-east": ("running", 0), "eu-west": ("running", 2)}
STATUS: dict[str, Any] = {
    "global_step": 120,
    "total_steps": 2441,
    "learners": [
        {
            "learner_id": "us-east",
            "live": True,
            "incarnation": 1,
            "local_step": 121,
            "tokens": 123_904,
            "loss": 2.5,
            "step_time_s": 0.02,
        },
        {"learner_id": "eu-west", "live": False, "incarnation": 2, "local_step": 90, "tokens": 92_160, "loss": None},
    ],
    "trained_tokens": 216_064.0,
    "rounds": 118,
    "participation": 0.75,
    "waiting": {"round": "round 812: 1 of 2 learners, eu-west silent 4.1 s"},
    "tokens_per_s": 24_100.0,
    "traffic": {"us-east": {"uplink_bytes": 2**20, "downlink_bytes": 3 * 2**20, "control_bytes": 9}},
    "evaluation": {"global_step": 100, "nats_per_byte": 2.314},
}


def view(
    status: dict[str, Any] | None = STATUS,
    processes: dict[str, tuple[str, int]] = PROCESSES,
    *,
    answering: bool = True,
    ending: bool = False,
) -> RunView:
    return view_of(status, answering=answering, processes=processes, history=History(), now_s=0.0, ending=ending)


def plain(renderable: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=140, color_system=None).print(renderable)
    return file.getvalue()


def test_a_line_says_where_the_run_is_and_for_whom_it_waits() -> None:
    assert progress_line(view()) == (
        "step 120/2441, 216k tokens (24.1k/s), published loss 2.314 at step 100, 118 rounds, participation 75%, "
        "1/2 regions, eu-west away 0s (round 812: 1 of 2 learners, eu-west silent 4.1 s)"
    )


def test_the_table_has_a_row_a_region_and_the_reason_of_waiting() -> None:
    text = plain(run_table(view()))
    assert "step 120/2441" in text
    row = next(line for line in text.splitlines() if "us-east" in line)
    cells = [cell.strip() for cell in row.split(BAR)[1:-1]]
    assert cells == ["us-east", "live", "121", "124k", "2.500", "20ms", "-", "1MiB", "3MiB"]
    assert "restarted 2x" in text
    assert "\nround 812: 1 of 2" in text


def test_what_peers_say_cannot_draw() -> None:
    status = {**STATUS, "waiting": {"x": "[red]boo[/red] [/]"}}
    assert "[red]boo[/red] [/]" in plain(run_table(view(status)))


def test_a_run_whose_syncer_is_silent_still_shows_its_processes() -> None:
    starting = view(None, {"syncer": ("running", 0), "us-east": ("not started", 0)}, answering=False)
    assert starting.waiting == ("the syncer is starting; the first time on a machine that takes a minute",)
    assert [region.state for region in starting.regions] == ["not started"]
    assert "0/1 regions" in progress_line(starting)

    silent = view(STATUS, {"syncer": ("restarting", 1), "us-east": ("running", 0)}, answering=False)
    assert silent.waiting == ("the syncer doesn't answer (it is restarting); regions train on",)
    assert [region.state for region in silent.regions] == ["running"]
    assert silent.global_step == 120


def test_nobody_trains_on_where_no_learner_runs() -> None:
    silent = view(STATUS, {"syncer": ("restarting", 1), "us-east": ("restarting", 1)}, answering=False)
    assert silent.waiting == ("the syncer doesn't answer (it is restarting)",)


def test_a_run_that_ends_says_who_is_still_to_go_on_a_short_line() -> None:
    processes = {"syncer": ("running", 0), "us-east": ("running", 0), "eu-west": ("stopped", 2)}
    for answering in (True, False):
        ending = view(STATUS, processes, answering=answering, ending=True)
        assert progress_line(ending) == "step 120/2441, ending, syncer, us-east still to go"
        assert [region.state for region in ending.regions] == ["running", "stopped"]
        assert "train on" not in plain(run_table(ending))


@pytest.mark.parametrize(
    ("learner", "condition", "state"),
    [
        (None, "running", "starting"),
        ({"learner_id": "a", "live": False, "incarnation": 0}, "running", "starting"),
        ({"learner_id": "a", "live": True, "incarnation": 1}, "running", "live"),
        ({"learner_id": "a", "live": False, "incarnation": 1}, "running", "away"),
        ({"learner_id": "a", "live": True, "connected": False, "incarnation": 1}, "running", "not connected"),
        ({"learner_id": "a", "live": True, "incarnation": 1}, "restarting", "restarting"),
        ({"learner_id": "a", "live": False, "incarnation": 1}, "given up", "given up"),
    ],
)
def test_a_regions_state_is_what_the_process_or_the_syncer_knows_best(
    learner: dict[str, Any] | None, condition: str, state: str
) -> None:
    status = {"learners": [learner] if learner else []}
    (region,) = view(status, {"syncer": ("running", 0), "a": (condition, 0)}).regions
    assert region.state == state


def test_a_state_lasts_until_it_changes() -> None:
    lasting_s = History().lasting_s
    assert lasting_s("a", "live", 10.0) == 0.0
    assert lasting_s("a", "live", 14.0) == 4.0
    assert lasting_s("a", "away", 15.0) == 0.0
    assert lasting_s("a", "away", 16.5) == 1.5


def test_a_region_that_is_seldom_merged_of_late_is_named() -> None:
    history, lines = History(), []
    for second in range(121):
        # In all of the rounds for a minute, then in every fourth.
        merged = second if second < 60 else 60 + (second - 60) // 4
        learner = {"learner_id": "a", "live": True, "incarnation": 1, "merged_fresh": merged}
        status = {"learners": [learner], "rounds": second}
        seen = view_of(
            status,
            answering=True,
            processes={"syncer": ("running", 0), "a": ("running", 0)},
            history=history,
            now_s=float(second),
        )
        lines.append(progress_line(seen))
    assert "of the last rounds" not in lines[10]
    assert "of the last rounds" not in lines[60]
    assert "a in 25% of the last rounds" in plain(run_table(seen))
    assert lines[120].endswith("1/1 regions, a in 25% of the last rounds")


def test_a_run_that_knows_less_than_before_starts_over() -> None:
    history = History()
    assert history.merged_share("a", 0, 100, 0.0) is None
    assert history.merged_share("a", 30, 140, 1.0) == 0.75
    assert history.merged_share("a", 20, 120, 2.0) == 1.0
    assert history.merged_share("a", 5, 90, 3.0) is None


def test_after_the_end_nobody_is_missed() -> None:
    gone = {"learner_id": "us-east", "live": False, "connected": False, "incarnation": 1}
    seen = view({**STATUS, "ended": True, "learners": [gone]}, {"syncer": ("running", 0), "us-east": ("running", 0)})
    assert [region.state for region in seen.regions] == ["done"]
    assert progress_line(seen) == "step 120/2441, the run has ended; the published model is being evaluated"


def test_after_the_end_only_the_evaluation_is_waited_for() -> None:
    ended = {**STATUS, "ended": True}
    assert view(ended).waiting == ("the run has ended; the published model is being evaluated",)
    ended["evaluated_share"] = 0.404
    assert view(ended).waiting == ("the run has ended; the published model is being evaluated: 40%",)


def test_an_empty_status_is_no_error() -> None:
    assert progress_line(view({}, {"syncer": ("running", 0)})) == "step -/-, 0 tokens, 0/0 regions"
    plain(run_table(view({})))


def test_lines_come_now_and_then_and_never_twice() -> None:
    clock, console = ManualClock(), Console(file=io.StringIO(), width=30, color_system=None)
    display = LineDisplay(console, clock)
    for step, pause_s in ((1, 1.0), (2, 4.5), (3, 5.0), (3, 1.0)):
        display.show(RunView(global_step=step, total_steps=9))
        clock.advance(pause_s)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.partition(",")[0] for line in lines] == ["step 1/9", "step 3/9"]


def test_a_terminal_gets_a_table_and_a_file_gets_lines() -> None:
    clock = ManualClock()
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120, _environ={})
    assert isinstance(make_display(Console(file=io.StringIO()), clock), LineDisplay)
    display = make_display(terminal, clock)
    assert isinstance(display, TableDisplay)
    with display:
        display.show(view())
        display.say("eu-west [died]")
    assert "eu-west [died]" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_watching_follows_the_address_and_survives_silence(tmp_path: Path) -> None:
    asked: list[str] = []
    shown: list[int | None] = []

    class Screen(LineDisplay):
        def show(self, view: RunView) -> None:
            shown.append(view.global_step)
            (tmp_path / "address").write_text(f"127.0.0.1:{len(shown)}\n")

    async def fetch(address: str, timeout_s: float) -> dict[str, Any]:
        asked.append(address)
        if len(asked) in (1, 3):
            raise PeerUnavailable("nobody there")
        return {"global_step": 7}

    async def scene() -> None:
        screen = Screen(Console(file=io.StringIO()), ManualClock())
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            task = group.create_task(
                watch(
                    screen,
                    address_path=tmp_path / "address",
                    processes=lambda: PROCESSES,
                    fetch=fetch,
                    clock=ManualClock(),
                    ending=lambda: False,
                    poll_s=0.0,
                )
            )
            while len(shown) < 4:  # noqa: ASYNC110 - the display is no event
                await asyncio.sleep(0)
            task.cancel()

    asyncio.run(scene())
    assert asked[:2] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert shown[:4] == [None, None, 7, 7]


def test_it_says_which_processes_there_are_and_who_is_back(tmp_path: Path) -> None:
    # A view a second: state of the region as its syncer has it, and its restarts; None where nobody answers.
    live, gone = {"live": True}, {"live": True, "connected": False}
    script: list[tuple[dict[str, Any] | None, int]] = [
        ({"incarnation": 0}, 0),
        (live, 0),
        (gone, 0),
        (live, 0),  # a broken connection
        (None, 0),
        (None, 0),
        (live, 0),  # the syncer was away, and not the region
        (gone, 1),
        (gone, 1),
        (live, 1),
        *[(gone, 1)] * 9,
        (live, 1),
    ]
    (tmp_path / "address").write_text("127.0.0.1:1")
    clock, console = ManualClock(), Console(file=io.StringIO(), width=200, color_system=None)
    at = -1

    async def fetch(address: str, timeout_s: float) -> dict[str, Any]:
        nonlocal at
        at += 1
        if at == len(script):
            raise asyncio.CancelledError
        clock.advance(1.0)
        learner, _ = script[at]
        if learner is None:
            raise PeerUnavailable("nobody there")
        return {"learners": [{"learner_id": "us-east", "incarnation": 1, **learner}]}

    async def scene() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await watch(
                LineDisplay(console, clock),
                address_path=tmp_path / "address",
                processes=lambda: {"syncer": ("running", 0), "us-east": ("running", script[at][1])},
                fetch=fetch,
                clock=clock,
                ending=lambda: False,
                pids=lambda: {"syncer": 40, "us-east": 41 + script[at][1]},
                poll_s=0.0,
            )

    asyncio.run(scene())
    said = [line for line in console.file.getvalue().splitlines() if "process" in line]  # type: ignore[attr-defined]
    assert said == [
        "wan-diloco: all are there; their processes: syncer 40, us-east 41",
        "wan-diloco: us-east is back after 2 s, as process 42",
        "wan-diloco: us-east is back after 9 s, as process 42",
    ]


def test_the_result_says_what_is_known_and_quotes_the_model() -> None:
    summary = {
        "validation_nats_per_byte": 1.91234,
        "test_nats_per_byte": None,
        "tokens_trained": 9_994_240,
        "wall_s": 200.0,
        "rounds": 2400,
        "participation": 0.983,
        "uplink_bits_per_parameter": 3.9,
        "downlink_bits_per_parameter": 3.8,
    }
    text = result_text(summary, {"sample": "The \x1b[31mpeople\n\nof"}, [Path("runs/x/report.html")])
    assert "validation loss   1.9123 nats a byte\n" in text
    assert "test loss" not in text
    assert "tokens trained    9.99M\n" in text
    assert "bits a parameter  3.90 up, 3.80 down\n" in text
    assert "report            runs/x/report.html\n" in text
    assert text.endswith("The published model writes:\n    The [31mpeople\n\n    of")


def test_the_result_says_what_participation_counts_and_who_was_away() -> None:
    shares = {"us-east": 1.0, "eu-west": 0.82, "ap-south": None}
    regions = {name: {"rounds_merged_share": share} for name, share in shares.items()}
    text = result_text({"participation": 0.91, "by_region": regions}, {}, [])
    assert text == (
        "participation     91.0% of the rounds a region was live for\nof all rounds     eu-west 82%, us-east 100%"
    )


def test_a_model_without_a_score_gets_words_instead_of_an_older_score() -> None:
    summary = {
        "validation_nats_per_byte": None,
        "evaluation": "the evaluator ended by itself",
        "last_curve_point": {"global_step": 281, "tokens": 5, "validation_nats_per_byte": 2.5},
        "rounds": 7,
    }
    text = result_text(summary, {}, [])
    assert text.startswith("loss              not known: the evaluator ended by itself; --resume tries again\n")
    assert "2.5" not in text


@pytest.mark.parametrize(
    ("words", "program", "expected"),
    [
        (["python", "-m", "wan_diloco", "run"], "/x/wan_diloco/__main__.py", ["python", "-m", "wan_diloco"]),
        (
            [".venv/bin/python", "-X", "dev", "-m", "wan_diloco", "run"],
            "/x/wan_diloco/__main__.py",
            [".venv/bin/python", "-X", "dev", "-m", "wan_diloco"],
        ),
        (["python", "/x/wan_diloco/__main__.py"], "/x/wan_diloco/__main__.py", ["python", "-m", "wan_diloco"]),
        (["python", ".venv/bin/wan-diloco", "run"], ".venv/bin/wan-diloco", [".venv/bin/wan-diloco"]),
        (["python", "{bin}/wan-diloco", "run"], "{bin}/wan-diloco", ["wan-diloco"]),
    ],
)
def test_the_program_is_called_as_it_was_called(
    tmp_path: Path, words: list[str], program: str, expected: list[str]
) -> None:
    script = tmp_path / "wan-diloco"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    given = [word.format(bin=tmp_path) for word in words]
    assert invocation(given, program.format(bin=tmp_path), str(tmp_path)) == expected


def test_going_on_takes_the_same_words_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bin/wan-diloco", "run"])
    command = resume_command([Path("a b.toml")], ["run.seed=3"], Path("runs/x"), as_json=True)
    assert command == "bin/wan-diloco run 'a b.toml' --set run.seed=3 --run-folder runs/x --json --resume"


@pytest.mark.parametrize(
    ("exit_code", "helps"), [(78, False), (77, False), (2, False), (75, True), (130, True), (143, True)]
)
def test_going_on_is_offered_only_where_it_can_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, exit_code: int, *, helps: bool
) -> None:
    def begun(_config: object, folder: Path, *, resume: bool, refragment: bool, load: object) -> Outcome:
        assert not resume
        assert not refragment
        (folder / "state").mkdir(parents=True)
        return Outcome(exit_code=exit_code, problem="it broke")

    monkeypatch.setattr("wan_diloco.cli.run._run_here", begun)
    (tmp_path / "a.toml").write_text('[run]\ntokens = "1M"\n[[regions]]\nname = "a"\n')
    outcome = in_this_process(capsys, "run", str(tmp_path / "a.toml"), "--run-folder", str(tmp_path / "run"))
    assert outcome.exit_code == exit_code
    assert "it broke" in outcome.stderr
    assert ("--resume" in outcome.stderr) == helps


def test_a_run_that_was_interrupted_after_its_end_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_config: object, folder: Path, *, resume: bool, refragment: bool, load: object) -> Outcome:
        assert not resume
        assert not refragment
        (folder / "state").mkdir(parents=True)
        (folder / "summary.json").write_text('{"finished": true, "validation_nats_per_byte": 1.5}')
        (folder / "report.html").write_text("")
        return Outcome(exit_code=130)

    monkeypatch.setattr("wan_diloco.cli.run._run_here", ended)
    (tmp_path / "a.toml").write_text('[run]\ntokens = "1M"\n[[regions]]\nname = "a"\n')
    outcome = in_this_process(capsys, "run", str(tmp_path / "a.toml"), "--run-folder", str(tmp_path / "run"))
    assert outcome.exit_code == 130
    assert f"the run is finished all the same: {tmp_path / 'run' / 'report.html'}" in outcome.stderr
    assert "--resume" not in outcome.stderr


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        ("alone", "training a alone on its share of the tokens: 500k, of the run's 999k, in "),
        ("data-parallel", "training data-parallel over 2 regions on all 999k tokens of the run, in "),
    ],
)
def test_a_baseline_says_what_it_trains_on_and_that_it_cant_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, baseline: str, words: str
) -> None:
    monkeypatch.setattr("wan_diloco.learner.baseline.run_baseline", lambda *_: 130)
    monkeypatch.setattr("wan_diloco.cli.run.check_data", lambda _: None)
    (tmp_path / "a.toml").write_text('[run]\ntokens = "1M"\n[[regions]]\nname = "a"\n[[regions]]\nname = "b"\n')
    outcome = in_this_process(
        capsys, "run", str(tmp_path / "a.toml"), "--baseline", baseline, "--run-folder", str(tmp_path / "run")
    )
    assert outcome.exit_code == 130
    assert words in outcome.stderr
    assert "a baseline can't be resumed: the same command begins it anew" in outcome.stderr


def test_a_trainer_that_hangs_while_its_uplink_lives_is_named() -> None:
    history = History()

    def seen(now_s: float, *steps: int, **changes: Any) -> RunView:
        learners = [
            {
                "learner_id": name,
                "live": True,
                "incarnation": 1,
                "local_step": step,
                "step_time_s": 1.0,
                "moments": changes.get("moments", "none"),
            }
            for name, step in zip(("us-east", "eu-west"), steps, strict=True)
        ]
        status = {**STATUS, "started": True, "learners": learners, **changes}
        return view_of(status, answering=True, processes=PROCESSES, history=history, now_s=now_s)

    def named(view: RunView) -> bool:
        return "eu-west has taken no step for" in progress_line(view)

    for second in range(20):
        assert not named(seen(float(second), 100 + second, 90))
    view = seen(25.0, 125, 90)
    assert "eu-west has taken no step for 25s: its trainer hangs, or is held up" in progress_line(view)
    assert "eu-west has taken no step for 25s" in plain(run_table(view))
    assert not named(seen(25.0, 125, 90, started=False))
    assert not named(seen(25.0, 125, 90, global_step=2441)), "at the end all hold"
    assert not named(seen(25.0, 125, 90, moments="")), "it takes none before it has a peer's moments"
    assert not named(seen(50.0, 126, 91))
    assert not named(seen(100.0, 126, 91)), "where nobody trains there is another reason, which is shown"


def test_who_joined_under_a_name_that_nobody_listed_is_shown_as_long_as_the_syncer_tells_of_it() -> None:
    joined = {**STATUS["learners"][0], "learner_id": "spot-3"}
    status = {**STATUS, "learners": [*STATUS["learners"], joined]}
    shown = view(status)
    assert [(region.name, region.state) for region in shown.regions][-1] == ("spot-3", "live")
    assert [region.name for region in view(status, answering=False).regions] == ["us-east", "eu-west"]
