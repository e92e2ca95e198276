"""Encoded fragments in the journal: how a contribution's record names its chunks, and reading them again.

A contribution is one record whose meta part holds its header. Where the payload isn't in that record, the
meta part lists the chunk records that make up the row of codes and scales, in order and without a gap.
Reading holds one chunk at a time, whatever the fragment's size.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from wan_diloco.algorithm.codec import PayloadSizes
from wan_diloco.errors import JournalError
from wan_diloco.storage import JournalReader, JournalRef
from wan_diloco.syncer.fragments_store import InspectedSource
from wan_diloco.syncer.journal_keeper import KIND_CHUNK, KIND_CONTRIBUTION, format_ref, parse_ref

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from wan_diloco.protocol.messages import ContributionKey
    from wan_diloco.protocol.tape import MergeEntry

__all__ = ["StoredChunk", "StoredPayload", "contribution_meta", "merge_sources", "unreadable"]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a payload in a record of its own.

    Attributes:
        start, end: Its place in the row of codes and scales.
        ref: Of the record.
    """

    start: int
    end: int
    ref: JournalRef


def contribution_meta(header: Any, chunks: Sequence[StoredChunk], norms: Sequence[float]) -> dict[str, Any]:
    """The meta part of a contribution's record.

    Args:
        header: As JSON; for people, nothing reads it.
        chunks: In the order of the row; none where the record itself has the payload.
        norms: What was measured when it was inspected: JSON keeps a float to the bit.
    """
    places = [[chunk.start, chunk.end, chunk.ref.segment, chunk.ref.offset, chunk.ref.length] for chunk in chunks]
    return {"header": header, "chunks": places, "norms": list(norms)}


class StoredPayload:
    """A payload in the journal, read range by range.

    Owner: one thread, any; several readers of the same payload don't disturb each other. No lock is held
    while the disk is read.

    Args:
        journal: Has it.
        sizes: Of its buffers.
        chunks: Make up the row of codes and scales, in order and without a gap; none where `held` is the row.
        held: The row, where it is in memory.
        norms: As `contribution_meta` was given them.

    Attributes:
        norms: Those.
    """

    def __init__(
        self,
        journal: JournalReader,
        sizes: PayloadSizes,
        chunks: Sequence[StoredChunk],
        held: bytes | memoryview = b"",
        norms: Sequence[float] = (),
    ) -> None:
        """Read nothing yet."""
        self.norms = norms
        self._journal = journal
        self._sizes = sizes
        self._chunks = chunks
        self._starts = [*(chunk.start for chunk in chunks), sizes.total_bytes] if chunks else [0, sizes.total_bytes]
        # The one chunk at hand, and which it is; of a row in memory, all there is.
        self._held: NDArray[np.uint8] = np.frombuffer(held, dtype=np.uint8)
        self._held_index = -1 if chunks else 0

    @classmethod
    def open(cls, journal: JournalReader, ref: str, sizes: PayloadSizes) -> Self:
        """A contribution's payload; of the payload nothing is read that isn't in the contribution's own record.

        Args:
            journal: Has it.
            ref: Of the contribution's record, as the tape has it.
            sizes: Of the fragment's payloads.

        Raises:
            JournalError: No contribution of these sizes is there, or it is damaged.
            StorageError: The system refused.
        """
        record = journal.read(parse_ref(ref))
        if record.kind != KIND_CONTRIBUTION:
            raise JournalError(f"the record at {ref} is of kind {record.kind} and not {KIND_CONTRIBUTION}")
        chunks, norms = _parts_of(record.meta, ref)
        ends = [0, *(chunk.end for chunk in chunks)] if chunks else [len(record.payload)]
        starts = [*(chunk.start for chunk in chunks), sizes.total_bytes]
        if ends != starts:
            raise JournalError(f"the contribution at {ref} isn't {sizes.total_bytes} bytes in a row")
        return cls(journal, sizes, chunks, record.payload, norms)

    @property
    def sizes(self) -> PayloadSizes:
        """Lengths of codes and scales."""
        return self._sizes

    def codes_into(self, start: int, out: NDArray[np.uint8]) -> None:
        """Copy codes; in ascending order each chunk is read once.

        Args:
            start: First byte among the codes.
            out: uint8, contiguous; filled whole.

        Raises:
            JournalError: A chunk is damaged.
            StorageError: The system refused.
        """
        self._row_into(start, out)

    def scales(self) -> NDArray[np.uint8]:
        """All scales, in memory of their own.

        Raises:
            JournalError: A chunk is damaged.
            StorageError: The system refused.
        """
        out = np.empty(self._sizes.scales_bytes, dtype=np.uint8)
        self._row_into(self._sizes.codes_bytes, out)
        return out

    def check(self) -> None:
        """Read all of it, only to see that it can be.

        Raises:
            JournalError: A chunk is damaged.
            StorageError: The system refused.
        """
        for index in range(len(self._chunks)):
            self._hold(index)

    def _row_into(self, start: int, out: NDArray[np.uint8]) -> None:
        end = start + out.size
        index = bisect_right(self._starts, start) - 1
        while start < end:
            first, behind = self._starts[index : index + 2]
            part = out[out.size - (end - start) :][: behind - start]
            if part.size == behind - first and index != self._held_index:
                # Wanted whole: no need to hold it.
                self._read(self._chunks[index], part)
            else:
                self._hold(index)
                part[:] = self._held[start - first :][: part.size]
            start += part.size
            index += 1

    def _hold(self, index: int) -> None:
        if index == self._held_index:
            return
        chunk = self._chunks[index]
        self._held_index = -1
        self._held = np.empty(chunk.end - chunk.start, dtype=np.uint8)
        self._read(chunk, self._held)
        self._held_index = index

    def _read(self, chunk: StoredChunk, out: NDArray[np.uint8]) -> None:
        kind = self._journal.read_payload_into(chunk.ref, out.data)
        if kind != KIND_CHUNK:
            raise JournalError(f"the record at {format_ref(chunk.ref)} is of kind {kind} and no chunk")


def merge_sources(
    journal: JournalReader, sizes: PayloadSizes, entries: Sequence[MergeEntry]
) -> list[tuple[MergeEntry, InspectedSource]]:
    """What a merge is given: each entry with its payload, in the order of the entries.

    Raises:
        JournalError: A payload isn't there, or it is damaged.
        StorageError: The system refused.
    """
    sources = [(entry, StoredPayload.open(journal, entry.ref, sizes)) for entry in entries]
    return [(entry, InspectedSource(source=stored, norms=stored.norms)) for entry, stored in sources]


def unreadable(
    journal: JournalReader, sizes: PayloadSizes, entries: Sequence[MergeEntry]
) -> tuple[ContributionKey, ...]:
    """Keys of the entries whose payloads are damaged.

    Raises:
        StorageError: The system refused, which says nothing about what is on the disk.
    """
    lost = []
    for entry in entries:
        try:
            StoredPayload.open(journal, entry.ref, sizes).check()
        except JournalError:
            lost.append(entry.header.key)
    return tuple(lost)


def _parts_of(meta: bytes, ref: str) -> tuple[list[StoredChunk], list[float]]:
    try:
        parts = json.loads(meta)
        chunks = [StoredChunk(start, end, JournalRef(*place)) for start, end, *place in parts["chunks"]]
        return chunks, [float(norm) for norm in parts["norms"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise JournalError(f"the record at {ref} doesn't say what it is made of") from exc
