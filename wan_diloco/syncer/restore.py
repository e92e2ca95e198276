"""A syncer's state folder: begin a run in it, or take one up again to the very same bits.

    state/owner.lock     one owner
    state/journal/       tape, chunks of contributions, contributions, publications
    state/snapshots/     all values, the machine's state, and up to where the tape is in it

Taking up: the newest good snapshot, then the tape after it. A merge is done again from the journalled
contributions, since exact value and momentum are stored nowhere else; the published value comes from the
stored bytes, which learners may have already, and must have the digest on the tape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from wan_diloco.algorithm.publication import digest
from wan_diloco.errors import CheckpointError, ConfigError, DecodeError, JournalError
from wan_diloco.protocol import serial
from wan_diloco.protocol.admission import differing_setting
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import FragmentPublished, RoundClosed, TapeRecord
from wan_diloco.storage import (
    FolderLock,
    Journal,
    JournalRef,
    LatestSnapshot,
    Snapshot,
    latest_snapshot,
    remove_leftovers,
)
from wan_diloco.storage.filesystem import ensure_folder
from wan_diloco.syncer.fragments_store import FragmentStore, Maths, MergedFragment, snapshot_tensors
from wan_diloco.syncer.journal_keeper import KIND_PUBLICATION, KIND_TAPE, parse_ref
from wan_diloco.syncer.payloads import merge_sources
from wan_diloco.units import FragmentId

if TYPE_CHECKING:
    import torch

    from wan_diloco.algorithm.codec import Payload

__all__ = ["Restored", "open_state", "snapshot_manifest", "snapshot_name", "state_refs"]

_PURPOSE: Final = "syncer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a service begins with.

    Attributes:
        lock: Held; to be released at the end.
        journal: Open.
        state: The machine's durable state.
        store: All fragments, at the versions that the state names.
        last_tape: Where the tape's newest record is; None at the very beginning.
        tape: The records that were replayed.
        resumed: Whether there was a run in the folder.
        notes: What the operator should know, one sentence each.
    """

    lock: FolderLock
    journal: Journal
    state: SyncerState
    store: FragmentStore
    last_tape: JournalRef | None
    tape: tuple[TapeRecord, ...]
    resumed: bool
    notes: tuple[str, ...]


def snapshot_name(sequence: int) -> str:
    """Names sort as numbers do, and the order of names is the order of age."""
    return f"state-{sequence}"


def snapshot_manifest(
    state: SyncerState, agreement: tuple[tuple[str, str], ...], last_tape: JournalRef | None
) -> dict[str, Any]:
    """What a snapshot says beside its tensors; taken at once, so that it belongs to them."""
    return {
        "state": state_to_json(state),
        "agreement": [list(pair) for pair in agreement],
        "last_tape": None if last_tape is None else [last_tape.segment, last_tape.offset, last_tape.length],
    }


def state_refs(state: SyncerState) -> Iterator[str]:
    """All places in the journal that a state refers to."""
    for pool in state.pool:
        for journalled in pool.values():
            yield journalled.ref
    for closed in state.closed.values():
        for entry in closed.entries:
            yield entry.ref
    for updates in state.updates:
        for update in updates:
            yield update.ref


def open_state(
    folder: Path,
    *,
    resume: bool,
    maths: Maths,
    initial: Mapping[str, torch.Tensor],
    keep_updates: int,
    agreement: tuple[tuple[str, str], ...],
) -> Restored:
    """Lock a state folder, and begin or take up the run in it.

    Args:
        folder: `state/` of the run; created where missing.
        resume: Whether a run that is in it may be taken up. With none in it, one begins all the same, so
            that a supervisor may always ask for it.
        maths: Of the run's layout.
        initial: The initial weights, by canonical name.
        keep_updates: Publications that the state keeps of each fragment.
        agreement: The settings that all ends share; another run's state is refused.

    Raises:
        StorageLocked: Another process has the folder.
        ConfigError: There is a run in it and `resume` is false, or it is a run with other settings.
        CheckpointError: No snapshot is good, or the journal doesn't lead from it to where the tape says.
        JournalError: The journal is damaged.
        StorageError: The system refused.
    """
    lock = FolderLock(folder, _PURPOSE)
    with contextlib.ExitStack() as opened:
        opened.enter_context(lock)
        snapshots = folder / "snapshots"
        ensure_folder(snapshots)
        remove_leftovers(snapshots)
        latest = latest_snapshot(snapshots)
        if latest is not None and not resume:
            raise ConfigError(
                "there is a run in this folder already", where=str(folder), hint="give --resume to take it up"
            )
        if latest is not None:
            # Before the journal is opened, which may cut a torn tail off.
            _require_same(latest, agreement)
        journal = opened.enter_context(Journal.open(folder / "journal"))
        restored = (
            _begin(folder, lock, journal, maths, initial, keep_updates, agreement)
            if latest is None
            else _take_up(latest, lock, journal, maths)
        )
        # All is well: lock and journal are the caller's to close.
        opened.pop_all()
        return restored


