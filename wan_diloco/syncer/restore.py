"""A syncer's state folder: begin a run in it, or take one up again to the very same bits.

    state/owner.lock     one owner
    state/journal/       tape, chunks of contributions, contributions, publications
    state/snapshots/     all values, the machine's state, and up to where the tape is in it

Taking up: the newest good snapshot, then the tape after it (`replay`). Damage to what nobody needs any more
is said; damage to what is needed ends the process for good, since the next one would find the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.config import check_shards, require_resumable
from wan_diloco.errors import CheckpointError, ConfigError, JournalError, StateDamaged
from wan_diloco.protocol import serial
from wan_diloco.protocol.epochs import next_epoch
from wan_diloco.protocol.state_json import state_to_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import Refragmented, TapeRecord
from wan_diloco.storage import (
    Damage,
    FolderLock,
    Journal,
    JournalReader,
    JournalRef,
    LatestSnapshot,
    Snapshot,
    latest_snapshot,
    remove_leftovers,
)
from wan_diloco.storage.filesystem import ensure_folder, translated
from wan_diloco.storage.journal_reader import foreign_files
from wan_diloco.syncer.fragments_store import FragmentStore, Maths, snapshot_tensors
from wan_diloco.syncer.journal_keeper import KIND_TAPE
from wan_diloco.syncer.refragment import Cutting, fragments_of, plan_cut
from wan_diloco.syncer.replay import Difference, TapeReplay, restored_state, snapshot_place, tape_after
from wan_diloco.syncer.store_link import StoreLink, require_whole
from wan_diloco.units import Epoch, Term

if TYPE_CHECKING:
    import torch

__all__ = ["SNAPSHOT_NAME", "Restored", "open_state", "snapshot_manifest", "snapshot_name", "state_refs"]

SNAPSHOT_NAME: Final = re.compile(r"state-(0|[1-9][0-9]*)", re.ASCII)
"""What `snapshot_name` makes; whatever else lies among the snapshots is none of ours."""

_PURPOSE: Final = "syncer"
_HELP: Final = (
    "Put back a copy of that file, or of the whole folder; where there is none, `wan-diloco export` writes the model "
    "of the newest good snapshot, and another run can begin in another folder"
)
_UNFLUSHED: Final = 'the process before didn\'t flush all that it had said (syncer.durability = "interval")'
_FETCHED: Final = "the state is what the store had, which may be less than was done"
# Fragments that are merged again at a time; each takes its own memory.
_REPLAY_THREADS_MAX: Final = 4
_NO_TERM: Final = Term(0)
_FIRST_EPOCH: Final = Epoch(0)
# Where the tape of a run begins that has no record yet.
_BEGINNING: Final = JournalRef(1, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a service begins with.

    Attributes:
        lock: Held; to be released at the end.
        journal: Open.
        state: The machine's durable state.
        store: All fragments, at the versions that the state names.
        last_tape: Where the tape's newest record is; None at the very beginning.
        parameters: Of each fragment before them.
        tape: The records that were replayed.
        resumed: Whether there was a run in the folder.
        notes: What the operator should know, one sentence each.
        snapshot: The newest one in the folder that is good: what was begun or taken up with.
        new_epoch: Why this start begins a new epoch, as what follows "since"; empty where it begins none.
        term_min, epoch_min: The machine must begin with these at least.
    """

    lock: FolderLock
    journal: Journal
    state: SyncerState
    store: FragmentStore
    last_tape: JournalRef | None
    parameters: tuple[int, ...]
    tape: tuple[TapeRecord, ...]
    resumed: bool
    notes: tuple[str, ...]
    snapshot: str
    new_epoch: str = ""
    term_min: Term = _NO_TERM
    epoch_min: Epoch = _FIRST_EPOCH


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
    cutting: Cutting,
    initial: Callable[[], Mapping[str, torch.Tensor]],
    keep_updates: int,
    agreement: tuple[tuple[str, str], ...],
    link: StoreLink | None = None,
) -> Restored:
    """Lock a state folder, and begin or take up the run in it.

    Args:
        folder: `state/` of the run; created where missing.
        resume: Whether a run that is in it may be taken up. With none in it, one begins all the same, so
            that a supervisor may always ask for it.
        maths: Of the run's layout.
        cutting: Into how many fragments that is, and whether a run that has another number is cut anew.
        initial: Makes the initial weights, by canonical name; not called where there is a run already that stays as it
            is cut.
        keep_updates: Publications that the state keeps of each fragment.
        agreement: The settings that all ends share; another run's state is refused.
        link: The store that has copies of the state; an empty folder begins with what is there. The caller leaves it.

    Raises:
        StorageLocked: Another process has the folder, or the store.
        StateTakenOver: Another process took the store while we read.
        ConfigError: There is a run in it and `resume` is false, or one with settings that it can't go on with; or
            the run went on elsewhere since.
        StateDamaged: No snapshot is good, or the journal doesn't lead on from it any more.
        StoreMissing: The store's bucket doesn't exist.
        StorageError: The system refused.
    """
    try:
        return _open_state(folder, resume, maths, cutting, initial, keep_updates, agreement, link)
    except (JournalError, CheckpointError) as exc:
        raise StateDamaged(f"the run in {folder} can't be taken up: {exc}. {_HELP}") from exc


