"""Merging a run again from its journal: the same bits, or the first place where they aren't."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.cli import in_this_process
from tests.support.snapshots import save_snapshot
from tests.support.syncer import maths_of, tiny_config
from tests.support.syncer_scene import advance, scene, until
from wan_diloco.errors import EXIT_CONFIG, EXIT_INTERNAL, ConfigError, StateDamaged
from wan_diloco.storage import Journal, JournalReader, JournalRef, good_snapshots, load_snapshot
from wan_diloco.storage.journal_format import RECORD_HEADER_BYTES, checksum, decode_record_header
from wan_diloco.syncer.fragments_store import published_tensors
from wan_diloco.syncer.journal_keeper import KIND_CONTRIBUTION, KIND_TAPE
from wan_diloco.syncer.proof import replay_run
from wan_diloco.syncer.replay import restored_state

SEGMENT_BYTES = 30_000


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(Journal.open.__func__, "__defaults__", (SEGMENT_BYTES,))


def _config(retention: str):
    return tiny_config(syncer={"snapshot_every": "1ms", "keep_updates": 1, "journal_retention": retention})


def _run(folder: Path, config, *, steps: int = 40, killed: bool = True) -> list[int]:
    """A run that is killed or stopped; the counts of its versions."""

    async def story():
        async with scene(config, folder) as (made, group):
            (folder / "config.json").write_text(config.resolved_json())
            await advance(group, made, steps)
            if config.syncer.journal_retention == "since-snapshot":
                await until(lambda: made.restored.journal.segments[0] > 1)
            with pytest.raises(ConfigError, match=r"the run is going on: the syncer with pid \d+"):
                replay_run(folder, config)
            await (made.crash() if killed else made.stop())
            return made.versions

    return asyncio.run(story())


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_with_everything_kept_every_version_since_the_beginning_is_done_again(tmp_path):
    config = _config("all")
    versions = _run(tmp_path, config)
    segments = JournalReader.open(tmp_path / "state" / "journal").segments
    assert segments[0] == 1
    assert len(segments) > 1
    before = _files(tmp_path)
    report = replay_run(tmp_path, config)
    assert report.difference is None
    assert report.since == "the initial weights"
    assert [version.count for version in report.begun] == [0, 0]
    assert [version.count for version in report.reached] == versions
    assert report.versions == sum(versions) >= 15
    assert len(report.snapshots) == 2
    assert _files(tmp_path) == before


@pytest.mark.parametrize("killed", [True, False])
def test_what_is_kept_since_the_older_snapshot_is_done_again(tmp_path, killed):
    config = _config("since-snapshot")
    versions = _run(tmp_path, config, killed=killed)
    report = replay_run(tmp_path, config)
    older, newer = sorted(
        (path.name for path in (tmp_path / "state" / "snapshots").iterdir()), key=lambda n: int(n[6:])
    )
    assert (report.since, report.snapshots) == (older, (newer,))
    assert report.difference is None
    assert [version.count for version in report.reached] == versions
    assert report.notes == (f"what was published before snapshot {older} isn't kept any more",)


def _change_payload(journal: Path, ref: JournalRef) -> None:
    """Another bit in the payload of a record, where it lies, under a checksum that is right."""
    path = journal / f"{ref.segment:010}.journal"
    data = bytearray(path.read_bytes())
    head = decode_record_header(data[ref.offset : ref.offset + RECORD_HEADER_BYTES], ref.segment, ref.offset)
    assert head is not None
    end = ref.offset + head.record_bytes
    begin = end - head.payload_bytes
    data[begin + 3] ^= 0x11
    head = dataclasses.replace(head, payload_sum=checksum((data[begin:end],)))
    data[ref.offset : ref.offset + RECORD_HEADER_BYTES] = head.encode(ref.segment, ref.offset)
    path.write_bytes(data)


def _rewritten(folder: Path, copy: Path, number: int) -> dict:
    """A copy of a run in which one contribution has another byte, and all checksums are right.

    Returns:
        The close record that names it.
    """
    shutil.copytree(folder, copy)
    changed, closed = None, []
    with JournalReader.open(folder / "state" / "journal") as source:
        for index, (ref, head) in enumerate(source.records()):
            if head.kind == KIND_CONTRIBUTION and changed is None and index >= number:
                _change_payload(copy / "state" / "journal", ref)
                changed = f"{ref.segment}:{ref.offset}:{ref.length}"
            if head.kind == KIND_TAPE and changed is not None:
                record = json.loads(head.meta)
                if changed in [entry["ref"] for entry in record.get("entries", ())]:
                    closed.append(record)
    return closed[0]


def test_the_first_difference_is_named_and_what_was_the_same_before(tmp_path, capsys):
    config = _config("all")
    versions = _run(tmp_path / "run", config)
    closed = _rewritten(tmp_path / "run", tmp_path / "other", 60)
    report = replay_run(tmp_path / "other", config)
    difference = report.difference
    assert difference is not None
    assert (difference.what, difference.round_id) == ("merge", closed["round_id"])
    assert difference.fragment_id == closed["fragment_id"]
    assert difference.expected != difference.found
    assert 0 < report.versions < sum(versions)
    outcome = in_this_process(capsys, "replay", str(tmp_path / "other"))
    assert outcome.exit_code == EXIT_INTERNAL
    assert f"other bits: round {closed['round_id']}, fragment {closed['fragment_id']}" in outcome.stdout
    assert difference.found in outcome.stdout
    outcome = in_this_process(capsys, "replay", str(tmp_path / "other"), "--json")
    answer = json.loads(outcome.stdout)
    assert (outcome.exit_code, answer["equal"], answer["versions"]) == (EXIT_INTERNAL, False, report.versions)
    assert answer["difference"]["expected"] == difference.expected


def test_a_snapshot_that_has_other_bits_is_a_difference(tmp_path, capsys):
    config = _config("all")
    versions = _run(tmp_path, config, steps=9)
    snapshots = tmp_path / "state" / "snapshots"
    name = max(good_snapshots(snapshots), key=lambda each: int(each[6:]))
    snapshot = load_snapshot(snapshots, name)
    shutil.rmtree(snapshots / name)
    tensors = {key: tensor.clone() for key, tensor in snapshot.tensors.items()}
    tensors["momentum.1"][5] += 1e-6
    save_snapshot(snapshots, name, tensors, snapshot.manifest)
    report = replay_run(tmp_path, config)
    difference = report.difference
    assert difference is not None
    assert (difference.what, difference.where, difference.fragment_id) == ("momentum", name, 1)
    assert report.versions <= sum(versions)
    capsys.readouterr()
    outcome = in_this_process(capsys, "replay", str(tmp_path))
    assert f"the momentum value, which {name} has, is now {difference.found}" in outcome.stdout


def test_the_command_says_what_it_found(tmp_path, capsys):
    config = _config("all")
    versions = _run(tmp_path, config, steps=9)
    capsys.readouterr()
    outcome = in_this_process(capsys, "replay", str(tmp_path))
    assert outcome.exit_code == 0
    head, *rest = outcome.stdout.splitlines()
    assert head == f"the same bits: {sum(versions)} versions of 2 fragments since the initial weights"
    older, newer = good_snapshots(tmp_path / "state" / "snapshots")
    assert rest[:2] == [
        f"compared with the same result: snapshots {older}, {newer}",
        "done again, as epoch.version:",
    ]
    assert rest[2:] == [f"fragment {index}: 0.0 to 0.{count}" for index, count in enumerate(versions)]
    answer = json.loads(in_this_process(capsys, "replay", str(tmp_path), "--json").stdout)
    assert (answer["equal"], answer["versions"], answer["difference"]) == (True, sum(versions), None)


def test_what_is_no_run_or_is_damaged_is_refused_politely(tmp_path, capsys):
    outcome = in_this_process(capsys, "replay", str(tmp_path))
    assert outcome.exit_code == EXIT_CONFIG
    assert "there is no run in this folder" in outcome.stderr
    config = _config("all")
    (tmp_path / "run").mkdir()
    _run(tmp_path / "run", config, steps=9)
    segment = tmp_path / "run" / "state" / "journal" / "0000000001.journal"
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)
    with pytest.raises(StateDamaged, match=r"can't be done again: .*segment 1 at offset"):
        replay_run(tmp_path / "run", config)
    outcome = in_this_process(capsys, "replay", str(tmp_path / "run"))
    assert outcome.exit_code == EXIT_CONFIG
    assert len(outcome.stderr.splitlines()) == 1
    assert "a syncer needs less of the journal than this" in outcome.stderr


def _lose_the_end(folder: Path) -> None:
    """Turn a bit of the journal's last record, which nothing shows to have been flushed."""
    path = max((folder / "state" / "journal").iterdir())
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def test_a_snapshot_that_is_ahead_of_the_journal_is_not_passed_in_silence(tmp_path, capsys):
    versions = _run(tmp_path, _config("all"), steps=9, killed=False)
    _lose_the_end(tmp_path)
    older, newer = good_snapshots(tmp_path / "state" / "snapshots")
    capsys.readouterr()
    outcome = in_this_process(capsys, "replay", str(tmp_path))
    assert outcome.exit_code == EXIT_CONFIG
    assert outcome.stdout.startswith("the same bits, as far as the journal goes: ")
    assert newer not in outcome.stdout
    warning, error = outcome.stderr.splitlines()
    assert "nothing from there on is done again" in warning
    assert f"snapshot {newer} is ahead of what is left of the journal, so that what it holds can't be checked" in error
    outcome = in_this_process(capsys, "replay", str(tmp_path), "--json")
    answer = json.loads(outcome.stdout)
    assert (outcome.exit_code, answer["equal"], answer["difference"]) == (EXIT_CONFIG, False, None)
    assert (answer["snapshots"], answer["snapshots_ahead"]) == ([older], [newer])
    assert answer["versions"] <= sum(versions)


