"""What may be done in which folder; and that a command that is refused, or has nothing to do, changes nothing there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Outcome, in_this_process
from tests.support.syncer import close, open_tiny, tiny_config
from tests.support.text import write_text_corpus
from wan_diloco.cli.folders import (
    Holding,
    check_baseline_folder,
    check_folder,
    check_learner_folder,
    check_syncer_folder,
    what_is_in,
)
from wan_diloco.config import RunConfig, parse_config
from wan_diloco.errors import ConfigError, StorageLocked, StorageUnusable
from wan_diloco.storage import FolderLock, Snapshot, write_text
from wan_diloco.syncer.fragments_store import snapshot_tensors
from wan_diloco.syncer.main import run_syncer
from wan_diloco.syncer.restore import snapshot_manifest, snapshot_name
from wan_diloco.units import LearnerId, ShardId

Tree = dict[str, bytes | None]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan_diloco.config.process_environment", dict)


def tree_of(folder: Path) -> Tree:
    """Every file with its bytes, every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def make(folder: Path, holding: Holding, config: RunConfig) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config.resolved_json())
    if holding is not Holding.NOTHING:
        (folder / "metrics.jsonl").write_text("")
    if holding in {Holding.RUN, Holding.FINISHED_RUN}:
        close(open_tiny(folder / "state", config))
    if holding is Holding.FINISHED_RUN:
        summarise(folder, finished=True)
        (folder / "report.html").write_text("<html>")
    return folder


def summarise(folder: Path, **values: object) -> None:
    (folder / "summary.json").write_text(json.dumps({"validation_nats_per_byte": 1.5, "rounds": 7, **values}))


def written(folder: Path, config: RunConfig) -> str:
    path = folder / "given.json"
    path.write_text(config.resolved_json())
    return str(path)


@pytest.mark.parametrize("holding", list(Holding))
def test_a_folder_tells_what_it_holds(tmp_path: Path, holding: Holding) -> None:
    assert what_is_in(make(tmp_path / "run", holding, tiny_config())) is holding


def test_a_run_that_lacks_something_is_not_finished(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Holding.FINISHED_RUN, tiny_config())
    summarise(folder, finished=False)
    assert what_is_in(folder) is Holding.RUN
    summarise(folder, finished=True, validation_nats_per_byte=None)
    assert what_is_in(folder) is Holding.RUN
    for damaged in ("{", "[]"):
        (folder / "summary.json").write_text(damaged)
        assert what_is_in(folder) is Holding.RUN
    summarise(folder, finished=True)
    assert what_is_in(folder) is Holding.FINISHED_RUN
    (folder / "report.html").unlink()
    assert what_is_in(folder) is Holding.RUN


