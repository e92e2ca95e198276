"""A journal as those see it who only read: nothing is cut, begun or removed.

Who writes is a reader too (`journal.Journal`); who reads alone must know that nobody writes meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from typing import TYPE_CHECKING, Final, Self

from wan_diloco.errors import JournalError, StorageError
from wan_diloco.storage.filesystem import translated
from wan_diloco.storage.journal_format import SEGMENT_HEADER_BYTES
from wan_diloco.storage.journal_reading import (
    Damage,
    JournalRef,
    Record,
    RecordHead,
    damage,
    find_tail,
    header_damage,
    read_payload_into,
    read_record,
    survey,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

__all__ = ["JournalReader", "find_segments", "foreign_files", "segment_name", "unbroken"]

# Errors that say that what was there is no more, and what a person is told.
_LOST: Final = {errno.EIO: "the disk doesn't give it back any more", errno.ENOENT: "its file is gone"}
_NAME: Final = re.compile(r"([0-9]{10,})\.journal")
_SEGMENT_MAX: Final = 2**64 - 1  # its header has no room for more


def find_segments(folder: Path) -> list[int]:
    """Numbers of the segments that are in a folder, in order; of other files there is none (see `foreign_files`).

    Raises:
        StorageError: It can't be listed.
    """
    with translated("can't read the journal in", folder):
        return sorted(number for path in folder.iterdir() if (number := _segment_of(path.name)) is not None)


def foreign_files(folder: Path) -> list[str]:
    """Names in a journal's folder that end as a segment's does, and are none that a journal gives.

    Raises:
        StorageError: It can't be listed.
    """
    with translated("can't read the journal in", folder):
        return sorted(path.name for path in folder.glob("*.journal") if _segment_of(path.name) is None)


def _segment_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    number = int(match[1]) if match else 0
    return number if 1 <= number <= _SEGMENT_MAX and name == segment_name(number) else None


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"{number:010d}.journal"


def unbroken(found: Sequence[int]) -> Sequence[int]:
    """The newest segments among which none is missing: what lies before a hole leads nowhere."""
    first = len(found) - 1
    while first > 0 and found[first - 1] == found[first] - 1:
        first -= 1
    return found[max(first, 0) :]


class JournalReader:
    """A folder of segments; made by `JournalReader.open`.

    Thread: any.

    Attributes:
        stray: Segments before a hole in their numbers, which are as good as lost.
        left_out: Why what follows the last whole record isn't there for a reader; empty where nothing follows it.
    """

    def __init__(self, folder: Path, found: Sequence[int]) -> None:
        """Not for callers: use `open`."""
        self._folder = folder
        self._lock = threading.Lock()  # owns everything below
        # Replaced, never changed: who only wants to know them doesn't wait for the disk.
        self._segments = tuple(unbroken(found))
        self.stray = tuple(found[: len(found) - len(self._segments)])
        self.left_out = ""
        self._descriptor = -1
        self._tail = 0
        # The sealed segment that was read last: its number, descriptor and length.
        self._sealed: tuple[int, int, int] | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Look at the journal in a folder; what follows the last whole record isn't there for a reader.

        Raises:
            JournalError: There is none.
            StorageError: The system refused.
        """
        reader = cls(folder, find_segments(folder))
        if not reader.segments:
            raise JournalError(f"there is no journal in {folder}")
        path = reader._path(reader.segments[-1])
        with translated("can't read", path), path.open("rb") as file:
            tail = find_tail(file, reader.segments[-1], path.stat().st_size)
            reader._tail, reader.left_out = tail.end, tail.problem
        return reader

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of the segments that are there, the one that grows last.

        Thread: any, the event loop's too: the lock is held while the disk is written to.
        """
        return self._segments

    @property
    def size_bytes(self) -> int:
        """What all segments take on the disk.

        Raises:
            StorageError: A segment can't be looked at.
        """
        with self._lock, translated("can't look at the journal in", self._folder):
            return sum(self._end_of(segment) for segment in self._segments)

    def reaches(self, ref: JournalRef) -> bool:
        """Whether the journal begins before a place and goes on at least to its end."""
        with self._lock:
            last, tail = self._segments[-1], self._tail
        return self._segments[0] <= ref.segment and (ref.segment, ref.offset + ref.length) <= (last, tail)

    def read(self, ref: JournalRef) -> Record:
        """The record at a place, payload included, checked by its checksums.

        Raises:
            JournalError: No such record is there, or it is damaged.
            StorageError: The system refused.
        """
        with self._opened(ref) as (descriptor, end):
            return read_record(descriptor, ref, end)

    def read_payload_into(self, ref: JournalRef, out: memoryview) -> int:
        """Read a payload into memory that is there, checked by its checksum.

        Args:
            ref: Of a record without a meta part.
            out: As long as the payload.

        Returns:
            The record's kind.

        Raises:
            JournalError: No such record is there, or it is damaged.
            StorageError: The system refused.
        """
        with self._opened(ref) as (descriptor, end):
            return read_payload_into(descriptor, ref, end, out)

    def records(self, *, verify_payload: bool = False) -> Iterator[tuple[JournalRef, RecordHead]]:
        """Every record there is at the time of the call, in order, payloads left on the disk.

        Args:
            verify_payload: Read the payloads as well, only to check them.

        Raises:
            JournalError: A segment is damaged, or was dropped meanwhile.
            StorageError: The system refused.
        """
        items = self.survey(verify_payload=verify_payload)

        def records() -> Iterator[tuple[JournalRef, RecordHead]]:
            for item in items:
                if isinstance(item, Damage):
                    raise item.error()
                yield item

        return records()

    def survey(
        self, *, after: JournalRef | None = None, verify_payload: bool = False
    ) -> Iterator[tuple[JournalRef, RecordHead] | Damage]:
        """Like `records`; what is damaged is told and passed over.

        Args:
            after: A place that is there: only what lies behind it.
            verify_payload: Read the payloads as well, only to check them.

        Raises:
            StorageError: The system refused.
        """
        first = (0, 0) if after is None else (after.segment, after.offset + after.length)
        with self._lock, translated("can't read the journal in", self._folder):
            ends = [(segment, self._end_of(segment)) for segment in self._segments if segment >= first[0]]
        return self._survey(ends, first, verify_payload=verify_payload)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._forget_sealed()

    def __enter__(self) -> Self:
        """The journal itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _path(self, segment: int) -> Path:
        return self._folder / segment_name(segment)

    @contextlib.contextmanager
    def _opened(self, ref: JournalRef) -> Iterator[tuple[int, int]]:
        """The file of a place's segment, and where its last record ends; no lock is held while it is read.

        Chunks are small on slow links, and to open a file by its name takes longer than to read one: what is lent is a
        duplicate, that stays good when the journal closes its own.
        """
        path = self._path(ref.segment)
        try:
            with self._lock, translated("can't read", path):
                if ref.segment not in self._segments:
                    raise JournalError(f"the journal in {self._folder} has no segment {ref.segment}")
                own, end = self._to_read(ref.segment)
                descriptor = os.dup(own)
            try:
                with translated("can't read", path):
                    yield descriptor, end
            finally:
                os.close(descriptor)
        except StorageError as exc:
            if isinstance(exc.__cause__, OSError) and (lost := _LOST.get(exc.__cause__.errno or 0)):
                raise damage(ref.segment, ref.offset, lost) from exc
            raise

    def _to_read(self, segment: int) -> tuple[int, int]:
        """A segment's descriptor, and where its last record ends."""
        if segment == self._segments[-1] and self._descriptor >= 0:
            return self._descriptor, self._tail
        if self._sealed is None or self._sealed[0] != segment:
            path = self._path(segment)
            end = self._end_of(segment)
            descriptor = os.open(path, os.O_RDONLY)
            self._forget_sealed()
            self._sealed = (segment, descriptor, end)
        _, descriptor, end = self._sealed
        return descriptor, end

    def _forget_sealed(self) -> None:
        if self._sealed is not None:
            os.close(self._sealed[1])
        self._sealed = None

    def _end_of(self, segment: int) -> int:
        # A sealed segment ends where its file does, the growing one before a record that is being written.
        return self._tail if segment == self._segments[-1] else self._path(segment).stat().st_size

    def _survey(
        self, ends: list[tuple[int, int]], first: tuple[int, int], *, verify_payload: bool
    ) -> Iterator[tuple[JournalRef, RecordHead] | Damage]:
        for segment, end in ends:
            path = self._path(segment)
            with translated("can't read", path), path.open("rb") as file:
                start = SEGMENT_HEADER_BYTES
                if segment == first[0]:
                    start = first[1]
                elif (problem := header_damage(file, segment)) is not None:
                    yield problem
                yield from survey(file, segment, start, end, verify_payload=verify_payload)