def test_a_damaged_snapshot_still_says_that_the_journal_lost_its_end(tmp_path):
    config = _config("all")
    _run(tmp_path, config, steps=9, killed=False)
    _lose_the_end(tmp_path)
    newer = list(good_snapshots(tmp_path / "state" / "snapshots"))[-1]
    _turn_a_bit(tmp_path / "state" / "snapshots" / newer / "tensors.safetensors")
    assert replay_run(tmp_path, config).ahead == (newer,)


def _turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("file", ["tensors.safetensors", "manifest.json"])
def test_a_damaged_snapshot_is_told(tmp_path, capsys, which, file):
    _run(tmp_path, _config("all"), steps=9, killed=False)
    names = list(good_snapshots(tmp_path / "state" / "snapshots"))
    _turn_a_bit(tmp_path / "state" / "snapshots" / names[which] / file)
    capsys.readouterr()
    outcome = in_this_process(capsys, "replay", str(tmp_path))
    assert outcome.exit_code == 0
    assert f"compared with the same result: snapshot {names[1 - which]}\n" in outcome.stdout
    (warning,) = outcome.stderr.splitlines()
    assert warning.startswith(f"wan-diloco: warning: snapshot {names[which]} was passed over: ")


def test_other_initial_weights_are_the_configurations_fault_and_no_merges(tmp_path, capsys):
    config = _config("all")
    _run(tmp_path, config, steps=9)
    given = json.loads(config.resolved_json())
    given["run"]["seed"] += 1
    (tmp_path / "config.json").write_text(json.dumps(given))
    capsys.readouterr()
    outcome = in_this_process(capsys, "replay", str(tmp_path))
    assert (outcome.exit_code, outcome.stdout) == (EXIT_CONFIG, "")
    assert "config.json: it makes other initial weights than the run began with" in outcome.stderr
    assert f"(run.seed is {config.run.seed + 1} in it, and was {config.run.seed})" in outcome.stderr


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


