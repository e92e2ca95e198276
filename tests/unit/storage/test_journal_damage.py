"""What the journal makes of damage: torn tails, lost pages, flipped bytes, files that are gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.damage import flip, segment_file
from wan_diloco.errors import JournalError
from wan_diloco.storage import Journal, JournalReader, JournalRef, RecordHead


def test_a_torn_tail_is_cut_and_reported_and_writing_goes_on(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        whole = journal.append(1, b"whole")
        journal.sync()
        torn = journal.append(2, b"torn", [b"p" * 100])
    os.truncate(segment_file(tmp_path), torn.offset + torn.length - 1)
    with Journal.open(tmp_path) as journal:
        assert journal.torn is not None
        assert (journal.torn.segment, journal.torn.offset) == (1, torn.offset)
        assert journal.torn.dropped_bytes == torn.length - 1
        again = journal.append(3, b"again")
        assert again.offset == torn.offset
        assert [head.meta for _, head in journal.records()] == [b"whole", b"again"]
        assert journal.read(whole).meta == b"whole"


def test_damage_to_what_was_synced_is_told_with_its_place_and_kind_and_the_rest_stays(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        ref = journal.append(1, b"promised", [b"p" * 10])
        journal.sync()
        later = journal.append(2, b"later")
    for offset, kind in ((ref.offset, None), (ref.offset + 20, None), (ref.offset + ref.length - 1, 1)):
        flip(segment_file(tmp_path), offset)
        with Journal.open(tmp_path) as journal:
            (damage,) = journal.damaged
            assert (damage.segment, damage.start, damage.end, damage.kind) == (1, ref.offset, later.offset, kind)
            assert f"segment 1 at offset {ref.offset}:" in str(damage.error())
            assert journal.torn is None
            found = list(journal.survey(verify_payload=True))
            assert found == [damage, (later, RecordHead(kind=2, meta=b"later", payload_bytes=0))]
            assert list(journal.survey(after=ref)) == found[1:]
            with pytest.raises(JournalError, match=rf"segment 1 at offset {ref.offset}:"):
                list(journal.records(verify_payload=True))
            with pytest.raises(JournalError, match=rf"segment 1 at offset {ref.offset}:"):
                journal.read(ref)
        flip(segment_file(tmp_path), offset)
    with Journal.open(tmp_path) as journal:
        assert journal.damaged == ()


def test_a_last_segment_whose_first_bytes_are_damaged_is_known_by_its_records_and_mended(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        ref = journal.append(1, b"x")
    whole = segment_file(tmp_path).read_bytes()
    flip(segment_file(tmp_path), 9)
    with JournalReader.open(tmp_path) as reader:
        damage, record = reader.survey()
        assert (damage.start, damage.end) == (0, 20)
        assert record[0] == ref
    with Journal.open(tmp_path) as journal:
        assert [item.start for item in journal.damaged] == [0]
    assert segment_file(tmp_path).read_bytes() == whole


def test_a_journal_that_lacks_a_place_it_should_hold_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is gone"):
        Journal.open(tmp_path, holding=JournalRef(1, 20, 0))
    assert list(tmp_path.iterdir()) == []
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        refs = [journal.append(index, b"m" * 60) for index in range(3)]
        journal.drop_segments_before(2)
    os.truncate(segment_file(tmp_path, 3), refs[2].offset + 5)
    before = segment_file(tmp_path, 3).read_bytes()
    for gone in (refs[0], refs[2]):
        with pytest.raises(JournalError, match=f"should hold segment {gone.segment} .* segments 2 to 3"):
            Journal.open(tmp_path, holding=gone)
    assert segment_file(tmp_path, 3).read_bytes() == before
    with Journal.open(tmp_path, holding=refs[1]) as journal:
        assert journal.torn is not None


def test_who_only_reads_changes_nothing_and_sees_what_is_whole(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        JournalReader.open(tmp_path)
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        refs = [journal.append(index, b"m" * 30, [b"p" * 30]) for index in range(3)]
    os.truncate(segment_file(tmp_path, 3), refs[2].offset + refs[2].length - 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with JournalReader.open(tmp_path) as reader:
        assert [ref for ref, _ in reader.records(verify_payload=True)] == refs[:2]
        assert reader.read(refs[1]).payload == b"p" * 30
        assert reader.reaches(refs[1])
        assert not reader.reaches(refs[2])
        with pytest.raises(JournalError, match="no record of 100 bytes fits"):
            reader.read(refs[2])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_place_that_the_disk_does_not_give_back_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(descriptor: int, *_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal.open(tmp_path) as journal:
        ref = journal.append(1, b"x")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", bad)
            with pytest.raises(JournalError, match=f"segment 1 at offset {ref.offset}: the disk doesn't give it back"):
                journal.read(ref)
        assert journal.read(ref).meta == b"x"


def test_a_segment_whose_file_is_gone_is_damage_and_is_dropped_like_any_other(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        refs = [journal.append(index, b"m" * 60) for index in range(4)]
        segment_file(tmp_path, 2).unlink()
        with pytest.raises(JournalError, match=f"segment 2 at offset {refs[1].offset}: its file is gone"):
            journal.read(refs[1])
        assert journal.read(refs[0]).meta == journal.read(refs[2]).meta
        assert journal.drop_segments_before(4) == [1, 2, 3]
        assert journal.read(refs[3]).kind == 3


def test_what_a_disk_left_behind_the_last_record_is_no_part_of_a_sealed_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(tmp_path, segment_bytes=150) as journal:
        refs = [journal.append(1, b"m" * 60)]
        # A record that the disk didn't take, and a cut that it didn't take either.
        with segment_file(tmp_path).open("ab") as file:
            file.write(b"half a record")
        refs.append(journal.append(2, b"m" * 60))
    with Journal.open(tmp_path) as journal:
        assert [ref for ref, _ in journal.records(verify_payload=True)] == refs


def test_pages_that_a_power_cut_lost_before_a_sync_are_a_torn_tail(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(1, b"promised")
        journal.sync()
        lost = journal.append(2, b"lost", [b"p" * 50])
        journal.append(3, b"reached the disk, though nobody was told")
    path = segment_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[lost.offset : lost.offset + lost.length] = bytes(lost.length)
    path.write_bytes(data)
    with Journal.open(tmp_path) as journal:
        assert journal.torn is not None
        assert [head.kind for _, head in journal.records()] == [1]


def test_damage_in_an_earlier_segment_is_found_when_it_is_read(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        refs = [journal.append(index, b"m" * 30, [b"p" * 30]) for index in range(3)]
    flip(segment_file(tmp_path, 1), refs[0].offset + refs[0].length - 1)
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        assert len(list(journal.records())) == 3
        with pytest.raises(JournalError, match=r"segment 1 at offset 20: the payload"):
            list(journal.records(verify_payload=True))
        with pytest.raises(JournalError, match=r"segment 1 at offset 20: the payload"):
            journal.read(refs[0])
        assert journal.read(refs[1]).payload == b"p" * 30
        os.truncate(segment_file(tmp_path, 2), refs[1].length)
        with pytest.raises(JournalError, match=r"segment 2 at offset 20: .*cut off"):
            list(journal.records())


def test_what_lies_before_a_missing_segment_leads_nowhere_and_goes_with_the_next_drop(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        refs = [journal.append(index, b"m" * 60) for index in range(5)]
    segment_file(tmp_path, 3).unlink()
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        assert journal.segments == (4, 5)
        assert journal.stray == (1, 2)
        assert [ref for ref, _ in journal.records()] == refs[3:]
        assert journal.drop_segments_before(2) == [1]
        assert journal.drop_segments_before(5) == [2, 4]
        assert journal.stray == ()
    assert [path.name for path in tmp_path.iterdir()] == ["0000000005.journal"]


def test_a_segment_under_a_wrong_name_is_an_error(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(1, b"x")
    segment_file(tmp_path, 1).rename(segment_file(tmp_path, 2))
    with pytest.raises(JournalError, match="the file holds segment 1"):
        Journal.open(tmp_path)


def test_a_segment_whose_header_was_cut_off_is_begun_again(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        first = journal.append(1, b"m" * 60)
        journal.append(2, b"m" * 60)
    os.truncate(segment_file(tmp_path, 2), 7)
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        assert journal.torn is not None
        assert journal.torn.dropped_bytes == 7
        second = journal.append(3, b"new")
        assert [ref for ref, _ in journal.records()] == [first, second]


def test_a_record_inside_a_payload_is_no_record(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "inner") as journal:
        for index in range(3):
            journal.append(index, b"inner")
            journal.sync()
    inner = segment_file(tmp_path / "inner").read_bytes()
    with Journal.open(tmp_path / "outer") as journal:
        torn = journal.append(9, b"", [inner])
    os.truncate(segment_file(tmp_path / "outer"), torn.offset + torn.length - 1)
    with Journal.open(tmp_path / "outer") as journal:
        assert journal.torn is not None
        assert list(journal.records()) == []
