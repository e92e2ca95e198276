"""Proving that a run's published versions are what its journal says: all that it still allows is merged again.

The journal is what counts. A snapshot that is further on than it can't be checked, nor what else the folder says was
published, and a damaged snapshot isn't: all are told, since who hears "the same bits" believes that of the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wan_diloco.algorithm.publication import digest
from wan_diloco.errors import CheckpointError, ConfigError, JournalError, StateDamaged, StorageError
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import FragmentPublished, Refragmented
from wan_diloco.storage import (
    Damage,
    JournalReader,
    JournalRef,
    SkippedSnapshot,
    good_snapshots,
    load_snapshot,
    owner_of,
    trusted_manifests,
)
from wan_diloco.syncer.fragments_store import FragmentStore, FragmentValue, Maths
from wan_diloco.syncer.plan import maths_for
from wan_diloco.syncer.refragment import digests_of, fragments_of
from wan_diloco.syncer.replay import Difference, TapeReplay, restored_state, snapshot_place, tape_after
from wan_diloco.syncer.witnesses import beyond
from wan_diloco.syncer.workers import InlineExecutor
from wan_diloco.units import FragmentId, RoundId, Version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from wan_diloco.config import RunConfig

__all__ = ["WHOLE_JOURNAL_HELP", "ReplayReport", "replay_run"]

WHOLE_JOURNAL_HELP: Final = (
    "Put back a copy of the journal's files, or of the whole folder. The run itself need not be lost: a syncer needs "
    "less of the journal than this, and `wan-diloco syncer --resume` says what it lacks"
)
_SEED_KEY: Final = "run.seed"
_MODEL_KEYS: Final = "model."
_PARTS: Final = ("exact", "published", "momentum")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay came to.

    Attributes:
        since: What it began with: "the initial weights", or a snapshot's name.
        begun, reached: Version of each fragment at its begin and at its end; where the parameters were cut anew on the
            way, of the fragments since then.
        versions: How many published versions were compared and are the same.
        snapshots: Names of those on the way that hold the same bits.
        ahead: Names of snapshots that are further on than the journal, so that what they hold can't be checked.
        beyond: What else the folder says was published and the journal doesn't lead to, one sentence each.
        difference: The first one, where it ended; None where all bits are the same.
        remarks: What happened on the way, one sentence each.
        notes: What the operator should see to, one sentence each.
    """

    since: str
    begun: tuple[Version, ...]
    reached: tuple[Version, ...]
    versions: int
    snapshots: tuple[str, ...]
    ahead: tuple[str, ...]
    beyond: tuple[str, ...]
    difference: Difference | None
    remarks: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def proven(self) -> bool:
        """Whether all that is kept is the same, the newest included."""
        return self.difference is None and not self.ahead and not self.beyond