def test_a_new_folder_is_fine_and_is_not_created(tmp_path: Path) -> None:
    check_folder(tiny_config(), tmp_path / "a" / "b", resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_needs_resume(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Holding.RUN, tiny_config())
    with pytest.raises(ConfigError, match=r"a run in this folder already .*--resume"):
        check_folder(tiny_config(), folder, resume=False)
    check_folder(tiny_config(), folder, resume=True)


def test_nobody_is_sent_to_resume_a_finished_run(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Holding.FINISHED_RUN, tiny_config())
    with pytest.raises(ConfigError, match=r"a finished run in this folder already \(give another --run-folder\)"):
        check_folder(tiny_config(), folder, resume=False)


def test_what_a_syncer_that_refused_to_start_left_behind_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(tiny_config().resolved_json())
    (tmp_path / "logs").mkdir()
    check_folder(tiny_config(), tmp_path, resume=False)


def test_resume_needs_a_run_but_a_syncer_may_always_be_asked_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run in this folder"):
        check_folder(tiny_config(), tmp_path / "run", resume=True)
    check_syncer_folder(tiny_config(), tmp_path / "run", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_resume_names_the_first_setting_that_differs(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Holding.RUN, tiny_config())
    with pytest.raises(ConfigError) as caught:
        check_folder(tiny_config(inner={"lr": 0.5}, wire={"codec": "int8"}), folder, resume=True)
    assert caught.value.where == "inner.lr"
    assert "0.5" in caught.value.problem


def test_resume_allows_what_each_side_decides_for_itself(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Holding.RUN, tiny_config())
    check_folder(tiny_config(evaluation={"every_steps": 7}), folder, resume=True)


def of_regions(*names: str, shards: dict[str, int] | None = None, **tables: dict[str, Any]) -> RunConfig:
    tree = tiny_config(**tables).model_dump(mode="json", by_alias=True)
    regions = [{"name": name, **({"shard": shards[name]} if shards and name in shards else {})} for name in names]
    return parse_config({**tree, "data": {**tree["data"], "shards": 4}, "regions": regions})


def taken_up(folder: Path, config: RunConfig, sequence: int) -> None:
    """What a syncer leaves that has the run and goes on with a configuration."""
    restored = open_tiny(folder / "state", config, resume=True)
    restored.state.shards.update({LearnerId(name): ShardId(shard) for name, shard in config.shards.items()})
    manifest = snapshot_manifest(restored.state, config.agreement(), restored.last_tape)
    tensors = snapshot_tensors(restored.store.values())
    Snapshot(tensors=tensors, manifest=manifest).write(folder / "state" / "snapshots", snapshot_name(sequence))
    close(restored)
    (folder / "config.json").write_text(config.resolved_json())


def test_a_region_that_is_gone_since_long_keeps_its_shard(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun = of_regions("a", "b", "c")
    taken_up(folder, begun, 1)
    without, _ = check_folder(of_regions("a", "b"), folder, resume=True)
    taken_up(folder, without, 2)

    late, _ = check_folder(of_regions("a", "b", "d"), folder, resume=True)
    assert late.shards == {"a": 0, "b": 1, "d": 3}
    with pytest.raises(ConfigError, match="is 2, which is c's for good"):
        check_folder(of_regions("a", "b", "d", shards={"d": 2}), folder, resume=True)
    close(open_tiny(folder / "state", late, resume=True))
    back, _ = check_folder(of_regions("c", "a"), folder, resume=True)
    assert back.shards == {"c": 2, "a": 0}


def test_what_a_refused_start_was_given_is_not_what_the_run_has(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Holding.RUN, tiny_config())
    given = tiny_config(sync={"fragments": 3})
    (folder / "config.next.json").write_text(given.resolved_json())
    before = tree_of(folder)
    with pytest.raises(ConfigError, match=r"sync\.fragments"):
        run_syncer(given, folder, resume=True)
    assert tree_of(folder) == before
    check_folder(tiny_config(), folder, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_no_run_begins_or_goes_on_where_a_baseline_was_trained(tmp_path: Path, *, resume: bool) -> None:
    folder = make(tmp_path / "run", Holding.BASELINE, tiny_config())
    for check in (check_folder, check_syncer_folder):
        with pytest.raises(ConfigError, match="a baseline was trained in this folder"):
            check(tiny_config(), folder, resume=resume)
    with pytest.raises(ConfigError, match="a baseline was trained in this folder"):
        check_learner_folder(folder, "a", resume=resume)


def test_a_learner_goes_on_from_a_checkpoint_only_when_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "learners" / "a" / "checkpoint").mkdir(parents=True)
    with pytest.raises(ConfigError, match="there is a checkpoint of a in this folder") as caught:
        check_learner_folder(tmp_path, "a", resume=False)
    assert "--resume" in (caught.value.hint or "")
    check_learner_folder(tmp_path, "a", resume=True)
    check_learner_folder(tmp_path, "b", resume=False)


def test_a_baseline_may_begin_anew_but_replaces_no_result(tmp_path: Path) -> None:
    check_baseline_folder(tmp_path / "new")
    (tmp_path / "metrics.jsonl").write_text("")
    check_baseline_folder(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="a result in this folder"):
        check_baseline_folder(tmp_path)


def test_a_file_in_the_way_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="it is a file"):
            check_folder(tiny_config(), folder, resume=False)


@pytest.mark.parametrize(
    ("target", "words"), [("", "it is a file"), ("nowhere", "it is a symbolic link that leads to no folder")]
)
def test_a_state_that_is_no_folder_is_called_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, words: str
) -> None:
    config = tiny_config()
    folder = make(tmp_path / "run", Holding.BASELINE, config)
    (folder / "state").symlink_to(target) if target else (folder / "state").touch()
    given = written(tmp_path, config)
    outcomes = [command(capsys, name, given, folder) for name in ("run", "syncer --resume", "learner")]
    outcomes.append(in_this_process(capsys, "replay", str(folder)))
    outcomes.append(in_this_process(capsys, "export", str(folder), "--out", str(tmp_path / "out")))
    for outcome in outcomes:
        assert outcome.exit_code == 78
        assert f"{folder / 'state'}: {words}, and a run's state is a folder" in outcome.stderr


def test_what_a_run_wrote_and_is_no_configuration_any_more_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    folder = make(tmp_path / "run", Holding.RUN, config)
    (folder / "config.json").write_text("{}")
    outcomes = [
        command(capsys, "syncer --resume", written(tmp_path, config), folder),
        in_this_process(capsys, "replay", str(folder)),
        in_this_process(capsys, "export", str(folder), "--out", str(tmp_path / "out")),
    ]
    for outcome in outcomes:
        assert outcome.exit_code == 78
        assert f"{folder / 'config.json'}: what a run wrote here isn't a configuration any more" in outcome.stderr
        assert "run: is missing" in outcome.stderr


def test_an_address_that_is_a_folder_is_no_passing_trouble(tmp_path: Path) -> None:
    (tmp_path / "address").mkdir()
    with pytest.raises(StorageUnusable, match="address: it is a folder, and a file is needed"):
        write_text(tmp_path / "address", "127.0.0.1:7000")


def test_a_journal_that_can_not_be_read_as_one_is_no_passing_trouble_for_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "run", Holding.RUN, tiny_config())
    segment = folder / "state" / "journal" / "0000000001.journal"
    segment.unlink()
    segment.mkdir()
    outcome = in_this_process(capsys, "replay", str(folder))
    assert outcome.exit_code == 78
    assert f"{segment}: it is a folder" in outcome.stderr


