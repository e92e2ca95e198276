"""Doing a run's merges again from what is on the disk: at every restart, and to prove that the bits are the same.

A merge is done again from the journalled contributions, since exact value and momentum are stored nowhere
else; the published value comes from the stored bytes, which learners may have already. Both must have the
digest that the tape says. Nothing here writes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from wan_diloco.algorithm.publication import digest
from wan_diloco.errors import CheckpointError, ConfigError, DecodeError, JournalError, StateDamaged, StorageError
from wan_diloco.models import build_model, model_tensors, run_layout
from wan_diloco.protocol import serial
from wan_diloco.protocol.state_json import state_from_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import FragmentPublished, RoundClosed, SyncerStarted, TapeRecord
from wan_diloco.storage import (
    Damage,
    JournalReader,
    JournalRef,
    Snapshot,
    good_snapshots,
    load_snapshot,
    owner_of,
)
from wan_diloco.syncer.fragments_store import FragmentStore, FragmentValue, Maths, MergedFragment
from wan_diloco.syncer.journal_keeper import KIND_PUBLICATION, KIND_TAPE, parse_ref
from wan_diloco.syncer.payloads import merge_sources
from wan_diloco.syncer.plan import run_maths
from wan_diloco.units import FragmentId, RoundId, Version

if TYPE_CHECKING:
    from wan_diloco.algorithm.codec import Payload
    from wan_diloco.config import RunConfig

__all__ = [
    "Difference",
    "ReplayReport",
    "TapeReplay",
    "replay_run",
    "restored_state",
    "snapshot_place",
    "tape_after",
]

_PARTS: Final = ("exact", "published", "momentum")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay came to.

    Attributes:
        since: What it began with: "the initial weights", or a snapshot's name.
        begun, reached: Version of each fragment at its begin and at its end.
        snapshots: Names of those on the way that hold the same bits.
        difference: The first one, where it ended; None where all bits are the same.
        notes: What else the operator should know, one sentence each.
    """

    since: str
    begun: tuple[Version, ...]
    reached: tuple[Version, ...]
    snapshots: tuple[str, ...]
    difference: Difference | None
    notes: tuple[str, ...]

    @property
    def versions(self) -> int:
        """How many published versions were compared and are the same."""
        return sum(end.count - begin.count for begin, end in zip(self.begun, self.reached, strict=True))


class TapeReplay:
    """Applies records to state and values side by side.

    Args:
        journal: Has what the records refer to.
        maths: Of the run.
        state: As it was before the first record.
        store: The values then.
        differs: Told where other bits come out; what the tape says is then gone on with.

    Attributes:
        rounds: Of each fragment, the round that made its newest version here.
    """

    def __init__(
        self,
        journal: JournalReader,
        maths: Maths,
        state: SyncerState,
        store: FragmentStore,
        differs: Callable[[Difference], None],
    ) -> None:
        """Apply nothing yet."""
        self._journal = journal
        self._maths = maths
        self._state = state
        self._store = store
        self._differs = differs
        self.rounds: dict[FragmentId, RoundId] = {}

    def apply(self, record: TapeRecord) -> None:
        """Apply the next record of the tape.

        Raises:
            JournalError: What it refers to can't be read.
            StorageError: The system refused.
        """
        if isinstance(record, FragmentPublished):
            self._publish(record, self._state.closed[record.fragment_id])
            self.rounds[record.fragment_id] = record.round_id
        self._state.apply(record)
        if isinstance(record, SyncerStarted):
            self._store.rename(self._state.versions)

    def _publish(self, record: FragmentPublished, closed: RoundClosed) -> None:
        fragment_id = record.fragment_id
        before = self._store.value(fragment_id)
        entries = merge_sources(self._journal, self._maths.sizes(fragment_id), closed.entries)
        # A merge changes what it is given, and the stored bytes are added to the published value from before it.
        given = dataclasses.replace(before, published_N=before.published_N.clone())
        merged = self._maths.merge(fragment_id, given, record.version, closed.global_step, entries)
        stored = self._publication(fragment_id, record.ref)
        published_N = self._maths.published_after(fragment_id, before.published_N, stored)
        for what, found in (("publication", digest(published_N)), ("merge", merged.value.digest)):
            if found != record.digest:
                self._differs(
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
                )
        value = dataclasses.replace(merged.value, digest=record.digest, published_N=published_N)
        self._store.install(MergedFragment(fragment_id=fragment_id, value=value, payload=stored))

    def _publication(self, fragment_id: FragmentId, ref: str) -> Payload:
        record = self._journal.read(parse_ref(ref))
        if record.kind != KIND_PUBLICATION:
            raise JournalError(f"the record at {ref} is of kind {record.kind} and not {KIND_PUBLICATION}")
        return self._maths.split(fragment_id, record.payload)


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


