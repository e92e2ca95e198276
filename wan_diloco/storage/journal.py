"""An append-only journal in segments: what is in it after `sync` is there after any crash.

The journal doesn't know what its records mean, takes no lock on its folder (`FolderLock` does), and
never repairs anything but the torn tail of its last segment.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from wan_diloco.errors import JournalError, StorageError
from wan_diloco.storage.filesystem import ensure_folder, fsync_folder, translated, write_all
from wan_diloco.storage.journal_format import (
    META_BYTES_MAX,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Buffer,
    RecordHeader,
    checksum,
    encode_segment_header,
)
from wan_diloco.storage.journal_reading import (
    JournalRef,
    Record,
    RecordHead,
    check_segment_header,
    find_tail,
    read_payload_into,
    read_record,
    scan,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

__all__ = ["SEGMENT_BYTES", "Journal", "JournalRef", "Record", "RecordHead", "TornTail"]

SEGMENT_BYTES: Final = 64 * 2**20

_NAME: Final = re.compile(r"([0-9]{10,})\.journal")
_KIND_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TornTail:
    """What `Journal.open` cut off, for the operator.

    Attributes:
        segment: The last segment.
        offset: Where it ends now.
        dropped_bytes: How much was cut.
        problem: What was wrong with it.
    """

    segment: int
    offset: int
    dropped_bytes: int
    problem: str


class Journal:
    """A folder of segments; made by `Journal.open`.

    Thread: any. Records lie in the order in which `append` took them; a flush holds up nobody's `append`.
    """

    def __init__(self, folder: Path, segments: Sequence[int], segment_bytes: int) -> None:
        """Not for callers: use `open`."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        # One flush at a time, so that none succeeds behind the back of one that fails. Taken before the other lock.
        self._flushing = threading.Lock()
        self._lock = threading.Lock()  # owns everything below
        # Replaced, never changed: who only wants to know them doesn't wait for the disk.
        self._segments = tuple(segments)
        self._descriptor = -1
        self._tail = 0
        self._durable = 0
        self._failure = ""
        # The sealed segment that was read last: its number, descriptor and length.
        self._sealed: tuple[int, int, int] | None = None
        self.torn: TornTail | None = None

    @classmethod
    def open(cls, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """Open the journal in a folder, or begin one where there is none.

        The last segment is read and checked whole, a torn tail is cut off and stands in `torn`.
        Earlier segments are checked when they are read.

        Args:
            folder: Created where missing; other files in it are left alone.
            segment_bytes: A new segment begins where a record would pass this size.

        Raises:
            ConfigError: The folder can't be created or written.
            JournalError: A segment is missing, or the last one is damaged before its tail.
            StorageError: The system refused to read or write.
        """
        ensure_folder(folder)
        with translated("can't read the journal in", folder):
            found = sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
        for before, after in itertools.pairwise(found):
            if after != before + 1:
                raise JournalError(f"the journal in {folder} has segments {before} and {after}, but none between")
        journal = cls(folder, found, segment_bytes)
        if found:
            journal._open_last()
        else:
            with translated("can't begin a journal in", folder):
                journal._begin_segment(1)
        return journal

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

    def append(self, kind: int, meta: bytes, payload: Sequence[Buffer] = ()) -> JournalRef:
        """Add one record; it is durable once `sync` has returned.

        Args:
            kind: 0 to 2^32 - 1, the caller's meaning.
            meta: At most 16 MiB; `records` gives it back.
            payload: Contiguous buffers, written one after the other without being joined.

        Returns:
            Where the record lies.

        Raises:
            StorageError: The disk is full or the system refused. Nothing was added, and the journal goes on
                working, unless the sentence says that it must be opened anew.
            ValueError: The kind or the meta part is out of range.
        """
        if not 0 <= kind <= _KIND_MAX or len(meta) > META_BYTES_MAX:
            raise ValueError(f"kind {kind} with {len(meta)} bytes of meta doesn't fit into a record")
        views = [memoryview(buffer).cast("B") for buffer in payload if memoryview(buffer).nbytes]
        payload_bytes = sum(view.nbytes for view in views)
        meta_sum, payload_sum = checksum((meta,)), checksum(views)
        record_bytes = RECORD_HEADER_BYTES + len(meta) + payload_bytes
        while True:
            with self._lock:
                self._check_usable()
                segment = self._segments[-1]
                if self._tail == SEGMENT_HEADER_BYTES or self._tail + record_bytes <= self._segment_bytes:
                    header = RecordHeader(
                        kind=kind,
                        meta_bytes=len(meta),
                        payload_bytes=payload_bytes,
                        durable_offset=self._durable,
                        meta_sum=meta_sum,
                        payload_sum=payload_sum,
                    )
                    return self._write(header.encode(segment, self._tail), meta, views)
            self._seal(segment)

    def sync(self) -> None:
        """Make everything appended so far durable.

        Raises:
            StorageError: The system can't say that it is. What it then holds is unknown, so the journal refuses
                all further work and must be opened anew.
        """
        with self._flushing:
            self._flush()

    def read(self, ref: JournalRef) -> Record:
        """The record at a place, payload included, checked by its checksums.

        Raises:
            JournalError: No such record is there, or it is damaged.
            StorageError: The system refused.
        """
        with self._opened(ref.segment) as (descriptor, end):
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
        with self._opened(ref.segment) as (descriptor, end):
            return read_payload_into(descriptor, ref, end, out)

    def records(self, *, verify_payload: bool = False) -> Iterator[tuple[JournalRef, RecordHead]]:
        """Every record there is at the time of the call, in order, payloads left on the disk.

        Args:
            verify_payload: Read the payloads as well, only to check them.

        Raises:
            JournalError: A segment is damaged, or was dropped meanwhile.
            StorageError: The system refused.
        """
        with self._lock, translated("can't read the journal in", self._folder):
            ends = [(segment, self._end_of(segment)) for segment in self._segments]
        return self._records(ends, verify_payload=verify_payload)

    def drop_segments_before(self, segment: int) -> list[int]:
        """Remove the segments below a number; the one that grows always stays.

        Thread: one at a time.

        Ordering: only when nothing needs their records any more, that is, after a snapshot is durable.

        Returns:
            The numbers that were removed.

        Raises:
            StorageError: The system refused; what is left is still one unbroken run.
        """
        dropped: list[int] = []
        while True:
            with self._lock:
                oldest = self._segments[0]
                if len(self._segments) == 1 or oldest >= segment:
                    return dropped
            with translated("can't remove old segments in", self._folder):
                self._path(oldest).unlink()
                # One at a time, so that a power cut never leaves a hole in the middle.
                fsync_folder(self._folder)
            with self._lock:
                self._segments = self._segments[1:]
                if self._sealed is not None and self._sealed[0] == oldest:
                    self._forget_sealed()
            dropped.append(oldest)

    def close(self) -> None:
        """Close the file; what wasn't synced may or may not be there afterwards."""
        with self._flushing, self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1
            self._forget_sealed()
            self._failure = self._failure or f"the journal in {self._folder} is closed"

    def __enter__(self) -> Self:
        """The journal itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:010d}.journal"

    @contextlib.contextmanager
    def _opened(self, segment: int) -> Iterator[tuple[int, int]]:
        """A segment's file and where its last record ends; no lock is held while it is read.

        Chunks are small on slow links, and to open a file by its name takes longer than to read one: what is lent is a
        duplicate, that stays good when the journal closes its own.
        """
        with self._lock, translated("can't read", self._path(segment)):
            if segment not in self._segments:
                raise JournalError(f"the journal in {self._folder} has no segment {segment}")
            own, end = self._to_read(segment)
            descriptor = os.dup(own)
        try:
            yield descriptor, end
        finally:
            os.close(descriptor)

    def _to_read(self, segment: int) -> tuple[int, int]:
        """A segment's descriptor, and where its last record ends."""
        if segment == self._segments[-1] and self._descriptor >= 0:
            return self._descriptor, self._tail
        if self._sealed is None or self._sealed[0] != segment:
            path = self._path(segment)
            end = path.stat().st_size
            descriptor = os.open(path, os.O_RDONLY)
            self._forget_sealed()
            self._sealed = (segment, descriptor, end)
        _, descriptor, end = self._sealed
        return descriptor, end

    def _forget_sealed(self) -> None:
        if self._sealed is not None:
            os.close(self._sealed[1])
        self._sealed = None

    def _check_usable(self) -> None:
        if self._failure:
            raise StorageError(self._failure)

    def _end_of(self, segment: int) -> int:
        # A sealed segment ends where its file does, the growing one before a record that is being written.
        return self._tail if segment == self._segments[-1] else self._path(segment).stat().st_size

    def _open_last(self) -> None:
        segment = self._segments[-1]
        path = self._path(segment)
        with translated("can't open", path):
            size_bytes = path.stat().st_size
            if size_bytes < SEGMENT_HEADER_BYTES:
                # A crash came while the segment was begun, and it holds no record yet.
                self._begin_segment(segment)
                self.torn = TornTail(
                    segment=segment,
                    offset=SEGMENT_HEADER_BYTES,
                    dropped_bytes=size_bytes,
                    problem="the segment's header was cut off",
                )
                return
            with path.open("rb") as file:
                check_segment_header(file, segment)
                end, problem = find_tail(file, segment, size_bytes)
            self._descriptor = os.open(path, os.O_RDWR)
            if end < size_bytes:
                os.ftruncate(self._descriptor, end)
                self.torn = TornTail(segment=segment, offset=end, dropped_bytes=size_bytes - end, problem=problem)
            os.fsync(self._descriptor)
        self._tail = self._durable = end

    def _begin_segment(self, segment: int) -> None:
        path = self._path(segment)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(descriptor, [encode_segment_header(segment)], 0)
            os.fsync(descriptor)
            fsync_folder(self._folder)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._tail = self._durable = SEGMENT_HEADER_BYTES
        if segment not in self._segments:
            self._segments = (*self._segments, segment)

    def _seal(self, segment: int) -> None:
        """Flush a segment that is full and begin the next, unless another thread has done so."""
        with self._flushing:
            # Most of it while others may still append; only the last segment may have a torn tail.
            self._flush()
            with self._lock:
                self._check_usable()
                if self._segments[-1] != segment:
                    return
                self._flush_up_to(self._descriptor, self._tail)
                with translated("can't begin a new segment in", self._folder):
                    self._begin_segment(segment + 1)

    def _write(self, head: bytes, meta: bytes, views: list[memoryview]) -> JournalRef:
        segment = self._segments[-1]
        place = self._tail
        with translated("can't append to", self._path(segment)):
            try:
                written = write_all(self._descriptor, [head, meta, *views], place)
            except OSError:
                # What was written of it is overwritten by the next record, or cut off at the next opening.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, place)
                raise
        self._tail = place + written
        return JournalRef(segment, place, written)

    def _flush(self) -> None:
        """Make durable what is there now; `_flushing` is held, so no segment is sealed meanwhile."""
        with self._lock:
            self._check_usable()
            descriptor, tail = self._descriptor, self._tail
        self._flush_up_to(descriptor, tail)

    def _flush_up_to(self, descriptor: int, tail: int) -> None:
        if self._durable == tail:
            return
        try:
            os.fdatasync(descriptor)
        except OSError as exc:
            # After a failed flush the kernel may call lost pages clean, and a second flush would lie.
            self._failure = (
                f"the journal in {self._folder} couldn't be flushed ({exc.strerror}) and must be opened anew"
            )
            raise StorageError(self._failure) from exc
        self._durable = tail

    def _records(self, ends: list[tuple[int, int]], *, verify_payload: bool) -> Iterator[tuple[JournalRef, RecordHead]]:
        for segment, end in ends:
            path = self._path(segment)
            with translated("can't read", path), path.open("rb") as file:
                check_segment_header(file, segment)
                yield from scan(file, segment, end, verify_payload=verify_payload)