def replay_run(run_folder: Path, config: RunConfig) -> ReplayReport:
    """Do all merges of a run again that its journal still allows, and compare every published version.

    Args:
        run_folder: Of a run that has ended, one way or another.
        config: The run's.

    Raises:
        ConfigError: A syncer has the run, or there is none, or nothing of it can be done again; or the configuration
            makes other initial weights than the run began with.
        StateDamaged: What is needed can't be read any more.
        StorageError: The system refused.
    """
    folder = run_folder / "state"
    _require_left(folder)
    try:
        return _Run(run_folder, config).report()
    except (JournalError, CheckpointError) as exc:
        _require_left(folder)
        raise StateDamaged(f"the run can't be done again: {exc}. {WHOLE_JOURNAL_HELP}") from exc
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

    def __init__(self, run_folder: Path, config: RunConfig) -> None:
        folder = run_folder / "state"
        self._run_folder = run_folder
        self._snapshots = folder / "snapshots"
        self._config = config
        self._versions = 0
        if not (folder / "journal").is_dir():
            raise ConfigError("there is no journal in this folder", where=str(folder))
        self._journal = JournalReader.open(folder / "journal")
        self._remarks: list[str] = []
        self._notes: list[str] = []
        if self._journal.left_out:
            self._notes.append(f"{self._journal.left_out}; nothing from there on is done again")
        # What each snapshot says, newest first; its tensors may be damaged all the same.
        self._said = dict(trusted_manifests(self._snapshots))
        self._difference: Difference | None = None
        self._same: list[str] = []
        self._beyond: tuple[str, ...] = ()

    def report(self) -> ReplayReport:
        with self._journal:
            places = self._places()
            since, maths, state, store, place = self._begin(places)
            begun = tuple(state.versions)
            replay = TapeReplay(self._journal, maths, state, store, self._differs, self._maths_of, InlineExecutor())
            self._compare(since, places, place, replay, store)
            for ref, record in tape_after(self._journal, place, lambda item: self._notes.append(_passed(item))):
                reached = tuple(state.versions)
                replay.apply(record)
                replay.settle()
                self._compare(since, places, ref, replay, store)
                if self._difference is not None:
                    # What differs isn't among what is the same.
                    return self._finished(since, begun, reached)
                if isinstance(record, FragmentPublished):
                    self._versions += 1
                elif isinstance(record, Refragmented):
                    begun = tuple(state.versions)
                    self._remarks.append(f"cut into {record.fragments} fragments on the way, with the same bits")
            self._beyond = beyond(self._run_folder, state, replay.maths.layout, store, self._notes.append)
        return self._finished(since, begun, tuple(state.versions))

    def _places(self) -> dict[JournalRef | None, str]:
        """The good snapshots, by their place on the tape, oldest first."""
        good = good_snapshots(self._snapshots, self._passed_over)
        return {snapshot_place(manifest): name for name, manifest in good.items()}

    def _passed_over(self, item: SkippedSnapshot) -> None:
        self._notes.append(f"snapshot {item.name} was passed over: {item.problem}")

    def _ahead(self) -> tuple[str, ...]:
        """Snapshots that have more of the tape than the journal has, oldest first."""
        places = {name: snapshot_place(manifest) for name, manifest in reversed(self._said.items())}
        return tuple(
            name
            for name, place in places.items()
            if place is not None and place.segment >= self._journal.segments[0] and not self._journal.reaches(place)
        )

    def _maths_of(self, fragments: int) -> Maths:
        return maths_for(self._config, fragments)

    def _begin(
        self, places: dict[JournalRef | None, str]
    ) -> tuple[str, Maths, SyncerState, FragmentStore, JournalRef | None]:
        if self._journal.segments[0] == 1:
            maths = self._maths_of(self._first_fragments())
            initial = model_tensors(build_model(self._config))
            self._require_initial(initial)
            store = FragmentStore.fresh(maths.layout, initial)
            state = SyncerState(
                parameters=tuple(fragment.numel for fragment in maths.layout.fragments),
                initial_digests=tuple(value.digest for value in store.values()),
                keep_updates=self._config.syncer.keep_updates,
            )
            return "the initial weights", maths, state, store, None
        for place, name in places.items():
            if place is not None and self._journal.reaches(place):
                snapshot = load_snapshot(self._snapshots, name)
                maths = self._maths_of(fragments_of(snapshot.manifest))
                state, store = restored_state(snapshot, name, maths)
                self._notes.append(f"what was published before snapshot {name} isn't kept any more")
                return name, maths, state, store, place
        raise CheckpointError(
            "; ".join([f"no good snapshot in {self._snapshots} is one that the journal goes on from", *self._notes])
        )

    def _require_initial(self, initial: Mapping[str, torch.Tensor]) -> None:
        """See that the run began with these weights: with others every merge would be blamed, and none is at fault."""
        manifest = next(iter(self._said.values()), None)
        if manifest is None:
            return
        digests = digests_of(self._maths_of(fragments_of(manifest)).layout, initial)
        if digests == tuple(manifest["state"]["initial_digests"]):
            return
        had = dict(manifest["agreement"])
        others = [
            f"{key} is {mine} in it, and was {had[key]}"
            for key, mine in self._config.agreement()
            if key in had and had[key] != mine and (key == _SEED_KEY or key.startswith(_MODEL_KEYS))
        ]
        raise ConfigError(
            "it makes other initial weights than the run began with, so that no merge can be done again",
            where=str(self._snapshots.parent.parent / "config.json"),
            hint="; ".join(others) or "use the versions of Python's packages that the run was begun with",
        )

    def _first_fragments(self) -> int:
        """Into how many fragments the run was asked to be cut when it began."""
        manifest = next(iter(self._said.values()), None)
        if manifest is not None and not manifest["state"]["epoch"]:
            return fragments_of(manifest)
        tape = tape_after(self._journal, None, _said_later)
        first = next((record for _, record in tape if isinstance(record, Refragmented)), None)
        return self._config.sync.fragments if first is None else first.fragments_before

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
        _, theirs = restored_state(load_snapshot(self._snapshots, name), name, replay.maths)
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
            versions=self._versions,
            snapshots=tuple(self._same),
            ahead=self._ahead(),
            beyond=self._beyond,
            difference=self._difference,
            remarks=tuple(self._remarks),
            notes=tuple(self._notes),
        )


def _digest_of(value: FragmentValue, part: str) -> str:
    return digest({"exact": value.exact_N, "published": value.published_N, "momentum": value.momentum_N}[part])


def _said_later(_item: Damage) -> None:
    """Who only looks for something leaves it to who does the merges again to tell of damage."""


def _passed(item: Damage) -> str:
    return f"{item.error()}; nothing that was done again needs it"
