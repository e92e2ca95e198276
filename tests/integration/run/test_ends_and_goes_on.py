"""`wan-diloco run` is told to end at moments of its life, and goes on otherwise than it was: real processes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.run.test_run import Tiny, learner, until
from tests.support.cli import in_own_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# After that long schedulers kill, by default.
END_S = 30


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    run = Tiny(tmp_path)
    yield run
    run.clean_up()


def ended(tiny: Tiny, process: subprocess.Popen[str]) -> str:
    """What it says, when it is told to end; no process of it is left, and it took no longer than it may."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=END_S)
    assert process.returncode == 143, f"{stderr}\n{tiny.logs()}"
    assert psutil.wait_procs(family, timeout=2)[1] == []
    return stderr


MOMENTS: dict[str, Callable[[Tiny], bool]] = {
    "its syncer is being started": lambda tiny: (tiny.run_folder / "logs" / "syncer.log").exists(),
    "its learners are being started": lambda tiny: (tiny.run_folder / "address").exists(),
    "it waits for the last learner": lambda tiny: len(tiny.tape("LearnerAdmitted")) == 1,
    "it has begun": lambda tiny: len(tiny.tape("RunStarted")) == 1,
    "it merges": lambda tiny: len(tiny.tape("RoundClosed")) > len(tiny.tape("FragmentPublished")) > 4,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_it_ends_in_time_and_leaves_a_summary_or_says_why_not(tiny: Tiny, moment: str) -> None:
    tiny.configure(steps=100_000, step_time="20ms")
    process = tiny.start()
    until(lambda: MOMENTS[moment](tiny), process, tiny)
    stderr = ended(tiny, process)
    if (tiny.run_folder / "summary.json").exists():
        assert json.loads((tiny.run_folder / "summary.json").read_text())["finished"] is False
    else:
        assert "there is no summary" in stderr


def test_while_its_model_is_evaluated_it_ends_too_and_the_rest_comes_later(tiny: Tiny) -> None:
    tiny.configure(steps=30, step_time="20ms")
    process = tiny.start()
    until(lambda: len(tiny.tape("RunEnded")) == 1, process, tiny)
    stderr = ended(tiny, process)
    # Its learners are told first: by then the syncer may have done it all.
    finished = json.loads((tiny.run_folder / "summary.json").read_text())["finished"]
    assert ("the run is finished all the same" in stderr) == finished
    tiny.finish(tiny.start("--resume"), 0)
    assert json.loads((tiny.run_folder / "summary.json").read_text())["validation_nats_per_byte"] is not None


def test_a_learner_that_hangs_holds_nobody_up(tiny: Tiny) -> None:
    tiny.configure(steps=100_000, step_time="20ms")
    process = tiny.start()
    until(lambda: len(tiny.tape("FragmentPublished")) > 4, process, tiny)
    learner(process, "b").suspend()
    assert "b doesn't end, is killed" in ended(tiny, process)
    assert json.loads((tiny.run_folder / "summary.json").read_text())["rounds"] > 4


def test_a_syncer_that_answers_nobody_holds_nobody_up(tiny: Tiny) -> None:
    tiny.configure(steps=100_000, step_time="20ms")
    process = tiny.start()
    until(lambda: len(tiny.tape("FragmentPublished")) > 4, process, tiny)
    (syncer,) = (
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.cmdline()[1:4] == ["-m", "wan_diloco", "syncer"]
    )
    # As with a link that is cut: connections stand, and nothing comes.
    syncer.suspend()
    stderr = ended(tiny, process)
    assert "syncer doesn't end, is killed" in stderr
    assert "there is no summary" in stderr
    assert "--resume" in stderr
    assert {path.parent.parent.name for path in tiny.run_folder.glob("learners/*/checkpoint/*")} == {"a", "b"}


def test_it_goes_on_with_other_regions_and_other_fragments(tiny: Tiny) -> None:
    tiny.configure(steps=200, step_time="20ms")
    text = tiny.config.read_text().replace("[data]\n", "[data]\nshards = 3\n") + '[syncer]\njournal_retention = "all"\n'
    tiny.config.write_text(text)
    process = tiny.start()
    until(lambda: len(tiny.tape("FragmentPublished")) > 8, process, tiny)
    ended(tiny, process)
    published = len(tiny.tape("FragmentPublished"))

    # b goes, c comes, and there are more fragments.
    tiny.config.write_text(text.replace('name = "b"', 'name = "c"').replace("fragments = 4", "fragments = 6"))
    before = {path: path.read_bytes() for path in (tiny.run_folder / "state").rglob("*") if path.is_file()}
    _, stderr = tiny.finish(tiny.start("--resume"), 78)
    assert "--refragment" in stderr
    assert {path: path.read_bytes() for path in (tiny.run_folder / "state").rglob("*") if path.is_file()} == before

    stdout, _ = tiny.finish(tiny.start("--resume", "--refragment", "--json"), 0)
    summary = json.loads(stdout)
    assert summary["ledger_balance"] == 0
    assert set(summary["by_region"]) == {"a", "b", "c"}
    assert summary["tokens_discarded"]["refragmented"] > 0
    assert summary["validation_nats_per_byte"] < 5.5
    assert len(tiny.tape("FragmentPublished")) > published
    (cut,) = tiny.tape("Refragmented")
    assert (cut["fragments_before"], cut["fragments"], len(cut["parameters"])) == (4, 6, 6)
    assert [dict(record["shards"]) for record in tiny.tape("ShardsAssigned")] == [{"a": 0, "b": 1}, {"a": 0, "c": 2}]
    contributions = [record["header"] for record in tiny.tape("ContributionJournalled")]
    assert {header["key"]["learner_id"] for header in contributions if header["base"]["epoch"] == 1} == {"a", "c"}

    replayed = in_own_process(["-m", "wan_diloco", "replay", str(tiny.run_folder), "--json"], timeout_s=240)
    assert replayed.exit_code == 0, replayed.stderr
    report = json.loads(replayed.stdout)
    assert report["equal"]
    assert report["versions"] == len(tiny.tape("FragmentPublished"))
