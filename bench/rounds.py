"""Figures that are compared are measured side by side, again and again; medians and extremes of what came out.

Not run by itself.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Job = Callable[[], object]


def processor_s(job: Job) -> float:
    """Processor time that a job takes of this process."""
    began_s = time.process_time()
    job()
    return time.process_time() - began_s


def wall_s(job: Job) -> float:
    """Time that a job takes."""
    began_s = time.perf_counter()  # noqa: TID251 - measuring is what this is for
    job()
    return time.perf_counter() - began_s  # noqa: TID251


def ratios(
    job: Job, yardstick: Job, rounds: int, *, clock: Callable[[Job], float] = processor_s
) -> tuple[list[float], list[float]]:
    """A job's time over a yardstick's, taken right before it, round by round; and the job's times.

    Both are done once before, so that nothing is measured that happens once only.
    """
    yardstick()
    job()
    over, times_s = [], []
    for _ in range(rounds):
        yardstick_s, job_s = clock(yardstick), clock(job)
        over.append(job_s / yardstick_s)
        times_s.append(job_s)
    return over, times_s


def note(result: dict[str, Any], key: str, values: Sequence[float]) -> None:
    """Median and extremes."""
    result[key] = round(statistics.median(values), 5)
    result[f"{key}_min"], result[f"{key}_max"] = round(min(values), 5), round(max(values), 5)


def show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print figures, for programs or for people."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(json.dumps(result["machine"]))
    for key, value in result.items():
        if f"{key}_min" in result:
            print(f"{key:<40} {value:10.4f}  ({result[f'{key}_min']:.4f} to {result[f'{key}_max']:.4f})")
