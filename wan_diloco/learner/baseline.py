"""What the method is measured against: one region alone, and data-parallel training over all regions.

Same model, shards, batches, schedule and evaluation as the run itself; ordinary gradient averaging over gloo, and
nothing of the wide area. The data-parallel arm sees the tokens of the whole run, the lone one those of one region.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import EXIT_INTERNAL, EXIT_OK
from wan_diloco.learner.stop_signals import StopSignals, stop_signals
from wan_diloco.storage.atomic import write_text
from wan_diloco.storage.filesystem import ensure_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wan_diloco.config import RunConfig

__all__ = ["BaselineMode", "run_baseline"]

_POLL_S: Final = 0.1
_END_S: Final = 10.0


class BaselineMode(StrEnum):
    """Which baseline."""

    ALONE = "alone"
    DATA_PARALLEL = "data-parallel"


def run_baseline(config: RunConfig, mode: BaselineMode, run_folder: Path) -> int:
    """Train a baseline to its end, one process a replica; main thread only.

    Leaves `config.json`, `metrics.jsonl` and `summary.json` in the folder.

    Args:
        config: The run to compare with.
        mode: Which baseline.
        run_folder: Where the results go; made when it isn't there.

    Returns:
        0, or the exit code of the first replica that failed, or 128 + number after a signal.

    Raises:
        StorageError: The folder can't be written.
    """
    ensure_folder(run_folder)
    write_text(run_folder / "config.json", config.resolved_json())
    world_size = 1 if mode is BaselineMode.ALONE else len(config.regions)
    with tempfile.TemporaryDirectory(prefix="wan-diloco-") as meeting, stop_signals() as signals:
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "wan_diloco.learner.baseline_rank"),
                    *(str(run_folder), str(mode), str(rank), str(world_size), f"{meeting}/store"),
                ],
                stdin=subprocess.DEVNULL,
            )
            for rank in range(world_size)
        ]
        try:
            return _watch(ranks, signals)
        finally:
            _end(ranks)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], signals: StopSignals) -> int:
    while True:
        codes = [rank.poll() for rank in ranks]
        for code in codes:
            if code:
                # A replica that was killed from outside has no exit code of its own.
                return code if code > 0 else EXIT_INTERNAL
        if signals.received is not None:
            return 128 + signals.received
        if None not in codes:
            return EXIT_OK
        signals.wait(_POLL_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        try:
            rank.wait(_END_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