def replay_run(run_folder: Path, config: RunConfig) -> ReplayReport:
    """Do all merges of a run again that its journal still allows, and compare every published version.

    Args:
        run_folder: Of a run that has ended, one way or another.
        config: The run's.

    Raises:
        ConfigError: A syncer has the run, or there is none, or nothing of it can be done again.
        StateDamaged: What is needed can't be read any more.
        StorageError: The system refused.
    """
    folder = run_folder / "state"
    _require_left(folder)
    try:
        return _Run(folder, config).report()
    except (JournalError, CheckpointError) as exc:
        _require_left(folder)
        raise StateDamaged(f"the run can't be done again: {exc}") from exc
    except StorageError:
        _require_left(folder)
        raise


def _require_left(folder: Path) -> None:
    if owner := owner_of(folder):
        raise ConfigError(
            f"the run is going on: {owner} has it", where=str(folder), hint="stop it, or wait for its end"
        )


class _Run:
    """One replay."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._snapshots = folder / "snapshots"
        self._config = config
        self._maths = run_maths(config, run_layout(config))
        if not (folder / "journal").is_dir():
            raise ConfigError("there is no journal in this folder", where=str(folder))
        self._journal = JournalReader.open(folder / "journal")
        self._notes: list[str] = []
        self._difference: Difference | None = None
        self._same: list[str] = []

    def report(self) -> ReplayReport:
        with self._journal:
            places = self._places()
            since, state, store, place = self._begin(places)
            begun = tuple(state.versions)
            replay = TapeReplay(self._journal, self._maths, state, store, self._differs)
            self._compare(since, places, place, replay, store)
            for ref, record in tape_after(self._journal, place, lambda item: self._notes.append(_passed(item))):
                reached = tuple(state.versions)
                replay.apply(record)
                self._compare(since, places, ref, replay, store)
                if self._difference is not None:
                    # What differs isn't among what is the same.
                    return self._finished(since, begun, reached)
        return self._finished(since, begun, tuple(state.versions))

    def _places(self) -> dict[JournalRef | None, str]:
        """The good snapshots, by their place on the tape, oldest first."""
        return {snapshot_place(manifest): name for name, manifest in good_snapshots(self._snapshots).items()}

    def _begin(self, places: dict[JournalRef | None, str]) -> tuple[str, SyncerState, FragmentStore, JournalRef | None]:
        if self._journal.segments[0] == 1:
            store = FragmentStore.fresh(self._maths.layout, model_tensors(build_model(self._config)))
            state = SyncerState(
                parameters=tuple(fragment.numel for fragment in self._maths.layout.fragments),
                initial_digests=tuple(value.digest for value in store.values()),
                keep_updates=self._config.syncer.keep_updates,
            )
            return "the initial weights", state, store, None
        for place, name in places.items():
            if place is not None and self._journal.reaches(place):
                state, store = restored_state(load_snapshot(self._snapshots, name), name, self._maths)
                self._notes.append(f"what was published before snapshot {name} isn't kept any more")
                return name, state, store, place
        raise CheckpointError(f"no good snapshot in {self._snapshots} is one that the journal goes on from")

    def _differs(self, difference: Difference) -> None:
        if self._difference is None:
            self._difference = difference

    def _compare(
        self,
        since: str,
        places: dict[JournalRef | None, str],
        place: JournalRef | None,
        replay: TapeReplay,
        store: FragmentStore,
    ) -> None:
        """See that a snapshot of this moment, if there is one, has the same bits."""
        name = places.get(place)
        if name is None or name == since:
            return
        _, theirs = restored_state(load_snapshot(self._snapshots, name), name, self._maths)
        for index, (ours, other) in enumerate(zip(store.values(), theirs.values(), strict=True)):
            fragment_id = FragmentId(index)
            for part in _PARTS:
                expected, found = _digest_of(other, part), _digest_of(ours, part)
                if expected != found or ours.version != other.version:
                    self._differs(
                        Difference(
                            what=part,
                            where=name,
                            round_id=replay.rounds.get(fragment_id, RoundId(0)),
                            fragment_id=fragment_id,
                            from_version=ours.version,
                            to_version=other.version,
                            expected=expected,
                            found=found,
                        )
                    )
        if self._difference is None:
            self._same.append(name)

    def _finished(self, since: str, begun: tuple[Version, ...], reached: tuple[Version, ...]) -> ReplayReport:
        return ReplayReport(
            since=since,
            begun=begun,
            reached=reached,
            snapshots=tuple(self._same),
            difference=self._difference,
            notes=tuple(self._notes),
        )


def _digest_of(value: FragmentValue, part: str) -> str:
    return digest({"exact": value.exact_N, "published": value.published_N, "momentum": value.momentum_N}[part])


def _passed(item: Damage) -> str:
    return f"{item.error()}; nothing that was done again needs it"


def _decoded(line: bytes, ref: JournalRef) -> TapeRecord:
    try:
        data: Any = json.loads(line)
        return cast("TapeRecord", serial.from_json(TapeRecord, data))
    except (DecodeError, ValueError) as exc:
        raise JournalError(f"the tape can't be read in segment {ref.segment} at offset {ref.offset}: {exc}") from exc
