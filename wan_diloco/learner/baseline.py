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

from wan_diloco.errors import EXIT_INTERNAL, EXIT_OK, EXIT_TEMPORARY
from wan_diloco.learner.stop_signals import StopSignals, stop_signals
from wan_diloco.storage.atomic import write_text
from wan_diloco.storage.filesystem import ensure_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wan_diloco.config import RunConfig

__all__ = ["BaselineMode", "baseline_tokens", "run_baseline", "run_together"]

_POLL_S: Final = 0.1
_END_S: Final = 10.0


class BaselineMode(StrEnum):
    """Which baseline."""

    ALONE = "alone"
    DATA_PARALLEL = "data-parallel"


def baseline_tokens(config: RunConfig, mode: BaselineMode) -> int:
    """Tokens that a baseline trains on: those of the whole run, or the share of one region."""
    return config.total_steps * (config.inner.batch_tokens if mode is BaselineMode.ALONE else config.tokens_per_step)


def run_baseline(config: RunConfig, mode: BaselineMode, run_folder: Path) -> int:
    """Train a baseline to its end, one process a replica; main thread only.

    Leaves `config.json`, `metrics.jsonl`, `summary.json` and `report.html` in the folder.

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
    with tempfile.TemporaryDirectory(prefix="wan-diloco-") as meeting:
        return run_together(
            [
                [
                    *(sys.executable, "-m", "wan_diloco.learner.baseline_rank"),
                    *(str(run_folder), str(mode), str(rank), str(world_size), f"{meeting}/store"),
                ]
                for rank in range(world_size)
            ]
        )


def run_together(commands: Sequence[Sequence[str]]) -> int:
    """Run processes that are nothing without each other; main thread only.

    Args:
        commands: One a process.

    Returns:
        0 when all have ended well. Otherwise none is left, and it is the exit code of the first that failed, or 128 +
        number after a signal to this process.
    """
    with stop_signals() as signals:
        processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
        try:
            return _watch(processes, signals)
        finally:
            _end(processes)


def _watch(processes: Sequence[subprocess.Popen[bytes]], signals: StopSignals) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            # Who merely lost the others says "temporary"; who has a reason of its own explains it. A process that
            # was killed from outside has no exit code.
            code = next((code for code in failed if code != EXIT_TEMPORARY), EXIT_TEMPORARY)
            return code if code > 0 else EXIT_INTERNAL
        if signals.received is not None:
            return 128 + signals.received
        if None not in codes:
            return EXIT_OK
        signals.wait(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