def _open_state(
    folder: Path,
    resume: bool,
    maths: Maths,
    cutting: Cutting,
    initial: Callable[[], Mapping[str, torch.Tensor]],
    keep_updates: int,
    agreement: tuple[tuple[str, str], ...],
    link: StoreLink | None,
) -> Restored:
    if link is not None and not folder.exists():
        # A store that can't be used must leave no folder behind that looks like a run's.
        link.require_there()
    lock = FolderLock(folder, _PURPOSE)
    with contextlib.ExitStack() as opened:
        opened.enter_context(lock)
        snapshots = folder / "snapshots"
        ensure_folder(snapshots)
        remove_leftovers(snapshots)
        if link is None:
            require_whole(folder)
        else:
            link.tidy(folder)
        latest = latest_snapshot(snapshots, SNAPSHOT_NAME)
        if latest is not None and not resume:
            raise ConfigError(
                "there is a run in this folder already", where=str(folder), hint="give --resume to take it up"
            )
        if link is not None:
            link.enter(folder, has_run=latest is not None, resume=resume)
            latest = latest or latest_snapshot(snapshots, SNAPSHOT_NAME)
        holding = None
        if latest is not None:
            # Before the journal is opened, which may cut a torn tail off.
            _require_resumable(latest, agreement, cutting, folder)
            # Places that were used before must not be used again: the next restart would skip what stands there.
            holding = snapshot_place(latest.snapshot.manifest) or _BEGINNING
        journal = opened.enter_context(Journal.open(folder / "journal", holding=holding))
        if link is not None and link.fetched is not None:
            # What is fetched stays as it was shipped, since the store's manifests name it.
            journal.seal(even_empty=True)
        restored = (
            _begin(folder, lock, journal, maths, initial, keep_updates, agreement)
            if latest is None
            else _take_up(latest, lock, journal, cutting, initial, agreement, folder)
        )
        if link is not None:
            restored = _settle(folder, restored, link)
        restored = replace(restored, notes=(*restored.notes, *_foreign_notes(folder)))
        # All is well: lock and journal are the caller's to close.
        opened.pop_all()
        return restored


def _begin(
    folder: Path,
    lock: FolderLock,
    journal: Journal,
    maths: Maths,
    initial: Callable[[], Mapping[str, torch.Tensor]],
    keep_updates: int,
    agreement: tuple[tuple[str, str], ...],
) -> Restored:
    if next(iter(journal.records()), None) is not None:
        raise CheckpointError(f"{folder} has a journal and no snapshot: what it builds on is missing")
    store = FragmentStore.fresh(maths.layout, initial())
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
        parameters=state.parameters,
        tape=(),
        resumed=False,
        notes=(),
        snapshot=snapshot_name(0),
    )


def _require_resumable(
    latest: LatestSnapshot, agreement: tuple[tuple[str, str], ...], cutting: Cutting, folder: Path
) -> None:
    manifest = latest.snapshot.manifest
    require_resumable(agreement, dict(manifest["agreement"]), refragment=True, folder=str(folder))
    there = fragments_of(manifest)
    if there != cutting.fragments and not cutting.allowed:
        # It may have been cut anew since; a process that died soon after left no snapshot of it.
        with contextlib.suppress(JournalError), JournalReader.open(folder / "journal") as journal:
            for _, record in tape_after(journal, snapshot_place(manifest), lambda _: None):
                there = record.fragments if isinstance(record, Refragmented) else there
    cutting.require_allowed(there, folder)