def _begin(
    folder: Path,
    lock: FolderLock,
    journal: Journal,
    maths: Maths,
    initial: Mapping[str, torch.Tensor],
    keep_updates: int,
    agreement: tuple[tuple[str, str], ...],
) -> Restored:
    if next(iter(journal.records()), None) is not None:
        raise CheckpointError(f"{folder} has a journal and no snapshot: what it builds on is missing")
    store = FragmentStore.fresh(maths.layout, initial)
    values = store.values()
    state = SyncerState(
        parameters=tuple(fragment.numel for fragment in maths.layout.fragments),
        initial_digests=tuple(value.digest for value in values),
        keep_updates=keep_updates,
    )
    # From here on the folder has a run in it, and every restart has a snapshot to begin from.
    manifest = snapshot_manifest(state, agreement, None)
    Snapshot(tensors=snapshot_tensors(values), manifest=manifest).write(folder / "snapshots", snapshot_name(0))
    return Restored(
        lock=lock,
        journal=journal,
        state=state,
        store=store,
        last_tape=None,
        tape=(),
        resumed=False,
        notes=(),
    )


def _require_same(latest: LatestSnapshot, agreement: tuple[tuple[str, str], ...]) -> None:
    theirs = dict(latest.snapshot.manifest["agreement"])
    setting = differing_setting(agreement, theirs)
    if setting is not None:
        key, mine = setting
        raise ConfigError(f"the run in the folder was begun with {theirs.get(key)}, and it is {mine} now", where=key)


def _take_up(latest: LatestSnapshot, lock: FolderLock, journal: Journal, maths: Maths) -> Restored:
    manifest = latest.snapshot.manifest
    notes = [f"snapshot {item.name} was passed over: {item.problem}" for item in latest.skipped]
    if journal.torn is not None:
        notes.append(f"a torn tail of {journal.torn.dropped_bytes} bytes was cut off the journal")
    try:
        state = state_from_json(manifest["state"])
    except DecodeError as exc:
        raise CheckpointError(f"snapshot {latest.name} can't be used: {exc.detail}") from exc
    store = FragmentStore.restore(maths.layout, latest.snapshot.tensors, state.versions)
    _check_digests(state, store)
    last_tape = None if manifest["last_tape"] is None else JournalRef(*manifest["last_tape"])
    replay = _Replay(journal, maths, state, store)
    tape: list[TapeRecord] = []
    for ref, head in journal.records():
        if head.kind != KIND_TAPE or (last_tape is not None and ref <= last_tape):
            continue
        record = _decoded(head.meta, ref)
        replay.apply(record)
        tape.append(record)
        last_tape = ref
    return Restored(
        lock=lock,
        journal=journal,
        state=state,
        store=store,
        last_tape=last_tape,
        tape=tuple(tape),
        resumed=True,
        notes=(*notes, *replay.notes),
    )


class _Replay:
    """Applies records to state and values side by side."""

    def __init__(self, journal: Journal, maths: Maths, state: SyncerState, store: FragmentStore) -> None:
        self._journal = journal
        self._maths = maths
        self._state = state
        self._store = store
        self.notes: list[str] = []

    def apply(self, record: TapeRecord) -> None:
        if isinstance(record, FragmentPublished):
            self._publish(record, self._state.closed[record.fragment_id])
        self._state.apply(record)

    def _publish(self, record: FragmentPublished, closed: RoundClosed) -> None:
        fragment_id = record.fragment_id
        before = self._store.value(fragment_id)
        entries = merge_sources(self._journal, self._maths.sizes(fragment_id), closed.entries)
        # A merge changes what it is given, and the stored bytes are added to the published value from before it.
        given = dataclasses.replace(before, published_N=before.published_N.clone())
        merged = self._maths.merge(fragment_id, given, record.version, closed.global_step, entries)
        stored = self._publication(fragment_id, record.ref)
        published_N = self._maths.published_after(fragment_id, before.published_N, stored)
        if digest(published_N) != record.digest:
            raise CheckpointError(
                f"fragment {fragment_id} at version {record.version} comes out with digest {digest(published_N)}, "
                f"the tape says {record.digest}"
            )
        if merged.value.digest != record.digest:
            self.notes.append(
                f"fragment {fragment_id}, version {record.version}: merging again gave other bits than the first "
                "time; the published bits stand, the difference goes into the next round"
            )
        value = dataclasses.replace(merged.value, digest=record.digest, published_N=published_N)
        self._store.install(MergedFragment(fragment_id=fragment_id, value=value, payload=stored))

    def _publication(self, fragment_id: FragmentId, ref: str) -> Payload:
        record = self._journal.read(parse_ref(ref))
        if record.kind != KIND_PUBLICATION:
            raise JournalError(f"the record at {ref} is of kind {record.kind} and not {KIND_PUBLICATION}")
        return self._maths.split(fragment_id, record.payload)


def _check_digests(state: SyncerState, store: FragmentStore) -> None:
    for index, (value, expected) in enumerate(zip(store.values(), state.digests, strict=True)):
        if value.digest != expected:
            raise CheckpointError(f"fragment {index} of the snapshot has digest {value.digest}, not {expected}")


def _decoded(line: bytes, ref: JournalRef) -> TapeRecord:
    try:
        return cast("TapeRecord", serial.from_json(TapeRecord, json.loads(line)))
    except (DecodeError, ValueError) as exc:
        raise JournalError(f"the tape can't be read in segment {ref.segment} at offset {ref.offset}: {exc}") from exc