_SPOILS = {
    "cut": _cut,
    "emptied": lambda path: path.write_bytes(b""),
    "random": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size)),
}


@pytest.mark.parametrize("snapshots", ["whole", "damaged", "gone"])
@pytest.mark.parametrize("retention", ["all", "since-snapshot"])
def test_a_journal_that_lost_its_end_never_proves_a_run(tmp_path, capsys, monkeypatch, retention, snapshots):
    # One segment, as small runs have.
    monkeypatch.setattr(Journal.open.__func__, "__defaults__", (1 << 30,))
    config = _config("all")
    _run(tmp_path / "run", config, steps=9, killed=False)
    (tmp_path / "run" / "config.json").write_text(_config(retention).resolved_json())
    for name, spoil in _SPOILS.items():
        copy = tmp_path / name
        shutil.copytree(tmp_path / "run", copy)
        spoil(copy / "state" / "journal" / "0000000001.journal")
        for path in (copy / "state" / "snapshots").iterdir() if snapshots != "whole" else ():
            if snapshots == "gone":
                shutil.rmtree(path)
            else:
                (path / "manifest.json").write_bytes(b"{")
        capsys.readouterr()
        outcome = in_this_process(capsys, "replay", str(copy))
        assert (outcome.exit_code, name) == (EXIT_CONFIG, name)
        assert outcome.stdout.startswith("the same bits, as far as the journal goes: ")
        told = "ahead of what is left" if snapshots == "whole" else "published rounds that aren't in the journal"
        assert told in outcome.stderr.splitlines()[-1]


