"""Doing a run's merges again from what is on the disk: at every restart, and where `proof` compares their bits.

A merge is done again from the journalled contributions, since exact value and momentum are stored nowhere
else; the published value comes from the stored bytes, which learners may have already. Both must have the
digest that the tape says. Nothing here writes.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from wan_diloco.algorithm.publication import digest
from wan_diloco.errors import CheckpointError, DecodeError, JournalError
from wan_diloco.protocol import serial
from wan_diloco.protocol.state_json import state_from_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import FragmentPublished, Refragmented, RoundClosed, SyncerStarted, TapeRecord
from wan_diloco.storage import (
    Damage,
    JournalReader,
    JournalRef,
    Snapshot,
)
from wan_diloco.syncer.fragments_store import FragmentStore, Maths, MergedFragment
from wan_diloco.syncer.journal_keeper import KIND_PUBLICATION, KIND_TAPE, parse_ref
from wan_diloco.syncer.payloads import merge_sources
from wan_diloco.syncer.refragment import recut
from wan_diloco.units import FragmentId, RoundId, Version

if TYPE_CHECKING:
    from wan_diloco.algorithm.codec import Payload

__all__ = [
    "Difference",
    "TapeReplay",
    "restored_state",
    "snapshot_place",
    "tape_after",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where other bits came out.

    Attributes:
        what: "merge" where merging the contributions gave them, "publication" where the stored bytes did; "exact",
            "published" or "momentum" where a snapshot has others.
        where: The snapshot's name; empty otherwise.
        round_id: Of the merge that made the version.
        expected, found: Digests: on the tape or of the snapshot, and of what came out.
    """

    what: str
    where: str
    round_id: RoundId
    fragment_id: FragmentId
    from_version: Version
    to_version: Version
    expected: str
    found: str


class TapeReplay:
    """Applies records to state and values side by side.

    Args:
        journal: Has what the records refer to.
        maths: Of the run.
        state: As it was before the first record.
        store: The values then.
        differs: Told where other bits come out, in the order of the tape; what the tape says is then gone on with.
        maths_of: The maths of the run, were it cut into a number of fragments.
        executor: Where merges are done again, those of different fragments beside each other; it takes calls in their
            order. Until `settle` the values are those of some moment on the way.

    Attributes:
        maths: Of the fragments of now.
        rounds: Of each fragment, the round that made its newest version here.
    """

    def __init__(
        self,
        journal: JournalReader,
        maths: Maths,
        state: SyncerState,
        store: FragmentStore,
        differs: Callable[[Difference], None],
        maths_of: Callable[[int], Maths],
        executor: Executor,
    ) -> None:
        """Apply nothing yet."""
        self._executor = executor
        # Merges that aren't done, in the order of the tape; of each fragment, the newest.
        self._pending: deque[Future[list[Difference]]] = deque()
        self._newest: dict[FragmentId, Future[list[Difference]]] = {}
        self._journal = journal
        self._maths_of = maths_of
        self.maths = maths
        self._state = state
        self._store = store
        self._differs = differs
        self.rounds: dict[FragmentId, RoundId] = {}

    def apply(self, record: TapeRecord) -> None:
        """Apply the next record of the tape.

        Raises:
            JournalError: What it, or one before it, refers to can't be read.
            StorageError: The system refused.
            CheckpointError: Cutting the values anew gives others than it gave the first time.
        """
        if isinstance(record, FragmentPublished):
            fragment_id, closed = record.fragment_id, self._state.closed[record.fragment_id]
            job = partial(self._publish, record, closed, self._newest.get(fragment_id))
            self._newest[fragment_id] = self._executor.submit(job)
            self._pending.append(self._newest[fragment_id])
            self.rounds[fragment_id] = record.round_id
        elif isinstance(record, Refragmented):
            self.settle()
            self._recut(record)
        self._state.apply(record)
        if isinstance(record, SyncerStarted):
            self.settle()
            self._store.rename(self._state.versions)

    def settle(self) -> None:
        """Wait until the values are those of the last record.

        Raises:
            JournalError: What a record refers to can't be read.
            StorageError: The system refused.
        """
        while self._pending:
            for difference in self._pending.popleft().result():
                self._differs(difference)
        self._newest.clear()

    def _publish(
        self, record: FragmentPublished, closed: RoundClosed, before_it: Future[list[Difference]] | None
    ) -> list[Difference]:
        if before_it is not None:
            # It was given to the executor before this, so that it runs or is done.
            before_it.result()
        fragment_id = record.fragment_id
        before = self._store.value(fragment_id)
        entries = merge_sources(self._journal, self.maths.sizes(fragment_id), closed.entries)
        # A merge changes what it is given, and the stored bytes are added to the published value from before it.
        given = dataclasses.replace(before, published_N=before.published_N.clone())
        merged = self.maths.merge(fragment_id, given, record.version, closed.global_step, entries)
        stored = self._publication(fragment_id, record.ref)
        published_N = self.maths.published_after(fragment_id, before.published_N, stored)
        differences = [
            Difference(
                what=what,
                where="",
                round_id=record.round_id,
                fragment_id=fragment_id,
                from_version=closed.from_version,
                to_version=record.version,
                expected=record.digest,
                found=found,
            )
            for what, found in (("publication", digest(published_N)), ("merge", merged.value.digest))
            if found != record.digest
        ]
        value = dataclasses.replace(merged.value, digest=record.digest, published_N=published_N)
        self._store.install(MergedFragment(fragment_id=fragment_id, value=value, payload=stored))
        return differences

    def _recut(self, record: Refragmented) -> None:
        after = self._maths_of(record.fragments)
        versions = [Version(record.epoch, count) for count in record.counts]
        values = recut(self.maths.layout, after.layout, self._store.values(), versions)
        if tuple(value.digest for value in values) != record.digests:
            raise CheckpointError(f"cut into {record.fragments} fragments, the values aren't those that they were")
        self._store.replace_all(values)
        self.maths = after
        self.rounds.clear()

    def _publication(self, fragment_id: FragmentId, ref: str) -> Payload:
        record = self._journal.read(parse_ref(ref))
        if record.kind != KIND_PUBLICATION:
            raise JournalError(f"the record at {ref} is of kind {record.kind} and not {KIND_PUBLICATION}")
        return self.maths.split(fragment_id, record.payload)


