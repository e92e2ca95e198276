"""Merges under way: one a fragment, several fragments side by side in threads.

A merge changes the fragment's tensors in place, and reads everything that it needs before. What it made waits here
until its record is durable; only then is it the store's. When the disk didn't take the publication, the round is tried
again with what was made: it can't be made twice. What is damaged on the disk stays so: the machine decides without it.
"""

from __future__ import annotations

from collections.abc import Callable

from wan_diloco.errors import JournalError, RemoteProtocolError, StorageError
from wan_diloco.protocol.events import (
    ContributionsUnreadable,
    MergeFailed,
    MergeFinished,
    StartMerge,
    SyncerEvent,
)
from wan_diloco.protocol.messages import ContributionKey
from wan_diloco.protocol.tape import FragmentPublished
from wan_diloco.syncer.fragments_store import FragmentStore, FragmentValue, Maths, MergedFragment
from wan_diloco.syncer.journal_keeper import KIND_PUBLICATION, JournalKeeper
from wan_diloco.syncer.payloads import merge_sources, unreadable
from wan_diloco.syncer.updates import Packing, Updates, frames_bytes
from wan_diloco.syncer.workers import Workers, in_executor
from wan_diloco.transport.interface import Frames
from wan_diloco.units import RoundId

__all__ = ["Merges"]


class Merges:
    """Does what `StartMerge` asks for.

    Owner: the event loop.

    Args:
        store: All fragments.
        maths: What is computed.
        keeper: Has contributions, takes publications.
        updates: Is given the packed form of what is published.
        packing: How it is packed.
        workers: Where it runs.
        emit: Takes `MergeFinished`, `MergeFailed` or `ContributionsUnreadable`.
        report: Told what the operator should know: a topic, and a sentence.

    Attributes:
        on_copies: Whether merges that begin now leave the values that they begin with alone, so that those of all
            fragments can be had at one moment.
    """

    def __init__(
        self,
        *,
        store: FragmentStore,
        maths: Maths,
        keeper: JournalKeeper,
        updates: Updates,
        packing: Packing,
        workers: Workers,
        emit: Callable[[SyncerEvent], None],
        report: Callable[[str, str], None],
    ) -> None:
        """Nothing is under way yet."""
        self._store = store
        self._maths = maths
        self._keeper = keeper
        self._updates = updates
        self._packing = packing
        self._workers = workers
        self._emit = emit
        self._report = report
        self._made: dict[RoundId, tuple[MergedFragment, int, Frames]] = {}
        self._unrecorded: set[RoundId] = set()
        self.on_copies = False

    @property
    def waiting(self) -> bool:
        """Whether something merged isn't installed yet."""
        return bool(self._unrecorded)

    async def run(self, effect: StartMerge) -> None:
        """Merge, publish into the journal, and tell the machine.

        Raises:
            StorageError: The journal has lost track of what is durable; the process must end.
        """
        fragment_id = effect.fragment_id
        meta = {"round_id": effect.round_id, "fragment_id": fragment_id, "version": str(effect.to_version)}
        try:
            if effect.round_id not in self._made:
                self._made[effect.round_id] = await self._make(effect)
            merged, _, frames = self._made[effect.round_id]
            parts = (merged.payload.codes.data, merged.payload.scales.data)
            ref = await self._keeper.append(KIND_PUBLICATION, meta, parts)
        except (StorageError, RemoteProtocolError) as exc:
            await in_executor(self._workers.journal, self._keeper.check)
            # Looked at a second time: what can be read then was not damaged. What is made has all of them in it, and
            # only its publication is tried again.
            is_made = effect.round_id in self._made
            lost = await self._unreadable(effect) if isinstance(exc, JournalError) and not is_made else ()
            failed = MergeFailed(round_id=effect.round_id, reason=str(exc))
            self._emit(ContributionsUnreadable(round_id=effect.round_id, keys=lost) if lost else failed)
            return
        self._unrecorded.add(effect.round_id)
        self._emit(
            MergeFinished(
                round_id=effect.round_id,
                digest=merged.value.digest,
                ref=ref,
                codes_bytes=merged.payload.codes.size,
                scales_bytes=merged.payload.scales.size,
                update_bytes=frames_bytes(frames),
            )
        )

    async def _unreadable(self, effect: StartMerge) -> tuple[ContributionKey, ...]:
        sizes, journal = self._maths.sizes(effect.fragment_id), self._keeper.journal
        try:
            return await in_executor(self._workers.maths, lambda: unreadable(journal, sizes, effect.entries))
        except StorageError:
            return ()

    async def _make(self, effect: StartMerge) -> tuple[MergedFragment, int, Frames]:
        value = self._store.take(effect.fragment_id, copy=self.on_copies)
        assert value.version == effect.from_version, f"{value.version} is no {effect.from_version}"
        chunk_bytes = self._updates.usual_chunk_bytes
        try:
            merged, frames = await in_executor(self._workers.maths, lambda: self._compute(effect, value, chunk_bytes))
        except (StorageError, RemoteProtocolError):
            self._store.give_back(effect.fragment_id)
            raise
        if merged.unstepped:
            text = f"{merged.unstepped} blocks of 128 would not be finite any more and stay as they are"
            self._report(f"merge:{effect.fragment_id}", f"fragment {effect.fragment_id}: {text}")
        return merged, chunk_bytes, frames

    def install(self, record: FragmentPublished) -> None:
        """Its record is durable: the new value is the fragment's from now on."""
        merged, chunk_bytes, frames = self._made.pop(record.round_id)
        self._unrecorded.discard(record.round_id)
        assert merged.value.digest == record.digest, "the record is of another merge"
        self._store.install(merged)
        self._updates.remember(record.fragment_id, record.version, chunk_bytes, frames)

    def _compute(self, effect: StartMerge, value: FragmentValue, chunk_bytes: int) -> tuple[MergedFragment, Frames]:
        sizes = self._maths.sizes(effect.fragment_id)
        entries = merge_sources(self._keeper.journal, sizes, effect.entries)
        merged = self._maths.merge(effect.fragment_id, value, effect.to_version, effect.global_step, entries)
        return merged, self._packing.frames(merged.payload, chunk_bytes)
