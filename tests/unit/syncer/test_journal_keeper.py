"""Records, and a disk that doesn't take them."""

from __future__ import annotations

import asyncio
import json

import pytest

from wan_diloco.errors import JournalError, StorageError
from wan_diloco.protocol.tape import RunEnded, SyncerStarted
from wan_diloco.storage import Journal
from wan_diloco.syncer import journal_keeper
from wan_diloco.syncer.journal_keeper import (
    KIND_CONTRIBUTION,
    KIND_PUBLICATION,
    KIND_TAPE,
    JournalKeeper,
    TapeMirror,
    parse_ref,
)
from wan_diloco.syncer.workers import Workers
from wan_diloco.units import Epoch, GlobalStep, Term

STARTED = SyncerStarted(term=Term(1), epoch=Epoch(0))
ENDED = RunEnded(global_step=GlobalStep(5), reason="x")


class Disk:
    """A journal whose appends fail as often as one says, and whose flushes may fail for good."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.full_for = 0
        self.lost = False
        self.syncs = 0

    def append(self, kind, meta, payload=()):
        if self.full_for:
            self.full_for -= 1
            raise StorageError("can't append: the disk or the quota is full; free some space")
        return self._journal.append(kind, meta, payload)

    def sync(self):
        self.syncs += 1
        if self.lost:
            raise StorageError("the journal couldn't be flushed and must be opened anew")
        self._journal.sync()

    def __getattr__(self, name):
        return getattr(self._journal, name)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_keeper, "JOURNAL_RETRY_FIRST_S", 0.0)
    disk = Disk(Journal.open(tmp_path / "journal"))
    said: list[str] = []
    mirror = TapeMirror(tmp_path / "tape.jsonl")
    keeper = JournalKeeper(disk, Workers.inline(), mirror, None, said.append)
    yield keeper, disk, said, tmp_path
    keeper.close()


def test_records_are_in_the_journal_and_in_the_mirror_after_one_flush(scene):
    keeper, disk, said, folder = scene
    asyncio.run(keeper.record([STARTED, ENDED], durable=True))
    assert disk.syncs == 1
    assert [head.kind for _, head in disk.records()] == [KIND_TAPE, KIND_TAPE]
    lines = [json.loads(line) for line in (folder / "tape.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["SyncerStarted", "RunEnded"]
    assert keeper.last_tape == [ref for ref, _ in disk.records()][-1]
    assert not said


def test_a_full_disk_is_waited_out_said_once_over_and_nothing_is_written_twice(scene):
    keeper, disk, said, _ = scene
    disk.full_for = 3
    asyncio.run(keeper.record([STARTED, ENDED], durable=True))
    assert len(list(disk.records())) == 2
    assert all("disk" in text for text in said[:3])
    assert said[3:] == [""]


def test_the_disk_fills_up_between_two_records_and_the_first_stays_single(scene):
    keeper, disk, _, _ = scene
    asyncio.run(keeper.record([STARTED], durable=False))
    calls = 0
    append = disk._journal.append

    def failing_second(kind, meta, payload=()):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StorageError("full")
        return append(kind, meta, payload)

    disk.append = failing_second
    asyncio.run(keeper.record([STARTED, ENDED], durable=True))
    assert [json.loads(head.meta)["type"] for _, head in disk.records()] == [
        "SyncerStarted",
        "SyncerStarted",
        "RunEnded",
    ]


def test_a_journal_that_lost_track_ends_it(scene):
    keeper, disk, _, _ = scene
    disk.lost = True
    with pytest.raises(StorageError, match="opened anew"):
        asyncio.run(keeper.record([STARTED], durable=True))


def test_a_contribution_waits_for_space_and_a_publication_does_not(scene):
    keeper, disk, _, _ = scene
    disk.full_for = 2
    ref = asyncio.run(keeper.append_waiting(KIND_CONTRIBUTION, {"a": 1}, (b"codes", b"scales")))
    assert keeper.read(ref, KIND_CONTRIBUTION) == b"codesscales"
    disk.full_for = 1
    with pytest.raises(StorageError, match="full"):
        asyncio.run(keeper.append(KIND_PUBLICATION, {}, (b"x",)))


def test_a_place_of_another_kind_is_not_read(scene):
    keeper, *_ = scene
    ref = asyncio.run(keeper.append(KIND_CONTRIBUTION, {}, (b"x",)))
    with pytest.raises(JournalError, match="of kind 2 and not 3"):
        keeper.read(ref, KIND_PUBLICATION)


def test_segments_are_needed_for_places_referred_to_and_for_what_is_not_recorded_yet(scene):
    keeper, *_ = scene
    assert keeper.floor(["3:20:9", "5:20:9"]) == 3
    assert keeper.floor(["3:20:9", "5:20:9:2"]) == 2
    ref = asyncio.run(keeper.append(KIND_CONTRIBUTION, {}, ()))
    assert keeper.floor(["3:20:9"]) == parse_ref(ref).segment == 1
    keeper.recorded(ref)
    assert keeper.floor(["3:20:9"]) == 3


def test_a_record_that_refers_to_older_segments_keeps_them(scene):
    keeper, *_ = scene
    # It lies in segment 1 itself; as if its chunks were older.
    ref = asyncio.run(keeper.append(KIND_CONTRIBUTION, {}, (), oldest=0))
    assert ref.endswith(":0")
    assert keeper.floor(["3:20:9"]) == 0
    keeper.recorded(ref)
    assert keeper.floor(["3:20:9"]) == 3
    assert keeper.read(ref, KIND_CONTRIBUTION) == b""


def test_while_a_record_is_being_appended_its_segment_stays(scene):
    keeper, disk, _, _ = scene
    floors = []
    append = disk.append

    def looked_at(kind, meta, payload=()):
        ref = append(kind, meta, payload)
        floors.append(keeper.floor(["3:20:9"]))
        return ref

    disk.append = looked_at
    asyncio.run(keeper.append(KIND_CONTRIBUTION, {}, ()))
    assert floors == [1]


def test_an_idle_claim_is_let_go_of_when_the_journal_has_grown_and_a_busy_one_never(tmp_path):
    journal = Journal.open(tmp_path / "journal", segment_bytes=1)
    keeper = JournalKeeper(journal, Workers.inline(), TapeMirror(tmp_path / "tape.jsonl"), None, lambda _: None)
    busy, idle = keeper.claim(), keeper.claim()
    for claim in (busy, idle):
        claim.begin()
    idle.idle = True
    for _ in range(33):
        keeper.append_now(KIND_CONTRIBUTION, b"x")
    assert keeper.floor(["50:20:9"]) == 1
    assert not idle.lost
    busy.release()
    assert keeper.floor(["50:20:9"]) == 1
    keeper.append_now(KIND_CONTRIBUTION, b"x")
    assert keeper.floor(["50:20:9"]) == 50
    assert idle.lost
    busy, idle = keeper.claim(), keeper.claim()
    busy.begin()
    for _ in range(40):
        keeper.append_now(KIND_CONTRIBUTION, b"x")
    assert keeper.floor(["99:20:9"]) == busy.oldest == 34
    keeper.close()


@pytest.mark.parametrize("text", ["", "1:2", "1:2:x", "1:2:3:4:5", "-1:2:3"])
def test_what_is_no_place_is_refused(text):
    with pytest.raises(JournalError, match="isn't a place"):
        parse_ref(text)


class FillingFile:
    """Takes as many bytes as there is room, as a disk does that fills up."""

    def __init__(self, path):
        self.file = path.open("ab", buffering=0)
        self.room = 10

    def write(self, data):
        taken = data[: self.room]
        self.room -= len(taken)
        return self.file.write(taken)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_disk_that_fills_up_tears_no_line_of_the_mirror_and_loses_none(tmp_path):
    path = tmp_path / "tape.jsonl"
    mirror = TapeMirror(path)
    mirror.append([b"1"])
    mirror.close()
    mirror._file = FillingFile(path)
    mirror.append([b"2"])
    with pytest.raises(OSError, match="space"):
        mirror.append([b"3", b'{"longer": 4}'])
    assert path.read_bytes() == b"1\n2\n"
    mirror._file.room = 1000
    mirror.append([b"5"])
    mirror.close()
    assert path.read_text().splitlines() == ["1", "2", "3", '{"longer": 4}', "5"]


def test_the_mirror_catches_up_behind_a_torn_line(tmp_path):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":2}\n{"c"')
    mirror = TapeMirror(path)
    mirror.catch_up([b'{"b":2}', b'{"c":3}', b'{"d":4}'])
    mirror.close()
    assert path.read_bytes() == b'{"a":1}\n{"b":2}\n{"c":3}\n{"d":4}\n'


def test_the_mirror_of_a_run_whose_file_is_gone_begins_with_what_is_known(tmp_path):
    mirror = TapeMirror(tmp_path / "tape.jsonl")
    mirror.catch_up([b"1", b"2"])
    mirror.close()
    assert (tmp_path / "tape.jsonl").read_bytes() == b"1\n2\n"
