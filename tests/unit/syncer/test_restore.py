"""Beginning and taking up: who may, and what is refused."""

from __future__ import annotations

import shutil

import pytest

from tests.support.syncer import close, open_tiny, tiny_config
from wan_diloco.errors import ConfigError, StateDamaged, StorageLocked
from wan_diloco.protocol import serial
from wan_diloco.protocol.tape import LearnerAdmitted, SyncerStarted
from wan_diloco.storage import JournalRef, keep_last
from wan_diloco.syncer.journal_keeper import KIND_CONTRIBUTION, KIND_TAPE
from wan_diloco.syncer.restore import SNAPSHOT_NAME
from wan_diloco.syncer.snapshots import newest_sequence
from wan_diloco.units import Epoch, Incarnation, LearnerId, LocalStep, Term

ADMITTED = LearnerAdmitted(learner_id=LearnerId("east"), incarnation=Incarnation(3), local_step=LocalStep(0), tokens=0)


def test_a_fresh_folder_begins_at_the_initial_weights(tmp_path):
    restored = open_tiny(tmp_path / "state", tiny_config())
    assert [str(value.version) for value in restored.store.values()] == ["0.0", "0.0"]
    assert list(restored.state.initial_digests) == [value.digest for value in restored.store.values()]
    assert not restored.resumed
    close(restored)


def test_a_folder_with_a_run_is_only_taken_up_when_asked(tmp_path):
    close(open_tiny(tmp_path / "state", tiny_config()))
    with pytest.raises(ConfigError, match=r"there is a run in this folder already.*--resume"):
        open_tiny(tmp_path / "state", tiny_config())
    restored = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    assert restored.resumed
    close(restored)


def test_a_refused_folder_is_left_unlocked(tmp_path):
    close(open_tiny(tmp_path / "state", tiny_config()))
    for _ in range(2):
        with pytest.raises(ConfigError):
            open_tiny(tmp_path / "state", tiny_config())
    close(open_tiny(tmp_path / "state", tiny_config(), resume=True))


def test_resume_in_an_empty_folder_begins(tmp_path):
    restored = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    assert not restored.resumed
    close(restored)


def test_two_syncers_never_share_a_folder(tmp_path):
    restored = open_tiny(tmp_path / "state", tiny_config())
    with pytest.raises(StorageLocked, match="in use by the syncer"):
        open_tiny(tmp_path / "state", tiny_config(), resume=True)
    close(restored)


def test_another_runs_settings_are_refused_by_name(tmp_path):
    close(open_tiny(tmp_path / "state", tiny_config()))
    with pytest.raises(ConfigError, match=r"outer\.lr: is 0\.5 now, and the run in .* was begun with 0\.7"):
        open_tiny(tmp_path / "state", tiny_config(outer={"lr": 0.5}), resume=True)


def test_the_tape_behind_the_snapshot_is_applied(tmp_path):
    restored = open_tiny(tmp_path / "state", tiny_config())
    restored.journal.append(KIND_CONTRIBUTION, b"{}", (b"not looked at",))
    ref = restored.journal.append(KIND_TAPE, serial.dumps(ADMITTED))
    restored.journal.sync()
    close(restored)
    again = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    assert again.state.incarnations == {"east": 3}
    assert again.last_tape == ref
    assert again.tape == (ADMITTED,)
    close(again)


@pytest.mark.parametrize("durable", [True, False])
def test_a_start_knows_that_it_begins_a_new_epoch_and_why(tmp_path, durable):
    restored = open_tiny(tmp_path / "state", tiny_config())
    assert restored.new_epoch == ""
    started = SyncerStarted(term=Term(1), epoch=Epoch(0), durable=durable)
    restored.journal.append(KIND_TAPE, serial.dumps(started))
    restored.journal.sync()
    close(restored)
    again = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    unflushed = 'the process before didn\'t flush all that it had said (syncer.durability = "interval")'
    assert again.new_epoch == ("" if durable else unflushed)
    close(again)


def test_a_journal_without_its_snapshot_is_no_fresh_start(tmp_path):
    restored = open_tiny(tmp_path / "state", tiny_config())
    restored.journal.append(KIND_TAPE, serial.dumps(ADMITTED))
    close(restored)
    for path in (tmp_path / "state" / "snapshots").glob("state-*/*"):
        path.unlink()
    for path in (tmp_path / "state" / "snapshots").glob("state-*"):
        path.rmdir()
    with pytest.raises(StateDamaged, match="a journal and no snapshot"):
        open_tiny(tmp_path / "state", tiny_config(), resume=True)


def test_damaged_snapshots_never_lead_to_a_start_from_nothing(tmp_path):
    close(open_tiny(tmp_path / "state", tiny_config()))
    tensors = tmp_path / "state" / "snapshots" / "state-0" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StateDamaged, match="none of the 1 snapshots"):
        open_tiny(tmp_path / "state", tiny_config(), resume=True)


@pytest.mark.parametrize("name", ["state-x", "state-6.tmp", "state--1", "state-06", "backup"])
def test_what_is_no_snapshot_by_its_name_is_ignored_told_and_stays(tmp_path, name):
    snapshots = tmp_path / "state" / "snapshots"
    close(open_tiny(tmp_path / "state", tiny_config()))
    shutil.copytree(snapshots / "state-0", snapshots / name)
    restored = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    assert restored.snapshot == "state-0"
    assert restored.notes == (f"{snapshots / name} is ignored: no snapshot of a syncer has such a name",)
    assert newest_sequence(snapshots) == 0
    close(restored)
    keep_last(snapshots, 1, ours=SNAPSHOT_NAME)
    assert {path.name for path in snapshots.iterdir()} == {"state-0", name}


def test_nothing_is_said_of_a_last_segment_that_was_just_begun(tmp_path):
    close(open_tiny(tmp_path / "state", tiny_config()))
    (tmp_path / "state" / "journal" / "0000000002.journal").touch()
    restored = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    assert restored.journal.segments == (1, 2)
    assert restored.notes == ()
    close(restored)


def test_what_is_no_segment_by_its_name_is_ignored_and_told(tmp_path):
    close(open_tiny(tmp_path / "state", tiny_config()))
    path = tmp_path / "state" / "journal" / "99999999999999999999.journal"
    path.touch()
    restored = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    assert restored.notes == (f"{path} is ignored: no segment of a journal has such a name",)
    close(restored)


def test_places_in_the_journal_are_ordered_as_they_were_written():
    # Replay begins behind the snapshot's last place, and compares places for that.
    assert JournalRef(1, 900, 5) < JournalRef(2, 20, 5) < JournalRef(2, 25, 1)
