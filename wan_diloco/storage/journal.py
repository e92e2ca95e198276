"""An append-only journal in segments: what is in it after `sync` is there after any crash.

The journal doesn't know what its records mean, takes no lock on its folder (`FolderLock` does), and
never repairs anything but the torn tail of its last segment.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from wan_diloco.errors import JournalError, StateDamaged, StorageError
from wan_diloco.storage.filesystem import ensure_folder, fsync_folder, is_still_at, translated, write_all
from wan_diloco.storage.journal_format import (
    META_BYTES_MAX,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Buffer,
    RecordHeader,
    checksum,
    encode_segment_header,
)
from wan_diloco.storage.journal_reader import JournalReader, find_segments
from wan_diloco.storage.journal_reading import (
    Damage,
    JournalRef,
    Record,
    RecordHead,
    find_tail,
    header_damage,
    holds_records,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["SEGMENT_BYTES", "Journal", "JournalRef", "Record", "RecordHead", "TornTail"]

SEGMENT_BYTES: Final = 64 * 2**20

_KIND_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TornTail:
    """What `Journal.open` cut off, for the operator.

    Attributes:
        segment: The last segment.
        offset: Where it ends now.
        dropped_bytes: How much was cut; nothing where the segment had just been begun.
        problem: What was wrong with it.
    """

    segment: int
    offset: int
    dropped_bytes: int
    problem: str


class Journal(JournalReader):
    """A folder of segments that grows; made by `Journal.open`.

    Thread: any. Records lie in the order in which `append` took them; a flush holds up nobody's `append`.

    Attributes:
        torn: What was cut off at the opening; None for nothing.
        damaged: Parts of the last segment that were found damaged then; whoever needs them can't have them.
    """

    def __init__(self, folder: Path, found: Sequence[int], segment_bytes: int) -> None:
        """Not for callers: use `open`."""
        super().__init__(folder, found)
        self._segment_bytes = segment_bytes
        # One flush at a time, so that none succeeds behind the back of one that fails. Taken before the other lock.
        self._flushing = threading.Lock()
        self._durable = 0
        self._failure: StorageError | None = None
        self.torn: TornTail | None = None
        self.damaged: tuple[Damage, ...] = ()

    @classmethod
    def open(cls, folder: Path, segment_bytes: int = SEGMENT_BYTES, *, holding: JournalRef | None = None) -> Self:
        """Open the journal in a folder, or begin one where there is none.

        The last segment is read and checked whole, a torn tail is cut off and stands in `torn`, and other damage in
        `damaged`. Earlier segments are checked when they are read; where one of them is missing, those before it are
        `stray`.

        Args:
            folder: Created where missing; other files in it are left alone.
            segment_bytes: A new segment begins where a record would pass this size.
            holding: A place that must be in it, or nothing is begun or cut.

        Raises:
            ConfigError: The folder can't be created or written.
            JournalError: The last segment is another one, or of another format; or the place isn't there.
            StorageError: The system refused to read or write.
        """
        ensure_folder(folder)
        found = find_segments(folder)
        journal = cls(folder, found, segment_bytes)
        if found:
            journal._open_last(holding)
        elif holding is not None:
            raise JournalError(f"the journal in {folder} is gone")
        else:
            with translated("can't begin a journal in", folder):
                journal._begin_segment(1)
        return journal

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
            StateDamaged: It is in a file that was removed: no restart will find it.
            StorageError: The system can't say that it is. What it then holds is unknown, so the journal refuses
                all further work and must be opened anew.
        """
        with self._flushing:
            self._flush()

    def require_there(self) -> None:
        """See that the segment that grows is still the file that a restart will read.

        Thread: any but an event loop's, since a disk may not answer.

        Raises:
            StateDamaged: It was removed or replaced; the journal refuses all further work.
            StorageError: The journal did so before.
        """
        with self._lock:
            self._check_usable()
            self._require_linked(self._descriptor)

    def seal(self, *, even_empty: bool = False) -> None:
        """Begin a new segment, unless the one that grows has no record yet: what is in all others never changes.

        Args:
            even_empty: Also where it has none.

        Raises:
            StorageError: The system refused; the journal goes on as it was, unless the sentence says otherwise.
        """
        with self._lock:
            segment, is_empty = self._segments[-1], self._tail == SEGMENT_HEADER_BYTES
        if even_empty or not is_empty:
            self._seal(segment)

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
        for oldest in [number for number in self.stray if number < segment]:
            with translated("can't remove old segments in", self._folder):
                self._path(oldest).unlink(missing_ok=True)
            dropped.append(oldest)
        self.stray = tuple(number for number in self.stray if number not in dropped)
        while True:
            with self._lock:
                oldest = self._segments[0]
                if len(self._segments) == 1 or oldest >= segment:
                    return dropped
            with translated("can't remove old segments in", self._folder):
                # Or somebody took it away: who needed it has missed it already.
                self._path(oldest).unlink(missing_ok=True)
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
            self._failure = self._failure or StorageError(f"the journal in {self._folder} is closed")

    def _check_usable(self) -> None:
        if self._failure is not None:
            # Anew each time: an error that is raised twice keeps the places of both.
            raise type(self._failure)(*self._failure.args)

    def _require_linked(self, descriptor: int) -> None:
        path = self._path(self._segments[-1])
        if not is_still_at(descriptor, path):
            self._failure = StateDamaged(
                f"the journal's file {path} was removed or replaced while it was written: what was acknowledged since "
                "the newest snapshot is lost"
            )
            self._check_usable()

    def _open_last(self, holding: JournalRef | None) -> None:
        segment = self._segments[-1]
        path = self._path(segment)
        with translated("can't open", path):
            try:
                size_bytes = path.stat().st_size
            except FileNotFoundError as exc:
                raise JournalError(f"{path} is a symbolic link that leads nowhere") from exc
            if size_bytes < SEGMENT_HEADER_BYTES:
                self._require(holding)
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
                damaged = header_damage(file, segment)
                if damaged is not None and not holds_records(file, segment, size_bytes):
                    raise damaged.error()
                tail = find_tail(file, segment, size_bytes)
            self._tail = self._durable = tail.end
            self._require(holding)
            self._descriptor = os.open(path, os.O_RDWR)
            if damaged is not None:
                # The records prove which segment it is, and nothing else stands there.
                write_all(self._descriptor, [encode_segment_header(segment)], 0)
            if tail.end < size_bytes:
                os.ftruncate(self._descriptor, tail.end)
                self.torn = TornTail(
                    segment=segment, offset=tail.end, dropped_bytes=size_bytes - tail.end, problem=tail.problem
                )
            os.fsync(self._descriptor)
        self.damaged = tail.damaged if damaged is None else (damaged, *tail.damaged)

    def _require(self, place: JournalRef | None) -> None:
        if place is not None and not self.reaches(place):
            end = place.offset + place.length
            before = f"; {', '.join(map(str, self.stray))} before them lead nowhere" if self.stray else ""
            raise JournalError(
                f"the journal in {self._folder} should hold segment {place.segment} up to {end} at least, and it has "
                f"segments {self._segments[0]} to {self._segments[-1]}, the last up to {self._tail}{before}"
            )

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
                    if os.fstat(self._descriptor).st_size > self._tail:
                        # The disk took neither a record nor the cut after it; a sealed one ends where its file does.
                        os.ftruncate(self._descriptor, self._tail)
                        os.fsync(self._descriptor)
                    # In a folder that was put in the old one's place the next would look as if all was well.
                    self._require_linked(self._descriptor)
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
            self._failure = StorageError(
                f"the journal in {self._folder} couldn't be flushed ({exc.strerror}) and must be opened anew"
            )
            raise self._failure from exc
        # Nobody may be told that it is durable where no restart looks.
        self._require_linked(descriptor)
        self._durable = tail