def test_a_folder_that_cant_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere, so the system's answer is played.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match="can't write into this folder"):
        check_folder(tiny_config(), tmp_path / "new" / "run", resume=False)


@pytest.mark.parametrize("tail", ["x" * 300, f"new/{'x' * 300}/run", "/".join(["x" * 200] * 25), "zero\0byte"])
def test_a_path_that_cant_be_is_a_matter_of_configuration(tmp_path: Path, tail: str) -> None:
    with pytest.raises(ConfigError):
        check_folder(tiny_config(), tmp_path / tail, resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_syncer_that_is_refused_writes_nothing_into_the_folder_of_a_living_run(tmp_path: Path) -> None:
    config = tiny_config()
    folder = make(tmp_path / "run", Holding.RUN, config)
    with FolderLock(folder / "state", "syncer"):
        before = tree_of(folder)
        with pytest.raises(StorageLocked, match=f"in use by the syncer with pid {os.getpid()}"):
            run_syncer(tiny_config(evaluation={"every_steps": 7}), folder, resume=True)
        assert tree_of(folder) == before


def test_a_syncer_of_other_settings_writes_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Holding.RUN, tiny_config())
    before = tree_of(folder)
    with pytest.raises(ConfigError, match=r"outer\.lr"):
        run_syncer(tiny_config(outer={"lr": 0.5}), folder, resume=True)
    assert tree_of(folder) == before


COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "--run-folder", "{folder}"),
    "run --resume": ("run", "--resume", "--run-folder", "{folder}"),
    "run --baseline": ("run", "--baseline", "alone", "--run-folder", "{folder}"),
    "syncer": ("syncer", "--run-folder", "{folder}"),
    "syncer --resume": ("syncer", "--resume", "--run-folder", "{folder}"),
    "learner": ("learner", "--region", "nowhere", "--run-folder", "{folder}"),
}


def command(capsys: pytest.CaptureFixture[str], name: str, config: str, folder: Path | str, *more: str) -> Outcome:
    verb, *words = (word.format(folder=folder) for word in COMMANDS[name])
    return in_this_process(capsys, verb, config, *words, *more)


REFUSALS: list[tuple[str, Holding, dict[str, dict[str, Any]], int]] = [
    ("run", Holding.RUN, {}, 78),
    ("run", Holding.BASELINE, {}, 78),
    ("run", Holding.FINISHED_RUN, {}, 78),
    ("run --resume", Holding.NOTHING, {}, 78),
    ("run --resume", Holding.BASELINE, {}, 78),
    ("run --resume", Holding.RUN, {"inner": {"lr": 0.5}}, 78),
    ("run --resume", Holding.FINISHED_RUN, {"inner": {"lr": 0.5}}, 78),
    ("run --baseline", Holding.RUN, {}, 78),
    ("run --baseline", Holding.FINISHED_RUN, {}, 78),
    ("syncer", Holding.RUN, {}, 78),
    ("syncer", Holding.FINISHED_RUN, {}, 78),
    ("syncer", Holding.BASELINE, {}, 78),
    ("syncer --resume", Holding.BASELINE, {}, 78),
    ("syncer --resume", Holding.RUN, {"inner": {"lr": 0.5}}, 78),
    ("syncer", Holding.NOTHING, {"syncer": {"listen": "192.0.2.1:0", "insecure": True}}, 78),
    ("learner", Holding.BASELINE, {}, 78),
    ("learner", Holding.RUN, {}, 78),
]