def test_each_that_knows_of_a_publication_tells_that_the_journal_ends_before(tmp_path, capsys):
    config = _config("all")
    versions = _run(tmp_path / "run", config, killed=False)
    run = tmp_path / "run"
    assert replay_run(run, config).proven
    snapshots = run / "state" / "snapshots"
    newest = load_snapshot(snapshots, max(good_snapshots(snapshots), key=lambda name: int(name[6:])))
    maths = maths_of(config)
    state, store = restored_state(newest, "newest", maths)
    final = published_tensors(maths.layout, store.values())
    shutil.rmtree(snapshots)
    (run / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    journal = run / "state" / "journal"
    for path in sorted(journal.iterdir())[1:]:
        path.unlink()
    # Nothing in the folder says any more that there was more.
    assert replay_run(run, config).proven

    shutil.copy(tmp_path / "metrics.jsonl", run / "metrics.jsonl")
    assert "metrics.jsonl has" in replay_run(run, config).beyond[0]
    (run / "metrics.jsonl").unlink()
    (run / "summary.json").write_text(json.dumps({"finished": False, "rounds": sum(versions)}))
    (told,) = replay_run(run, config).beyond
    assert told.startswith(f"summary.json counts {sum(versions)} rounds, and the journal comes to ")
    (run / "summary.json").write_text(json.dumps({"finished": True}))
    (told,) = replay_run(run, config).beyond
    assert told == "summary.json says that the run is finished, and the journal doesn't come to its end"
    (run / "summary.json").unlink()
    save_snapshot(run / "published", "final", final, {"global_step": state.global_step})
    (told,) = replay_run(run, config).beyond
    assert told.startswith(f"published/final, of step {state.global_step}, holds other weights than the journal leads")
    capsys.readouterr()
    outcome = in_this_process(capsys, "replay", str(run), "--json")
    answer = json.loads(outcome.stdout)
    assert (outcome.exit_code, answer["equal"], answer["beyond"]) == (EXIT_CONFIG, False, [told])
    assert f"the journal ends too early: {told}. Put back a copy" in outcome.stderr
