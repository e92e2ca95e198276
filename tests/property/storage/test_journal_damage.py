"""Whatever happens to a journal's bytes: a prefix of what went in comes back, or an error that names a place."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from wan_diloco.errors import JournalError
from wan_diloco.storage import Damage, Journal, Record

records = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=20), st.binary(max_size=40), st.booleans()), max_size=8
)
law = settings(max_examples=60, deadline=None)


@dataclass
class Written:
    """The bytes of a journal's segments, and what was put into each."""

    files: dict[str, bytes]
    records: list[Record]


def write(folder: Path, items: list[tuple[int, bytes, bytes, bool]], segment_bytes: int) -> Written:
    written = []
    with Journal.open(folder, segment_bytes) as journal:
        for kind, meta, payload, sync in items:
            journal.append(kind, meta, [payload[:7], payload[7:]])
            written.append(Record(kind=kind, meta=meta, payload=payload))
            if sync:
                journal.sync()
    return Written({path.name: path.read_bytes() for path in sorted(folder.iterdir())}, written)


def reopened(files: dict[str, bytes], segment_bytes: int) -> tuple[list[Record], bool]:
    """What a journal of these files gives, and whether it says that something was torn.

    Raises:
        JournalError: Something else is damaged; what is left is there all the same.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        with Journal.open(folder, segment_bytes) as journal:
            damaged = [item for item in journal.survey(verify_payload=True) if isinstance(item, Damage)]
            whole = [item for item in journal.survey(verify_payload=True) if not isinstance(item, Damage)]
            found = [journal.read(ref) for ref, _ in whole]
            torn = journal.torn is not None
            if damaged or journal.damaged:
                # Only first bytes are mended by opening.
                assert set(damaged) >= {item for item in journal.damaged if item.start}
                raise [*journal.damaged, *damaged][0].error()
            extra = Record(kind=7, meta=b"after", payload=b"all")
            ref = journal.append(extra.kind, extra.meta, [extra.payload])
            journal.sync()
            assert journal.read(ref) == extra
        with Journal.open(folder, segment_bytes) as journal:
            assert journal.torn is None
            assert [journal.read(ref) for ref, _ in journal.records()] == [*found, extra]
        return found, torn


def outcome(files: dict[str, bytes], segment_bytes: int) -> tuple[list[Record], bool] | str:
    """Like `reopened`; the sentence where the journal refuses."""
    try:
        return reopened(files, segment_bytes)
    except JournalError as error:
        return str(error)


def written_in_temporary_folder(items: list[tuple[int, bytes, bytes, bool]], segment_bytes: int) -> Written:
    with tempfile.TemporaryDirectory() as name:
        return write(Path(name), items, segment_bytes)


@law
@given(items=records, segment_bytes=st.integers(1, 400))
def test_everything_comes_back_whatever_the_segments_size(
    items: list[tuple[int, bytes, bytes, bool]], segment_bytes: int
) -> None:
    written = written_in_temporary_folder(items, segment_bytes)
    assert reopened(written.files, segment_bytes) == (written.records, False)


@law
@given(items=records, data=st.data(), segment_bytes=st.sampled_from([150, 10**6]))
def test_cutting_the_last_segment_anywhere_leaves_a_prefix(
    items: list[tuple[int, bytes, bytes, bool]], data: st.DataObject, segment_bytes: int
) -> None:
    written = written_in_temporary_folder(items, segment_bytes)
    last = max(written.files)
    cut = data.draw(st.integers(0, len(written.files[last])))
    found, torn = reopened({**written.files, last: written.files[last][:cut]}, segment_bytes)
    assert found == written.records[: len(found)]
    if len(found) < len(written.records):
        assert torn or cut_at_a_border(written, last, cut)


def cut_at_a_border(written: Written, last: str, cut: int) -> bool:
    """Whether a cut falls between two records, so that nothing shows what is missing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in written.files.items():
            (folder / file).write_bytes(data)
        with Journal.open(folder) as journal:
            starts = {ref.offset for ref, _ in journal.records() if ref.segment == int(last.removesuffix(".journal"))}
    return cut in starts


@law
@given(items=records.filter(bool), data=st.data(), segment_bytes=st.sampled_from([150, 10**6]))
def test_a_flipped_byte_is_an_error_or_a_reported_tail(
    items: list[tuple[int, bytes, bytes, bool]], data: st.DataObject, segment_bytes: int
) -> None:
    written = written_in_temporary_folder(items, segment_bytes)
    file = data.draw(st.sampled_from(sorted(written.files)))
    damaged = bytearray(written.files[file])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    match outcome({**written.files, file: bytes(damaged)}, segment_bytes):
        case str(sentence):
            assert f"segment {int(file.removesuffix('.journal'))} at offset " in sentence
        case found, torn:
            assert torn
            assert file == max(written.files)
            assert found == written.records[: len(found)]


@law
@given(
    items=records, garbage=st.binary(min_size=1, max_size=200), where=st.sampled_from(["before", "after", "instead"])
)
def test_garbage_is_an_error_or_a_reported_tail(
    items: list[tuple[int, bytes, bytes, bool]], garbage: bytes, where: str
) -> None:
    written = written_in_temporary_folder(items, 10**6)
    (file, data) = next(iter(written.files.items()))
    mixed = {"before": garbage + data, "after": data + garbage, "instead": garbage}[where]
    match outcome({file: mixed}, 10**6):
        case str(sentence):
            assert where != "after"
            assert "segment 1 at offset 0" in sentence
        case found, torn:
            assert torn
            assert found == (written.records if where == "after" else [])


def test_every_cut_and_every_flip_of_one_small_journal() -> None:
    items = [(1, b"a", b"payload", True), (2, b"", b"", False), (3, b"meta", b"xyz", True)]
    written = written_in_temporary_folder(items, 10**6)
    ((file, data),) = written.files.items()
    for cut in range(len(data)):
        found, _ = reopened({file: data[:cut]}, 10**6)
        assert found == written.records[: len(found)]
        assert len(found) < 3
    damaged_promises = 0
    for offset in range(len(data)):
        damaged = bytearray(data)
        damaged[offset] ^= 1
        match outcome({file: bytes(damaged)}, 10**6):
            case str():
                damaged_promises += 1
            case found, torn:
                assert torn
                assert found == written.records[: len(found)]
                assert len(found) < 3
    # The first record was synced before the second was written, and the segment's header before all: 20 + 48 bytes.
    assert damaged_promises == 20 + 40 + 1 + 7