@pytest.mark.parametrize(("name", "holding", "tables", "exit_code"), REFUSALS)
def test_a_refused_command_writes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    holding: Holding,
    tables: dict[str, dict[str, Any]],
    exit_code: int,
) -> None:
    monkeypatch.setattr("wan_diloco.telemetry.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    make(tmp_path / "run", holding, tiny_config())
    config = written(tmp_path, tiny_config(**tables))
    before = tree_of(tmp_path)
    outcome = command(capsys, name, config, tmp_path / "run")
    assert (outcome.exit_code, outcome.stdout) == (exit_code, "")
    assert outcome.stderr.startswith("wan-diloco: ")
    assert "--resume" not in outcome.stderr or holding in {Holding.RUN, Holding.NOTHING}
    assert tree_of(tmp_path) == before


def test_going_on_leaves_the_run_of_a_syncer_alone_that_was_started_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(data={"source": f"text:{write_text_corpus(tmp_path / 'text.txt', 3000)}"})
    folder = make(tmp_path / "run", Holding.RUN, config)
    (folder / "address").write_text("127.0.0.1:7000")
    with FolderLock(folder / "state", "syncer"):
        outcome = command(capsys, "run --resume", written(tmp_path, config), folder)
    assert outcome.exit_code == 78
    assert "in use by the syncer" in outcome.stderr
    assert (folder / "address").read_text() == "127.0.0.1:7000"


def test_a_finished_run_that_is_to_go_on_says_its_result_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "run", Holding.FINISHED_RUN, tiny_config())
    config = written(tmp_path, tiny_config())
    before = tree_of(tmp_path)
    outcome = command(capsys, "run --resume", config, folder)
    assert outcome.exit_code == 0
    assert "is finished" in outcome.stderr
    assert "validation loss   1.5000 nats a byte" in outcome.stdout
    as_json = command(capsys, "run --resume", config, folder, "--json")
    assert json.loads(as_json.stdout)["rounds"] == 7
    assert command(capsys, "syncer --resume", config, folder).exit_code == 0
    assert tree_of(tmp_path) == before


@pytest.mark.parametrize("name", ["run", "syncer", "learner", "run --baseline"])
def test_an_empty_folder_name_is_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = written(tmp_path, tiny_config())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    outcome = command(capsys, name, config, "")
    assert outcome.exit_code == 2
    assert "it is empty" in outcome.stderr
    assert list((tmp_path / "here").iterdir()) == []


def test_export_takes_no_empty_names_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_this_process(capsys, "export", "", "--out", "x").exit_code == 2
    assert in_this_process(capsys, "export", "x", "--out", "").exit_code == 2


def test_a_run_that_merged_nothing_does_not_end_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "run", Holding.FINISHED_RUN, tiny_config())
    command = ("run", written(tmp_path, tiny_config()), "--run-folder", str(folder), "--resume")
    assert in_this_process(capsys, *command).exit_code == 0
    summarise(folder, finished=True, nothing_merged=True, rejected={"non_finite": 3})
    outcome = in_this_process(capsys, *command)
    assert outcome.exit_code == 78
    assert (
        "nothing was merged in this run, and its scores are the initial model's; refused: non_finite 3"
        in outcome.stderr
    )


def test_a_run_that_goes_on_with_text_from_elsewhere_is_told_what_nobody_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reading(path: str) -> RunConfig:
        return parse_config({**json.loads(tiny_config().resolved_json()), "data": {"source": f"text:{path}"}})

    folder = make(tmp_path / "run", Holding.RUN, reading("here"))
    check_folder(reading("here"), folder, resume=True)
    assert capsys.readouterr().err == ""
    check_folder(reading("there"), folder, resume=True)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "data.source is text:there now, and was text:here: it must be the very same text" in warning
    with pytest.raises(ConfigError, match=r"data\.source"):
        check_folder(
            parse_config({**json.loads(tiny_config().resolved_json()), "data": {"source": "sotu"}}), folder, resume=True
        )
