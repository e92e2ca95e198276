"""What a run's folder says was published, beside the journal: nobody may call a run proven whose journal ends before.

Snapshots say most, and may be gone. These are written later than the tape, so that each says no more than it does, but
where the tape lost its end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from wan_diloco.algorithm.layout import Layout
from wan_diloco.errors import CheckpointError, StorageError
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.storage import load_snapshot, read_json
from wan_diloco.syncer.fragments_store import FragmentStore
from wan_diloco.syncer.refragment import digests_of
from wan_diloco.telemetry import METRICS_FILE, SUMMARY_FILE, read_metrics
from wan_diloco.telemetry.records import RoundRecord

__all__ = ["beyond"]

_PUBLISHED: Final = "published"
_FINAL: Final = "final"


def beyond(
    run_folder: Path, state: SyncerState, layout: Layout, store: FragmentStore, note: Callable[[str], None]
) -> tuple[str, ...]:
    """What the folder says was published that the tape doesn't lead to, one sentence each.

    Args:
        run_folder: Of the run.
        state: After the last record of the tape.
        layout: Of then.
        store: The values of then.
        note: Told what couldn't be asked, and why.

    Raises:
        ConfigError: The metrics file is there and can't be read.
    """
    found = [] if state.term else ["no record of the run's begin is left in the journal"]
    found += _of_metrics(run_folder, state)
    found += _of_summary(run_folder, state)
    found += _of_final(run_folder, state, layout, store, note)
    return tuple(found)


def _of_metrics(run_folder: Path, state: SyncerState) -> list[str]:
    # An id is never used again, also not where the state went back. A round that is closed here and published there
    # has lost its end.
    closed = {record.round_id for record in state.closed.values()}
    records = [line.record for line in read_metrics(run_folder / METRICS_FILE).lines]
    later = {
        item.round_id
        for item in records
        if isinstance(item, RoundRecord) and (item.round_id >= state.next_round or item.round_id in closed)
    }
    if not later:
        return []
    return [f"{METRICS_FILE} has {len(later)} published rounds that aren't in the journal, up to round {max(later)}"]


def _of_summary(run_folder: Path, state: SyncerState) -> list[str]:
    try:
        summary = read_json(run_folder / SUMMARY_FILE)
    except StorageError:
        return []
    if summary.get("finished") is True and not state.ended:
        return [f"{SUMMARY_FILE} says that the run is finished, and the journal doesn't come to its end"]
    rounds = summary.get("rounds")
    if isinstance(rounds, int) and rounds > state.totals.rounds:
        return [f"{SUMMARY_FILE} counts {rounds} rounds, and the journal comes to {state.totals.rounds}"]
    return []


def _of_final(
    run_folder: Path, state: SyncerState, layout: Layout, store: FragmentStore, note: Callable[[str], None]
) -> list[str]:
    where = f"{_PUBLISHED}/{_FINAL}"
    if not (run_folder / _PUBLISHED / _FINAL).is_dir():
        return []
    try:
        final = load_snapshot(run_folder / _PUBLISHED, _FINAL)
        digests = digests_of(layout, final.tensors)
    except (CheckpointError, KeyError) as exc:
        note(f"{where} was passed over: {exc}")
        return []
    if digests == tuple(value.digest for value in store.values()):
        return []
    step = final.manifest.get("global_step")
    return [f"{where}, of step {step}, holds other weights than the journal leads to, which are of {state.global_step}"]