def tape_after(
    journal: JournalReader, last: JournalRef | None, damaged: Callable[[Damage], None]
) -> Iterator[tuple[JournalRef, TapeRecord]]:
    """The tape behind a place, in order.

    Args:
        journal: Has it.
        last: A place that is there; None for the very beginning.
        damaged: Told of damage that can't have been a part of the tape.

    Raises:
        JournalError: A part of the tape may be lost: what comes behind it can't be understood without.
        StorageError: The system refused.
    """
    for item in journal.survey(after=last):
        if isinstance(item, Damage):
            if item.kind in (None, KIND_TAPE) and item.start > 0:
                raise item.error()
            damaged(item)
            continue
        ref, head = item
        if head.kind == KIND_TAPE:
            yield ref, _decoded(head.meta, ref)


def restored_state(snapshot: Snapshot, name: str, maths: Maths) -> tuple[SyncerState, FragmentStore]:
    """A syncer's state and values out of a snapshot.

    Raises:
        CheckpointError: It holds something else.
    """
    try:
        state = state_from_json(snapshot.manifest["state"])
    except DecodeError as exc:
        raise CheckpointError(f"snapshot {name} can't be used: {exc.detail}") from exc
    store = FragmentStore.restore(maths.layout, snapshot.tensors, state.versions)
    for index, (value, expected) in enumerate(zip(store.values(), state.digests, strict=True)):
        if value.digest != expected:
            raise CheckpointError(f"fragment {index} of snapshot {name} has digest {value.digest}, not {expected}")
    return state, store


def snapshot_place(manifest: Mapping[str, Any]) -> JournalRef | None:
    """Up to where the tape is in a snapshot, by what it says beside its tensors; None for the very beginning."""
    place = manifest["last_tape"]
    return None if place is None else JournalRef(*place)


def _decoded(line: bytes, ref: JournalRef) -> TapeRecord:
    try:
        data: Any = json.loads(line)
        return cast("TapeRecord", serial.from_json(TapeRecord, data))
    except (DecodeError, ValueError) as exc:
        raise JournalError(f"the tape can't be read in segment {ref.segment} at offset {ref.offset}: {exc}") from exc
