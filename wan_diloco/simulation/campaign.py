"""Many worlds, over all cores, and what they showed together."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from wan_diloco.simulation.transitions import table
from wan_diloco.simulation.worlds import WorldResult, play_world

__all__ = ["Campaign", "play_worlds"]

# Worlds a task: few enough that all cores are busy to the end, many enough that handing them out costs nothing.
_BATCH = 8


@dataclass(slots=True)
class Campaign:
    """What the worlds so far showed.

    Attributes:
        worlds: How many were played.
        violations: What didn't hold, by seed.
        merges: Versions published, in all of them.
        merges_min, faults_min: In the world with the fewest.
        crashed: Worlds in which the syncer crashed.
        faults: What befell, by kind.
        seen, undeclared: Transitions of the table, and those that it lacks.
    """

    worlds: int = 0
    violations: dict[int, str] = field(default_factory=dict)
    merges: int = 0
    merges_min: int | None = None
    faults_min: int | None = None
    crashed: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)
    undeclared: set[str] = field(default_factory=set)

    def add(self, result: WorldResult) -> None:
        """Another world was played."""
        self.worlds += 1
        self.merges += result.merges
        self.events += result.events
        self.faults += result.faults
        self.seen |= result.seen
        self.undeclared |= result.undeclared
        self.crashed += result.crashes > 0
        if result.violation:
            self.violations[result.seed] = result.violation
            return
        self.merges_min = min(result.merges, self.merges_min if self.merges_min is not None else result.merges)
        self.faults_min = min(result.befell, self.faults_min if self.faults_min is not None else result.befell)

    @property
    def transition_coverage(self) -> float:
        """Share of all transitions that was seen."""
        return len(self.seen) / len(table())

    @property
    def transitions(self) -> int:
        """How many there are in the machines' tables."""
        return len(table())

    @property
    def unseen(self) -> list[str]:
        """Transitions that no world has shown."""
        return sorted(table() - self.seen)


def play_worlds(first: int, count: int, jobs: int) -> Iterator[WorldResult]:
    """Play worlds; with several processes they come in the order in which they are done.

    Args:
        first: The first seed.
        count: How many, one after the other.
        jobs: Processes; 1 plays them in this one.
    """
    seeds = range(first, first + count)
    if jobs == 1:
        yield from map(play_world, seeds)
        return
    batches = [seeds[at : at + _BATCH] for at in range(0, count, _BATCH)]
    # Children that are started anew share no locks and threads of this process with it.
    context = multiprocessing.get_context("spawn")
    workers = min(jobs, len(batches) or 1)
    with ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_end_with_parent) as pool:
        for done in as_completed([pool.submit(_play_batch, batch) for batch in batches]):
            yield from done.result()


def _end_with_parent() -> None:
    """A worker waits for more, also when nobody is left to send it: both ends of the pipe are in its own hands."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _play_batch(seeds: range) -> list[WorldResult]:
    return [play_world(seed) for seed in seeds]
