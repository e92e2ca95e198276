"""The journal's promises, one by one; laws over arbitrary damage are in tests/property/storage."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.damage import flip, segment_file
from wan_diloco.errors import ConfigError, JournalError, StateDamaged, StorageError, StorageUnusable
from wan_diloco.storage import Journal, JournalRef, Record, RecordHead
from wan_diloco.storage.filesystem import write_all
from wan_diloco.storage.journal_format import META_BYTES_MAX
from wan_diloco.storage.journal_reader import foreign_files


def test_records_come_back_in_order_after_reopening(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        first = journal.append(1, b"meta", [b"pay", bytearray(b"lo"), memoryview(b"ad")])
        second = journal.append(2, b"")
        journal.sync()
    with Journal.open(tmp_path) as journal:
        assert journal.torn is None
        assert list(journal.records()) == [
            (first, RecordHead(kind=1, meta=b"meta", payload_bytes=7)),
            (second, RecordHead(kind=2, meta=b"", payload_bytes=0)),
        ]
        assert journal.read(first) == Record(kind=1, meta=b"meta", payload=b"payload")
        third = journal.append(3, b"more")
        assert first < second < third


def test_a_record_can_be_read_before_it_is_synced_and_by_other_threads(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=500) as journal:
        refs: list[JournalRef] = []
        problems: list[str] = []
        done = threading.Event()

        def reader() -> None:
            while not done.is_set():
                for index, ref in enumerate(list(refs)):
                    if journal.read(ref).meta != str(index).encode():
                        problems.append(f"record {index} is wrong")
                kinds = [head.kind for _, head in journal.records()]
                if kinds != list(range(len(kinds))):
                    problems.append(f"records out of order: {kinds}")

        thread = threading.Thread(target=reader)
        thread.start()
        for index in range(60):
            ref = journal.append(index, str(index).encode(), [b"x" * index])
            refs.append(ref)  # one by one: the reader sees it grow
        done.set()
        thread.join()
        assert problems == []
        assert [head.kind for _, head in journal.records()] == list(range(60))


def test_segments_rotate_and_a_large_record_gets_its_own(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=200) as journal:
        small = journal.append(1, b"s" * 50)
        large = journal.append(2, b"", [b"L" * 1000])
        after = journal.append(3, b"s" * 50)
        assert [ref.segment for ref in (small, large, after)] == [1, 2, 3]
        assert journal.segments == (1, 2, 3)
        assert journal.size_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
        assert journal.read(large).payload == b"L" * 1000


def test_dropping_old_segments_keeps_the_growing_one(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        refs = [journal.append(index, b"m" * 60) for index in range(4)]
        assert journal.drop_segments_before(3) == [1, 2]
        with pytest.raises(JournalError, match="has no segment 1"):
            journal.read(refs[0])
        assert [ref for ref, _ in journal.records()] == refs[2:]
        assert journal.drop_segments_before(99) == [3]
        assert journal.segments == (4,)
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        assert [ref for ref, _ in journal.records()] == refs[3:]


def test_reading_leaves_no_file_open_and_finds_what_goes_and_comes(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=100) as journal:
        refs = [journal.append(index, b"", [bytes([index]) * 60]) for index in range(4)]
        out = memoryview(bytearray(60))

        def read_all(which: list[JournalRef]) -> int:
            for ref in which:
                assert journal.read_payload_into(ref, out) == out[0]
            return len(list(Path("/proc/self/fd").iterdir()))

        open_files = read_all(refs)
        assert read_all(refs[::-1] * 5) == open_files
        journal.drop_segments_before(refs[2].segment)
        for gone in refs[:2]:
            with pytest.raises(JournalError, match="has no segment"):
                journal.read(gone)
        read_all(refs[2:])
        # What grows: the segment that was the last is sealed meanwhile.
        refs.append(journal.append(9, b"", [bytes([9]) * 60]))
        assert read_all(refs[2:]) == open_files
    assert len(list(Path("/proc/self/fd").iterdir())) < open_files


def test_threads_append_side_by_side_while_others_flush(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=2000) as journal:
        refs: list[list[JournalRef]] = [[] for _ in range(4)]

        def writer(number: int) -> None:
            for index in range(60):
                refs[number].append(journal.append(number, b"", [bytes([index]) * (50 * number + 1)]))
                if index % 10 == number:
                    journal.sync()

        threads = [threading.Thread(target=writer, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        journal.sync()
        assert all(own == sorted(own) for own in refs)
    with Journal.open(tmp_path) as journal:
        assert journal.torn is None
        assert sorted(ref for ref, _ in journal.records(verify_payload=True)) == sorted(
            ref for own in refs for ref in own
        )
        for number, own in enumerate(refs):
            for index, ref in enumerate(own):
                expected = Record(kind=number, meta=b"", payload=bytes([index]) * (50 * number + 1))
                assert journal.read(ref) == expected


def test_a_flush_holds_up_no_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushing, goes_on = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def slow(descriptor: int) -> None:
        flushing.set()
        assert goes_on.wait(10)
        fdatasync(descriptor)

    with Journal.open(tmp_path) as journal:
        journal.append(1, b"before")
        monkeypatch.setattr(os, "fdatasync", slow)
        flusher = threading.Thread(target=journal.sync)
        flusher.start()
        assert flushing.wait(10)
        # Would hang here.
        journal.append(2, b"during")
        goes_on.set()
        flusher.join()
        # What came during the flush isn't covered by it: the next one says so in its header, and works.
        journal.sync()
    with Journal.open(tmp_path) as journal:
        assert [head.meta for _, head in journal.records()] == [b"before", b"during"]


def test_who_asks_for_the_segments_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, goes_on = threading.Event(), threading.Event()

    def stuck(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        writing.set()
        assert goes_on.wait(10)
        return write_all(descriptor, buffers, offset)

    with Journal.open(tmp_path) as journal:
        monkeypatch.setattr("wan_diloco.storage.journal.write_all", stuck)
        writer = threading.Thread(target=journal.append, args=(1, b"held up"))
        writer.start()
        assert writing.wait(10)
        # The event loop asks; it would hang here.
        assert journal.segments == (1,)
        goes_on.set()
        writer.join()


def test_a_payload_is_read_into_memory_that_is_there(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        ref = journal.append(5, b"", [b"pay", b"load"])
        with_meta = journal.append(5, b"meta", [b"payload"])
        out = bytearray(7)
        assert journal.read_payload_into(ref, memoryview(out)) == 5
        assert out == b"payload"
        for place, length in ((ref, 6), (ref, 8), (with_meta, 7)):
            with pytest.raises(JournalError, match="another payload"):
                journal.read_payload_into(place, memoryview(bytearray(length)))
        flip(segment_file(tmp_path), ref.offset + ref.length - 1)
        with pytest.raises(JournalError, match="doesn't match its checksum"):
            journal.read_payload_into(ref, memoryview(out))


def test_a_full_disk_adds_nothing_and_the_journal_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev

    def fills_up(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == before.offset + before.length:
            return pwritev(descriptor, [buffers[0][:11]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal.open(tmp_path) as journal:
        before = journal.append(1, b"before")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fills_up)
            with pytest.raises(
                StorageError, match=r"can't append to .*: the disk or the quota is full; free some space"
            ):
                journal.append(2, b"too much", [b"p" * 100])
        assert segment_file(tmp_path).stat().st_size == before.offset + before.length
        after = journal.append(3, b"after")
        journal.sync()
        assert [ref for ref, _ in journal.records()] == [before, after]
    with Journal.open(tmp_path) as journal:
        assert journal.torn is None
        assert journal.read(after).meta == b"after"


def test_a_disk_too_full_for_a_new_segment_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal.open(tmp_path, segment_bytes=100) as journal:
        journal.append(1, b"m" * 60)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            with pytest.raises(StorageError, match="can't begin a new segment"):
                journal.append(2, b"m" * 60)
        assert journal.segments == (1,)
        assert [path.name for path in tmp_path.iterdir()] == ["0000000001.journal"]
        assert journal.append(3, b"m" * 60).segment == 2


def test_after_a_failed_flush_nothing_more_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal.open(tmp_path) as journal:
        ref = journal.append(1, b"x")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            with pytest.raises(StorageError, match="must be opened anew"):
                journal.sync()
        with pytest.raises(StorageError, match="must be opened anew"):
            journal.sync()
        with pytest.raises(StorageError, match="must be opened anew"):
            journal.append(2, b"y")
        assert journal.read(ref).meta == b"x"


def test_refs_that_name_no_record_are_refused(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        ref = journal.append(1, b"meta", [b"payload"])
        for wrong in (
            JournalRef(1, ref.offset + 1, ref.length - 1),
            JournalRef(1, ref.offset, ref.length - 1),
            JournalRef(1, ref.offset, 2**60),
            JournalRef(1, 0, ref.length),
            JournalRef(2, ref.offset, ref.length),
        ):
            with pytest.raises(JournalError):
                journal.read(wrong)


def test_what_does_not_fit_into_a_record_is_refused_before_writing(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        for kind, meta in ((-1, b""), (2**32, b""), (0, bytes(META_BYTES_MAX + 1))):
            with pytest.raises(ValueError, match="doesn't fit"):
                journal.append(kind, meta)
        assert list(journal.records()) == []


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.close()
    journal.close()
    with pytest.raises(StorageError, match="is closed"):
        journal.append(1, b"")


def test_other_files_are_left_alone_and_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "owner.lock").write_bytes(b"x")
    (tmp_path / "1.journal").write_bytes(b"not ours")
    with Journal.open(tmp_path) as journal:
        assert journal.segments == (1,)
    assert (tmp_path / "1.journal").read_bytes() == b"not ours"
    with pytest.raises(ConfigError):
        Journal.open(tmp_path / "owner.lock")


def test_what_is_sealed_grows_no_more_and_an_empty_segment_only_when_asked(tmp_path):
    with Journal.open(tmp_path) as journal:
        journal.seal()
        assert journal.segments == (1,)
        first = journal.append(1, b"one")
        journal.seal()
        journal.seal()
        assert journal.segments == (1, 2)
        before = (tmp_path / "0000000001.journal").read_bytes()
        second = journal.append(1, b"two")
        journal.seal()
        journal.seal(even_empty=True)
        assert journal.segments == (1, 2, 3, 4)
        assert (tmp_path / "0000000001.journal").read_bytes() == before
    with Journal.open(tmp_path) as again:
        assert [ref for ref, _ in again.records()] == [first, second]
        assert again.append(1, b"three").segment == 4


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _dangling(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize(
    ("make", "words"),
    [(_folder, "it is a folder"), (_loop, "a symbolic link that can't be followed"), (_dangling, "leads nowhere")],
)
def test_a_segment_that_is_no_file_is_no_passing_trouble(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    make(segment_file(tmp_path))
    with pytest.raises(StorageUnusable if make is not _dangling else JournalError, match=words):
        Journal.open(tmp_path)


@pytest.mark.parametrize("name", ["99999999999999999999.journal", "00000000001.journal", "0000000000.journal"])
def test_what_can_not_be_a_segment_is_ignored_and_told(tmp_path: Path, name: str) -> None:
    with Journal.open(tmp_path) as journal:
        ref = journal.append(1, b"kept")
    (tmp_path / name).write_bytes(b"x")
    assert foreign_files(tmp_path) == [name]
    with Journal.open(tmp_path, holding=ref) as journal:
        assert journal.segments == (1,)
        assert journal.read(ref).meta == b"kept"


def test_a_refusal_names_the_segments_before_a_hole_too(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        ref = journal.append(1, b"kept")
    segment_file(tmp_path, 7).touch()
    with pytest.raises(JournalError, match=r"it has segments 7 to 7, .*; 1 before them lead nowhere"):
        Journal.open(tmp_path, holding=ref)


def test_what_is_flushed_into_a_file_that_was_removed_is_never_durable(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(1, b"")
        segment_file(tmp_path).unlink()
        for attempt in (journal.sync, journal.sync, journal.seal, lambda: journal.append(1, b"")):
            with pytest.raises(StateDamaged, match="was removed or replaced while it was written"):
                attempt()


def test_who_looks_sees_that_the_growing_segment_was_replaced(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(1, b"")
        journal.seal()
        journal.require_there()
        data = segment_file(tmp_path, 2).read_bytes()
        segment_file(tmp_path, 2).rename(tmp_path / "moved")
        segment_file(tmp_path, 2).write_bytes(data)
        with pytest.raises(StateDamaged, match=r"0000000002\.journal was removed or replaced"):
            journal.require_there()


def test_what_is_flushed_into_a_file_that_was_moved_is_never_durable(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal") as journal:
        journal.append(1, b"")
        (tmp_path / "journal").rename(tmp_path / "elsewhere")
        with pytest.raises(StateDamaged, match="was removed or replaced while it was written"):
            journal.sync()


def test_no_segment_is_begun_in_a_folder_that_was_put_in_the_place_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with Journal.open(folder) as journal:
        journal.append(1, b"")
        journal.sync()
        folder.rename(tmp_path / "elsewhere")
        shutil.copytree(tmp_path / "elsewhere", folder)
        with pytest.raises(StateDamaged, match="was removed or replaced while it was written"):
            journal.seal()
        assert not segment_file(folder, 2).exists()
