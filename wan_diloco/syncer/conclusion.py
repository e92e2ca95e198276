"""What a syncer leaves behind when it ends: the summary and the report, of a finished run or of an interrupted one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan_diloco.errors import StorageError
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.storage import read_json, write_json, write_text
from wan_diloco.telemetry import METRICS_FILE, SUMMARY_FILE, read_metrics, summarise
from wan_diloco.telemetry.logs import get_logger
from wan_diloco.telemetry.report import render_report
from wan_diloco.telemetry.summary import Known, incomplete

__all__ = ["conclude", "withdraw_interim"]

_LOG = get_logger(__name__)


def withdraw_interim(run_folder: Path) -> None:
    """Take away the summary of an interrupted run that goes on now: it would soon be wrong.

    Raises:
        StorageError: It can't be removed.
    """
    if _standing(run_folder).get("finished") is False:
        try:
            (run_folder / SUMMARY_FILE).unlink(missing_ok=True)
        except OSError as exc:
            raise StorageError(f"can't remove {run_folder / SUMMARY_FILE}: {exc.strerror}") from exc


def conclude(run_folder: Path, state: SyncerState, *, wall_s: float, finished: bool, unevaluated: str) -> None:
    """Write `summary.json` and `report.html`.

    Args:
        run_folder: Of the run.
        state: What its syncer knows.
        wall_s: How long the run took until its last step, or took until now.
        finished: Whether the last step was reached, and its model evaluated or given up.
        unevaluated: Why the final model has no score; empty when it has one.

    Raises:
        StorageError: They can't be written.
    """
    standing = _standing(run_folder)
    if finished and standing.get("finished") and isinstance(standing.get("wall_s"), float):
        # A former process ended the run, and this one came for what it lacked: a score, or the report.
        wall_s = standing["wall_s"]
    told, known = read_metrics(run_folder / METRICS_FILE), _known(state)
    lacks = incomplete(told.lines, told.damaged, known)
    if lacks:
        _LOG.warning("metrics_incomplete", reason=lacks)
    summary = summarise(
        told.lines,
        state.ledger.totals(tuple(4 * count for count in state.parameters)),
        known=known,
        metrics_incomplete=lacks,
        num_fragments=len(state.parameters),
        wall_s=wall_s,
        rejected={reason.value: count for reason, count in state.rejected.items()},
        repeated_units=state.unit_book.repeated,
        finished=finished,
        unevaluated=unevaluated,
    )
    if summary["nothing_merged"]:
        reason = "the run has ended, and its model is the initial one"
        _LOG.warning("nothing_merged", reason=reason, rejected=summary["rejected"])
    write_json(run_folder / SUMMARY_FILE, summary)
    write_text(run_folder / "report.html", render_report(run_folder))


def _known(state: SyncerState) -> Known:
    tokens: dict[str, int] = {}
    fresh = {str(learner_id): count for learner_id, count in state.participation.items()}
    for (learner_id, _), life in state.ledger.lives.items():
        tokens[learner_id] = max(life.position.tokens, tokens.get(learner_id, 0))
    return Known(totals=state.totals, merges_min=min(state.merges), merged_fresh=fresh, tokens=tokens)


def _standing(run_folder: Path) -> Mapping[str, Any]:
    """The summary that is there; empty when there is none that can be read."""
    try:
        return read_json(run_folder / SUMMARY_FILE)
    except StorageError:
        return {}