def _take_up(
    latest: LatestSnapshot,
    lock: FolderLock,
    journal: Journal,
    cutting: Cutting,
    initial: Callable[[], Mapping[str, torch.Tensor]],
    agreement: tuple[tuple[str, str], ...],
    folder: Path,
) -> Restored:
    there = fragments_of(latest.snapshot.manifest)
    maths = cutting.maths_of(there)
    state, store = restored_state(latest.snapshot, latest.name, maths)
    parameters = state.parameters
    last_tape = snapshot_place(latest.snapshot.manifest)
    # One note a place, whoever comes upon it.
    notes = {(item.segment, item.start): _said(item) for item in journal.damaged}
    other = _other_notes(latest, journal)

    def differs(difference: Difference) -> None:
        version = f"fragment {difference.fragment_id}, version {difference.to_version}"
        if difference.what == "publication":
            raise CheckpointError(
                f"{version}: the stored update leads to digest {difference.found}, the tape says {difference.expected}"
            )
        other.append(
            f"{version}: merging again gave other bits than the first time; the published bits stand, the difference "
            "goes into the next round"
        )

    def damaged(item: Damage) -> None:
        notes[item.segment, item.start] = _said(item)

    tape: list[TapeRecord] = []
    with _executor() as executor:
        replay = TapeReplay(journal, maths, state, store, differs, cutting.maths_of, executor)
        for ref, record in tape_after(journal, last_tape, damaged):
            replay.apply(record)
            tape.append(record)
            last_tape = ref
            there = record.fragments if isinstance(record, Refragmented) else there
        replay.settle()
    cutting.require_allowed(there, folder)
    # Of those that are gone since long only the tape and the state know.
    check_shards(json.loads(dict(agreement)["regions"]), {str(name): shard for name, shard in state.shards.items()})
    new_epoch = [] if state.durable or state.ended else [_UNFLUSHED]
    if there != cutting.fragments:
        # Last: a start that is refused must change nothing.
        cut = plan_cut(cutting, there, state, store.values(), initial())
        last_tape = journal.append(KIND_TAPE, serial.dumps(cut))
        journal.sync()
        replay.apply(cut)
        tape.append(cut)
        other.append(_cut(cut))
    if tape and isinstance(tape[-1], Refragmented):
        # This start's, or that of one that was broken off before it could say so.
        new_epoch.append("the parameters are cut into other fragments")
    return Restored(
        lock=lock,
        journal=journal,
        state=state,
        store=store,
        last_tape=last_tape,
        parameters=parameters,
        tape=tuple(tape),
        resumed=True,
        notes=(*other, *notes.values()),
        snapshot=latest.name,
        new_epoch=" and ".join(new_epoch),
    )


@contextlib.contextmanager
def _executor() -> Iterator[Executor]:
    """As many threads as there are processors, and no more than help: learners wait for this."""
    executor = ThreadPoolExecutor(min(_REPLAY_THREADS_MAX, len(os.sched_getaffinity(0))), thread_name_prefix="replay")
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _other_notes(latest: LatestSnapshot, journal: Journal) -> list[str]:
    notes = [f"snapshot {item.name} was passed over: {item.problem}" for item in latest.skipped]
    if latest.skipped:
        notes.append(f"snapshot {latest.name} is taken instead, and the journal from there on")
    if journal.torn is not None and journal.torn.dropped_bytes:
        notes.append(f"a torn tail of {journal.torn.dropped_bytes} bytes was cut off the journal")
    if journal.stray:
        numbers = ", ".join(map(str, journal.stray))
        notes.append(
            f"segments of the journal are missing before {journal.segments[0]}; {numbers} lead nowhere any more"
        )
    return notes


def _foreign_notes(folder: Path) -> Iterator[str]:
    """What lies where a run's own is, and is ignored: somebody may think that it counts."""
    snapshots = folder / "snapshots"
    with translated("can't list the snapshots in", snapshots):
        names = sorted(path.name for path in snapshots.iterdir() if not SNAPSHOT_NAME.fullmatch(path.name))
    for name in names:
        yield f"{snapshots / name} is ignored: no snapshot of a syncer has such a name"
    for name in foreign_files(folder / "journal"):
        yield f"{folder / 'journal' / name} is ignored: no segment of a journal has such a name"


def _cut(record: Refragmented) -> str:
    return (
        f"the parameters are cut into {len(record.parameters)} fragments from here on, with the values that they had; "
        f"epoch {record.epoch} begins, and work that was under way is discarded"
    )


def _said(item: Damage) -> str:
    return f"{item.error()}; nothing that a restart needs is in it, and a contribution that is will be discarded"


def _settle(folder: Path, restored: Restored, link: StoreLink) -> Restored:
    """Go on above all that the store has seen: with a higher term, and in another epoch where the state went back.

    Ordering: after the values were cut anew, if they are, since that begins an epoch as well.
    """
    state = restored.state
    # The lock may name an epoch that a process was to begin, and didn't live to.
    epoch_min = max(state.epoch, link.lock.epoch)
    if link.begins_epoch:
        # Numbers of rounds leap by epochs, and one of those that another may have had is a cut's that was just made.
        is_cut = bool(restored.tape) and isinstance(restored.tape[-1], Refragmented)
        epoch_min = max(state.epoch, link.lock.epoch + is_cut) + 1
    epoch = next_epoch(state, Epoch(epoch_min))
    new_epoch = [restored.new_epoch] if restored.new_epoch else []
    if epoch > state.epoch and link.begins_epoch:
        new_epoch.append(_FETCHED if link.fetched is not None else "another syncer had the store before")
    elif epoch > state.epoch and not new_epoch:
        new_epoch.append("the start before this one, which was to begin it, was broken off")
    link.settled(folder, term=state.term + 1, epoch=epoch)
    return replace(
        restored,
        notes=(*restored.notes, *link.notes),
        new_epoch=" and ".join(new_epoch),
        term_min=Term(link.lock.term),
        epoch_min=Epoch(link.lock.epoch),
    )
