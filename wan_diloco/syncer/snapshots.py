"""Snapshots of the syncer's state while it runs, and what of the journal they make superfluous.

A capture holds all values as they are at one moment: the service goes on merging, on copies of what is
held, while another thread writes, and each fragment is let go of as soon as it is written. One at a time;
one that is asked for meanwhile is skipped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from wan_diloco.errors import CheckpointError, ConfigError, StateDamaged, StorageError
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.storage import JournalRef, Snapshot, keep_last
from wan_diloco.syncer.fragments_store import FragmentStore, Hold, snapshot_tensors
from wan_diloco.syncer.journal_keeper import JournalKeeper
from wan_diloco.syncer.restore import SNAPSHOT_NAME, snapshot_manifest, snapshot_name, state_refs
from wan_diloco.syncer.workers import Workers, in_executor
from wan_diloco.units import FragmentId

__all__ = ["Capture", "SnapshotKeeper", "newest_sequence"]

# The newest, and one to fall back on: what either needs of the journal stays.
_KEPT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The state at one moment.

    Attributes:
        hold: On all values.
        floor: The oldest journal segment that a restart from it would read.
    """

    hold: Hold
    manifest: dict[str, Any]
    floor: int
    last_tape: JournalRef | None


class SnapshotKeeper:
    """Takes snapshots and tidies up behind them.

    Owner: the event loop.

    Args:
        folder: `state/snapshots`.
        agreement: The settings that a later life must share.
        keeper: Has the journal.
        workers: Where writing happens.
        sequence: Number of the newest snapshot that is there.
        floor: The oldest segment that it needs.
        keep_journal: Whether nothing of the journal is ever dropped.
        ship: Told of each snapshot that is durable, and the oldest segment that it needs, before anything is removed;
            None where there is no store.
    """

    def __init__(
        self,
        folder: Path,
        agreement: tuple[tuple[str, str], ...],
        keeper: JournalKeeper,
        workers: Workers,
        *,
        sequence: int,
        floor: int,
        keep_journal: bool,
        ship: Callable[[str, int], None] | None = None,
    ) -> None:
        """Begin after a snapshot that exists."""
        self._folder = folder
        self._agreement = agreement
        self._keeper = keeper
        self._workers = workers
        self._sequence = sequence
        self._keep_journal = keep_journal
        self._ship = ship
        self._floors: deque[int] = deque([floor], maxlen=_KEPT)
        self._covered: JournalRef | None = None
        self._busy = False
        # Those are good: they were written by this process, and flushed.
        self._written: deque[str] = deque(maxlen=_KEPT)
        self.skipped = 0

    def capture(self, state: SyncerState, store: FragmentStore) -> Capture | None:
        """Take hold of everything now; None when nothing happened since the last one, or one is being written.

        Ordering: while the store is settled, every record that the state has seen is on the tape, and every
        publication on the tape is in the store.
        """
        assert not self._keeper.recording, "the state is ahead of the tape"
        if self._keeper.last_tape == self._covered:
            return None
        if self._busy:
            self.skipped += 1
            return None
        self._busy = True
        return Capture(
            hold=store.hold(),
            manifest=snapshot_manifest(state, self._agreement, self._keeper.last_tape),
            floor=self._keeper.floor(state_refs(state)),
            last_tape=self._keeper.last_tape,
        )

    async def write(self, capture: Capture) -> str:
        """Make a capture durable, then drop what only older ones needed.

        Returns:
            What went wrong in one sentence; empty when nothing did. The last good snapshot stands anyway.

        Raises:
            StateDamaged: The state's folder isn't ours any more: it was removed or replaced, or another process
                writes into it. The process must end.
        """
        self._sequence += 1
        name = snapshot_name(self._sequence)
        try:
            # The tape up to here must not be lost behind a snapshot that says it has it: its places would be
            # used again, and the next restart would skip what stands there.
            await in_executor(self._workers.journal, self._keeper.check)
            floors = deque([*self._floors, capture.floor], maxlen=_KEPT)
            problem = await in_executor(self._workers.files, lambda: self._write(name, capture, min(floors)))
        except StateDamaged:
            raise
        except (StorageError, ConfigError) as exc:
            return f"no snapshot could be written: {exc}"
        finally:
            self._busy = False
            capture.hold.end()
        self._covered = capture.last_tape
        self._floors = floors
        return problem

    def _write(self, name: str, capture: Capture, floor: int) -> str:
        tensors = snapshot_tensors(tuple(capture.hold.values.values()))
        capture.hold.values = {}

        def written(tensor: str) -> None:
            # The last of each fragment, as `snapshot_tensors` has them.
            part, _, fragment_id = tensor.partition(".")
            if part == "momentum":
                capture.hold.let_go(FragmentId(int(fragment_id)))

        try:
            Snapshot(tensors=tensors, manifest=capture.manifest).write(self._folder, name, written)
        except CheckpointError as exc:
            # A number that is given out once: nobody but another process has used it.
            raise StateDamaged(
                f"{exc}, and this syncer didn't write it: another process writes into {self._folder.parent}; stop "
                "both, and start one, with --resume"
            ) from exc
        self._written.append(name)
        if self._ship is not None:
            self._ship(name, capture.floor)
        try:
            keep_last(self._folder, _KEPT, self._written, SNAPSHOT_NAME)
            if not self._keep_journal:
                self._keeper.drop_before(floor)
        except (StorageError, ConfigError) as exc:
            return f"what the newest snapshot makes superfluous stays until the next: {exc}"
        return ""


def newest_sequence(folder: Path) -> int:
    """Number of the newest snapshot in the folder, good or not; what has another name than a snapshot isn't one."""
    names = [path.name for path in folder.glob("state-*") if SNAPSHOT_NAME.fullmatch(path.name)]
    return max((int(name.removeprefix("state-")) for name in names), default=0)
