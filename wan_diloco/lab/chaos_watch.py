"""Watches a run from outside while faults befall it: its tape as it grows, its processes, and what its syncer says.

Times are those of the event loop's clock at which something was seen, which is a moment after it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from wan_diloco.errors import TransportError

if TYPE_CHECKING:
    from pathlib import Path

    from wan_diloco.lab.links import LinkState
    from wan_diloco.lab.victims import Victim

__all__ = ["Merged", "Observations", "Processes", "Sample", "Watch"]

_TAPE_EVERY_S: Final = 0.1
_SAMPLE_EVERY_S: Final = 0.25
_STATUS_EVERY_S: Final = 1.0
_STATUS_TIMEOUT_S: Final = 2.0
# A learner that used less of its processor between two samples doesn't compute: it waits, or its step is stretched.
_COMPUTES_SHARE: Final = 0.005
# Steps may be stretched to more than the time between samples.
_IDLE_S: Final = 3.0


class Processes(Protocol):
    """Where a run's processes and links are to be found, from moment to moment."""

    def syncer(self) -> Victim | None:
        """The syncer's process; None while there is none."""
        ...

    def learner(self, region: str) -> Victim | None:
        """A learner's training process; None while there is none."""
        ...

    def uplink(self, region: str) -> Victim | None:
        """A learner's uplink; None while there is none."""
        ...

    def link(self, region: str) -> LinkState:
        """How a region's link is."""
        ...

    def address(self) -> str:
        """Of the syncer itself; "" while it doesn't listen."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How the regions were at one moment.

    Attributes:
        seen_s: When.
        alive: Their training process is there.
        training: It runs, is past its start, and computes.
        able: It trains, its uplink runs, and its link carries something both ways: it can contribute.
    """

    seen_s: float
    alive: frozenset[str]
    training: frozenset[str]
    able: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A round that was published, when that was seen.

    Attributes:
        fresh: Of each learner that was merged fresh, the tokens.
    """

    seen_s: float
    round_id: int
    fragment: int
    fresh: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Observations:
    """Everything that was seen, in order of time.

    Attributes:
        started_s, ended_s: When the run's start and end were seen on the tape; None before.
        samples: Of the regions.
        merged: Published rounds.
        discards: Tokens by reason, as the syncer's status had them, cumulative.
        steps: Own steps of each region, as the status had them.
    """

    started_s: float | None = None
    ended_s: float | None = None
    samples: list[Sample] = field(default_factory=list)
    merged: list[Merged] = field(default_factory=list)
    discards: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    steps: list[tuple[float, dict[str, int]]] = field(default_factory=list)


class Watch:
    """Sees a run. Owner: the event loop.

    Args:
        tape_path: `tape.jsonl` of the run; it may not be there yet.
        regions: Of the run.
        processes: Of the run.
        fetch: Asks a syncer at an address for its status, within some seconds.

    Attributes:
        seen: What was seen until now.
        started: The run's first step may be taken.
        ended: Its last step is done; what follows is its evaluation.
    """

    def __init__(
        self,
        tape_path: Path,
        regions: tuple[str, ...],
        processes: Processes,
        fetch: Callable[[str, float], Awaitable[Mapping[str, Any]]],
    ) -> None:
        """See nothing yet."""
        self.seen = Observations()
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self._tape_path = tape_path
        self._regions = regions
        self._processes = processes
        self._fetch = fetch
        self._read_bytes = 0
        # Rounds that are closed and not published, with whom they merge, and those that are published.
        self._closed: dict[int, dict[str, float]] = {}
        self._journalled: dict[tuple[Any, ...], float] = {}
        self._published: set[int] = set()
        # Of each region the process that was seen last, its processor time, when that grew, and whether it had begun.
        self._lives: dict[str, _Life] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._again(self.look_at_tape, _TAPE_EVERY_S))
            group.create_task(self._again(self._look_at_processes, _SAMPLE_EVERY_S))
            group.create_task(self._ask())

    async def _again(self, look: Callable[[], None], every_s: float) -> None:
        while True:
            look()
            await asyncio.sleep(every_s)

    async def _ask(self) -> None:
        while True:
            if address := self._processes.address():
                # What can't be asked now is asked again.
                with contextlib.suppress(TransportError):
                    self._note_status(await self._fetch(address, _STATUS_TIMEOUT_S))
            await asyncio.sleep(_STATUS_EVERY_S)

    def _note_status(self, status: Mapping[str, Any]) -> None:
        now_s = asyncio.get_running_loop().time()
        self.seen.discards.append((now_s, {str(key): value for key, value in status["discarded_tokens"].items()}))
        steps = {str(learner["learner_id"]): int(learner["local_step"]) for learner in status["learners"]}
        self.seen.steps.append((now_s, steps))

    def look_at_tape(self) -> None:
        """See what came to the tape since the last look."""
        try:
            with self._tape_path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read_bytes:
                    # What a full disk didn't take was cut off, and comes again.
                    self._read_bytes = 0
                file.seek(self._read_bytes)
                data = file.read()
        except OSError:
            # It isn't there yet, or its disk has other worries; the next look sees more.
            return
        whole = data.rfind(b"\n") + 1
        self._read_bytes += whole
        for line in data[:whole].splitlines():
            # A copy that is cut and written again while it is read may show parts of two lines as one.
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        now_s = asyncio.get_running_loop().time()
        match record.get("type"):
            case "RunStarted" if self.seen.started_s is None:
                self.seen.started_s = now_s
                self.started.set()
            case "RunEnded" if self.seen.ended_s is None:
                self.seen.ended_s = now_s
                self.ended.set()
            case "ContributionJournalled":
                self._journalled[_key(record["header"])] = now_s
            case "RoundClosed":
                came = [(entry, self._journalled.pop(_key(entry["header"]), now_s)) for entry in record["entries"]]
                self._closed[record["round_id"]] = {
                    entry["header"]["key"]["learner_id"]: time_s for entry, time_s in came if entry["staleness"] == 0
                }
            case "FragmentPublished" if record["round_id"] not in self._published:
                self._published.add(record["round_id"])
                merged = Merged(
                    seen_s=now_s,
                    round_id=record["round_id"],
                    fragment=record["fragment_id"],
                    fresh=self._closed.pop(record["round_id"], {}),
                )
                self.seen.merged.append(merged)
            case _:
                pass

    def _look_at_processes(self) -> None:
        now_s = asyncio.get_running_loop().time()
        alive, training, able = set(), set(), set()
        for region in self._regions:
            learner = self._processes.learner(region)
            condition = None if learner is None else learner.condition()
            if learner is None or condition is None:
                self._lives.pop(region, None)
                continue
            alive.add(region)
            uplink = self._processes.uplink(region)
            life = self._lives.get(region)
            if life is None or life.victim != learner:
                life = self._lives[region] = _Life(learner, now_s)
            # A learner starts its uplink when it has its model and its data.
            life.begun = life.begun or uplink is not None
            if condition.processor_s - life.processor_s >= _COMPUTES_SHARE * _SAMPLE_EVERY_S:
                life.processor_s, life.computed_s = condition.processor_s, now_s
            if not (life.begun and condition.runs and now_s - life.computed_s <= _IDLE_S):
                continue
            training.add(region)
            speaks = uplink is not None and (standing := uplink.condition()) is not None and standing.runs
            if speaks and not self._processes.link(region).severed:
                able.add(region)
        self.seen.samples.append(
            Sample(seen_s=now_s, alive=frozenset(alive), training=frozenset(training), able=frozenset(able))
        )


class _Life:
    """One process of a learner, as it was seen."""

    __slots__ = ("begun", "computed_s", "processor_s", "victim")

    def __init__(self, victim: Victim, now_s: float) -> None:
        self.victim = victim
        self.processor_s = 0.0
        self.computed_s = now_s
        self.begun = False


def _key(header: Mapping[str, Any]) -> tuple[Any, ...]:
    key = header["key"]
    return key["learner_id"], key["incarnation"], key["fragment_id"], key["step_lo"]
