"""The syncer's journal: what the kinds of its records are, who writes them, and what happens when the disk doesn't.

A full disk is waited out: the call tries again until the record is in, and says so while it lasts;
training goes on meanwhile. A journal that can't tell any more what is durable is given up: the error
ends the process, and the next one reads what is really there.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Final, TypeVar

from wan_diloco.errors import JournalError, StorageError
from wan_diloco.protocol import serial
from wan_diloco.protocol.deadlines import JOURNAL_RETRY_FIRST_S, JOURNAL_RETRY_MAX_S
from wan_diloco.protocol.tape import TapeRecord
from wan_diloco.storage import SEGMENT_BYTES, Journal, JournalRef
from wan_diloco.syncer.workers import Workers, in_executor

__all__ = [
    "KIND_CHUNK",
    "KIND_CONTRIBUTION",
    "KIND_PUBLICATION",
    "KIND_TAPE",
    "Claim",
    "JournalKeeper",
    "TapeMirror",
    "format_ref",
    "parse_ref",
]

KIND_TAPE: Final = 1
KIND_CONTRIBUTION: Final = 2
KIND_PUBLICATION: Final = 3
KIND_CHUNK: Final = 4

_LEFT_MAX: Final = 10_000
# 2 GiB, in segments: beyond that, sending a broken upload again costs less than all that lies behind its chunks.
_IDLE_SEGMENTS_MAX: Final = 2 * 2**30 // SEGMENT_BYTES

Buffers = Sequence[bytes | bytearray | memoryview]
T = TypeVar("T")


def format_ref(ref: JournalRef, oldest: int | None = None) -> str:
    """A place in the journal as machines and headers carry it: "segment:offset:length".

    Args:
        ref: The place.
        oldest: The oldest segment that the record there needs, where that isn't its own; a fourth number.
    """
    text = f"{ref.segment}:{ref.offset}:{ref.length}"
    return text if oldest is None or oldest >= ref.segment else f"{text}:{oldest}"


def parse_ref(text: str) -> JournalRef:
    """The place that `format_ref` wrote.

    Raises:
        JournalError: The text isn't one.
    """
    return JournalRef(*_numbers(text)[:3])


def _oldest_segment(text: str) -> int:
    numbers = _numbers(text)
    return min(numbers[0], numbers[-1]) if len(numbers) == 4 else numbers[0]


def _numbers(text: str) -> list[int]:
    parts = text.split(":")
    if len(parts) not in (3, 4) or not all(part.isascii() and part.isdigit() for part in parts):
        raise JournalError(f"{text!r} isn't a place in the journal")
    return list(map(int, parts))


class Claim:
    """What is under way and needs the journal from some segment on, while nothing durable says so.

    Owner: the event loop.

    Attributes:
        oldest: The segment; None while it needs nothing.
        idle: Whether it waits for somebody who may never come; then it is let go of when the journal has grown.
        lost: Whether it was let go of.
    """

    def __init__(self, keeper: JournalKeeper) -> None:
        """For the keeper to make."""
        self._keeper = keeper
        self.oldest: int | None = None
        self.idle = False
        self.lost = False

    def begin(self) -> None:
        """From the segment on that grows now; before what is claimed is appended."""
        if self.oldest is None:
            self.oldest = self._keeper.newest_segment
            self._keeper.hold(self)

    def release(self) -> None:
        """End it; idempotent."""
        self._keeper.let_go(self)
        self.lost = True


class TapeMirror:
    """The tape as a file that a person can read; nothing depends on it, and nothing is flushed.

    Args:
        path: `tape.jsonl`; appended to.
    """

    def __init__(self, path: Path) -> None:
        """Open nothing yet."""
        self._path = path
        self._file: IO[bytes] | None = None
        # What a full disk didn't take; the journal waits then too, so that these are few.
        self._left: list[bytes] = []

    def catch_up(self, lines: Sequence[bytes]) -> None:
        """Append what a killed process left out: whatever comes after the last line that is in the file.

        Args:
            lines: The newest part of the tape, oldest first.

        Raises:
            OSError: The file can't be read or written.
        """
        last = b""
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                # The last line was cut off when the process was killed.
                self._path.write_bytes(whole)
            last = whole[whole.rfind(b"\n", 0, -1) + 1 :].strip() if whole else b""
        missing = list(lines)
        if last in missing:
            missing = missing[len(missing) - missing[::-1].index(last) :]
        self.append(missing)

    def append(self, lines: Iterable[bytes]) -> None:
        """Add lines, and those that couldn't be added before: all, or none.

        Raises:
            OSError: The file can't be written.
        """
        self._left = [*self._left[-_LEFT_MAX:], *lines]
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        data = b"".join(line + b"\n" for line in self._left)
        written = self._file.write(data)
        if written < len(data):
            # A disk that fills up takes a part, and says so only by its length: no line may be torn.
            self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left.clear()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JournalKeeper:
    """Appends and reads for the service; the tape is written and flushed in the journal's own thread.

    Owner: the event loop; every method but `read` is called from it.

    Args:
        journal: Open.
        workers: Where the work is done.
        mirror: Gets a copy of the tape.
        last_tape: Where the newest record of the tape is.
        report: Told the trouble in one sentence, and "" when it is over.
        require_held: Raises `StateDamaged` where the folder that the journal is in isn't ours any more.

    Attributes:
        journal: To be read by anybody; what is appended goes through here.
        recording: Whether records are on their way to the tape, so that the machine's state is ahead of it.
        last_tape: Where the newest record of the tape is.
    """

    def __init__(
        self,
        journal: Journal,
        workers: Workers,
        mirror: TapeMirror,
        last_tape: JournalRef | None,
        report: Callable[[str], None],
        require_held: Callable[[], None] = lambda: None,
    ) -> None:
        """Write nothing yet."""
        self.journal = journal
        self._require_held = require_held
        self._workers = workers
        self._mirror = mirror
        self._report = report
        self._troubled = False
        self._mirror_troubled = False
        # Places that aren't on the tape yet, with the oldest segment that each needs.
        self._unrecorded: dict[str, int] = {}
        self._claims: set[Claim] = set()
        self._patient = True
        self.recording = False
        self.last_tape = last_tape

    async def record(self, records: Sequence[TapeRecord], *, durable: bool) -> None:
        """Append to the tape, in order, and flush once.

        Args:
            records: What to append; may be empty.
            durable: Whether all must be on disk when this returns.

        Raises:
            StorageError: The journal can't say what is durable, or is full while we stop; the process must end.
        """
        lines: list[bytes] = []
        written = 0

        def write() -> None:
            nonlocal written
            lines.extend(serial.dumps(record) for record in records[len(lines) :])
            for line in lines[written:]:
                self.last_tape = self.journal.append(KIND_TAPE, line)
                written += 1
            if durable:
                self.journal.sync()

        if records or durable:
            self.recording = True
            await self.until_done(lambda: in_executor(self._workers.journal, write))
            self.recording = False
        if lines:
            self._copy(lines)

    def _copy(self, lines: Sequence[bytes]) -> None:
        try:
            self._mirror.append(lines)
        except OSError as exc:
            self._mirror_troubled = True
            self._report(f"tape.jsonl can't be written: {exc.strerror}")
        else:
            if self._mirror_troubled:
                self._mirror_troubled = False
                self._report("")

    @property
    def newest_segment(self) -> int:
        """The one that grows."""
        return self.journal.segments[-1]

    def claim(self) -> Claim:
        """Something new that may come to need a part of the journal."""
        return Claim(self)

    def hold(self, claim: Claim) -> None:
        """For claims: respect it from now on."""
        self._claims.add(claim)

    def let_go(self, claim: Claim) -> None:
        """For claims: respect it no longer."""
        self._claims.discard(claim)

    def append_now(self, kind: int, payload: bytes | memoryview) -> JournalRef:
        """Append one record without a meta part, right here.

        Thread: any. Only under a claim, or segments may be dropped that have it.

        Raises:
            StorageError: The journal can't take it now.
        """
        return self.journal.append(kind, b"", (payload,))

    async def append(self, kind: int, meta: object, payload: Buffers, *, oldest: int | None = None) -> str:
        """Append one record with a payload, and remember its place until `recorded` is called.

        Args:
            kind: Of the record.
            meta: JSON.
            payload: Its parts.
            oldest: The oldest segment that the record refers to.

        Returns:
            Its place, as the tape has it.

        Raises:
            StorageError: The journal can't take it now (`check` tells whether it ever will).
        """
        line = json.dumps(meta, separators=(",", ":")).encode()
        claim = self.claim()
        claim.begin()
        try:
            # Not behind a flush that is under way, so that the next one has all that came meanwhile.
            ref = await in_executor(self._workers.intake, lambda: self.journal.append(kind, line, payload))
        finally:
            claim.release()
        place = format_ref(ref, oldest)
        self._unrecorded[place] = _oldest_segment(place)
        return place

    async def append_waiting(self, kind: int, meta: object, payload: Buffers, *, oldest: int | None = None) -> str:
        """Like `append`, but waits a full disk out.

        Raises:
            StorageError: The journal can't say what is durable; the process must end.
        """
        return await self.until_done(lambda: self.append(kind, meta, payload, oldest=oldest))

    def stop_waiting(self) -> None:
        """From now on a disk that is full is an error: the process is to end, and nobody should wait for space."""
        self._patient = False

    def recorded(self, ref: str) -> None:
        """A record with this place is on the tape now, or never will be."""
        self._unrecorded.pop(ref, None)

    def read(self, ref: str, kind: int) -> bytes:
        """The payload at a place.

        Thread: any.

        Raises:
            JournalError: Nothing of that kind is there, or it is damaged.
            StorageError: The system refused.
        """
        record = self.journal.read(parse_ref(ref))
        if record.kind != kind:
            raise JournalError(f"the record at {ref} is of kind {record.kind} and not {kind}")
        return record.payload

    def floor(self, refs: Iterable[str]) -> int:
        """The oldest segment that is still needed, if these places are; idle claims far behind are let go of.

        Args:
            refs: What the machine's state refers to.
        """
        newest = self.newest_segment
        for claim in [claim for claim in self._claims if claim.idle]:
            if claim.oldest is not None and claim.oldest < newest - _IDLE_SEGMENTS_MAX:
                claim.release()
        needed = [_oldest_segment(ref) for ref in refs]
        needed += self._unrecorded.values()
        needed += [claim.oldest for claim in self._claims if claim.oldest is not None]
        if self.last_tape is not None:
            needed.append(self.last_tape.segment)
        return min(needed, default=0)

    def drop_before(self, segment: int) -> list[int]:
        """Remove segments that nothing needs.

        Thread: any.

        Raises:
            StorageError: The system refused.
        """
        return self.journal.drop_segments_before(segment)

    def check(self) -> None:
        """See that the journal can still tell what is durable; flushes what was appended.

        Thread: the journal's.

        Raises:
            StateDamaged: Its folder, or the file that grows in it, was removed or replaced.
            StorageError: It can't, and must be opened anew.
        """
        self._look()
        self.journal.sync()

    def _look(self) -> None:
        # The folder first: it says more than that a file is gone.
        self._require_held()
        self.journal.require_there()

    async def look_every(self, seconds: float) -> None:
        """See now and then that what is written is where a restart will look for it, for as long as the caller likes.

        Raises:
            StateDamaged: It isn't; the process must end, and acknowledge nothing more.
            StorageError: The journal can't say what is durable; the process must end.
        """
        while True:
            await asyncio.sleep(seconds)
            await in_executor(self._workers.journal, self._look)

    async def flush_every(self, seconds: float) -> None:
        """Flush now and then, for as long as the caller likes.

        Raises:
            StorageError: The journal can't say what is durable; the process must end.
        """
        while True:
            await asyncio.sleep(seconds)
            await in_executor(self._workers.journal, self.check)

    def close(self) -> None:
        """Close the files."""
        self.journal.close()
        self._mirror.close()

    async def until_done(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until the journal takes it, and say so while it doesn't.

        Raises:
            StorageError: The journal can't say what is durable, or is full while we stop; the process must end.
        """
        delay_s = JOURNAL_RETRY_FIRST_S
        while True:
            try:
                result = await attempt()
            except StorageError as exc:
                # A journal that is merely full passes this; one that lost track raises again, for good.
                await in_executor(self._workers.journal, self.check)
                if not self._patient:
                    raise
                self._troubled = True
                self._report(str(exc))
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, JOURNAL_RETRY_MAX_S)
            else:
                if self._troubled:
                    self._troubled = False
                    self._report("")
                return result
