"""A contribution's bytes on their way into the journal, chunk by chunk as they come.

What is held in memory is the chunk that is being written, whatever the contribution's size; the disk's
pace is the sender's, since the next message is read when the last is stored. Contributions that fit
into one small message are held whole instead, and become one record.

Chunks that nothing refers to, of uploads that were given up, stay in their segments until those go.
Nothing here decides whether a contribution is wanted, or checks what its bytes mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import DecodeError, StorageError, TransportError
from wan_diloco.syncer.journal_keeper import KIND_CHUNK, JournalKeeper
from wan_diloco.syncer.payloads import StoredChunk
from wan_diloco.syncer.workers import Workers, in_executor
from wan_diloco.wire.coverage import Coverage
from wan_diloco.wire.frames import Assembler, Piece, unpack

if TYPE_CHECKING:
    from wan_diloco.protocol.messages import ContributionHeader
    from wan_diloco.transport.interface import Session

__all__ = ["Spool"]

# Up to here a record of its own for the bytes would cost more than holding them; to check and decompress so few
# takes less time than handing them to a thread.
_WHOLE_BYTES_MAX: Final = 64 * 1024
# Configurations have chunks of 4 KiB at least: who sends smaller ones wants our memory for their places.
_CHUNK_BYTES_LEAST: Final = 4 * 1024
_CHUNKS_ALWAYS: Final = 64


class Spool:
    """Implements `transport.UploadSink`.

    Owner: the event loop; `put` works on a thread, one message at a time.

    Args:
        header: Of the contribution.
        keeper: Takes its bytes.
        workers: Where messages are checked and decompressed.
        store: Told when all bytes are there: the spool, where the last came from, the header as offered last, and
            what crossed the wire.
        failed: Told that the journal can't take bytes any more.
    """

    def __init__(
        self,
        header: ContributionHeader,
        keeper: JournalKeeper,
        workers: Workers,
        store: Callable[[Spool, Session, ContributionHeader, int], None],
        failed: Callable[[StorageError], None],
    ) -> None:
        """Nothing is there yet, and nothing is taken."""
        self._sizes = (header.codes_bytes, header.scales_bytes)
        self._keeper = keeper
        self._workers = workers
        self._store = store
        self._failed = failed
        self._claim = keeper.claim()
        total = sum(self._sizes)
        self._whole = Assembler(*self._sizes) if total <= _WHOLE_BYTES_MAX else None
        self._coverage = Coverage(total)
        self._chunks: list[StoredChunk] = []
        self._chunks_max = max(_CHUNKS_ALWAYS, total // _CHUNK_BYTES_LEAST)
        # A stream that broke may leave a thread at work when the next begins.
        self._writing = threading.Lock()

    @property
    def gap(self) -> tuple[int, int]:
        """The first part [start, end) of the row of codes and scales that is missing; empty when none is."""
        return self._coverage.gap() if self._whole is None else self._whole.gap

    @property
    def stored_bytes(self) -> int:
        """How much of the row is there."""
        return self._coverage.covered if self._whole is None else self._whole.stored_bytes

    @property
    def oldest_segment(self) -> int | None:
        """Where its first chunk may lie; None while there is none."""
        return self._claim.oldest

    @property
    def chunks(self) -> list[StoredChunk]:
        """Where its bytes lie, in the order of the row; none where they were held in memory."""
        return sorted(self._chunks, key=lambda chunk: chunk.start)

    @property
    def row(self) -> bytes:
        """Its bytes, where they were held in memory; to be called once, when complete."""
        if self._whole is None:
            return b""
        both = self._whole.result()
        return both.codes.tobytes() + both.scales.tobytes()

    async def put(self, message: bytes) -> None:
        """Check a bulk message and append its chunks to the journal; a full disk is waited out.

        Raises:
            DecodeError: As `wire.frames.Assembler.add`.
            TransportError: The journal lost track, or the syncer stops and the disk is full.
        """
        if self._whole is not None:
            self._whole.add(message)
            return
        self._claim.begin()
        pieces: list[Piece] | None = None

        def attempt() -> None:
            nonlocal pieces
            pieces = unpack(message, *self._sizes) if pieces is None else pieces
            self._append(pieces)

        try:
            await self._keeper.until_done(lambda: in_executor(self._workers.intake, attempt))
        except StorageError as exc:
            self._failed(exc)
            raise TransportError("the syncer's disk takes nothing any more") from exc

    def rest(self) -> None:
        """The stream broke: what is there stays as long as the journal doesn't grow too far beyond it."""
        self._claim.idle = True

    def resume(self) -> bool:
        """Whether the journal still has what was put into it; then it keeps it."""
        self._claim.idle = False
        return not self._claim.lost

    def complete(self, session: Session, header: ContributionHeader, wire_bytes: int) -> None:
        """All bytes are here."""
        self._store(self, session, header, wire_bytes)

    def abandon(self) -> None:
        """Nobody needs what is here any more."""
        self._claim.release()

    def _append(self, pieces: list[Piece]) -> None:
        """Append what isn't there yet; to be repeated where the disk took only a part.

        Raises:
            DecodeError: No honest sender made these pieces.
            StorageError: The disk takes nothing now.
        """
        with self._writing:
            for piece in pieces:
                end = piece.start + piece.raw.size
                if self._coverage.has(piece.start, end):
                    continue
                if len(self._chunks) >= self._chunks_max:
                    raise DecodeError("garbage", f"more than {self._chunks_max} chunks")
                ref = self._keeper.append_now(KIND_CHUNK, piece.raw.data)
                self._coverage.add(piece.start, end)
                self._chunks.append(StoredChunk(piece.start, end, ref))
