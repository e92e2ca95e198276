"""A simulated syncer process: the real machine, its driver, and its disk.

It knows nothing of learners and links; what leaves it goes through `Network`. A published value is the hash of what
went into it.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from wan_diloco.protocol.events import (
    ContributionsUnreadable,
    EndRun,
    ExitLearner,
    MergeFailed,
    MergeFinished,
    Record,
    ShowReason,
    StartMerge,
    SyncerEffect,
    SyncerEvent,
    TimerFired,
)
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import RunEnded
from wan_diloco.simulation.agenda import Agenda
from wan_diloco.simulation.bounds import check_syncer
from wan_diloco.simulation.checkers import Invariants
from wan_diloco.simulation.learner_node import Note
from wan_diloco.simulation.syncer_disk import SyncerDisk
from wan_diloco.simulation.talk import Talk
from wan_diloco.simulation.world_settings import WorldSettings
from wan_diloco.units import Epoch, FragmentId, Term

__all__ = ["Network", "Said", "SyncerNode"]

# What may be told to whoever watches: an event or effect of the syncer, or a learner's end.
Said = SyncerEvent | SyncerEffect | ExitLearner

# From a contribution's last byte to its place in the journal.
_STORE_S = 0.001
# A clock that begins anywhere: a day's uptime, or half a year's.
_CLOCK_MAX_S = 1e7
# Events between two looks at what the machine keeps.
_BOUNDS_EVERY = 16


class Network(Protocol):
    """What a syncer needs of the world around it."""

    settings: WorldSettings
    rng: random.Random
    agenda: Agenda
    invariants: Invariants
    talk: Talk
    watch: Callable[[Said], None]
    note: Note
    clock_step_s: float

    def carry(self, effect: SyncerEffect) -> None:
        """Do what concerns learners."""
        ...

    def crashed(self) -> None:
        """The process is gone, and with it all connections."""
        ...

    def happens(self, chance: float) -> bool:
        """Whether something befalls now that has this chance."""
        ...

    @property
    def resyncs(self) -> list[int]:
        """Of each fragment, how often learners took the published value whatever they had."""
        ...

    @property
    def num_sessions(self) -> int:
        """Connections of whose end the machine doesn't know."""
        ...


class SyncerNode:
    """The syncer, life after life.

    Args:
        network: What is around it.

    Attributes:
        machine: Of the process that runs, or ran last.
        disk: What outlives processes.
        inputs: What went into the machine, with the time by its own clock; None is its start.
        outputs: What came out of it, one list an input.
        up: A process runs.
        crashes: How many processes crashed.
        resumed: What they left that their successors took up.
        ended: The run has ended; learners may still have to hear of it.
        published: The value of each fragment.
    """

    def __init__(self, network: Network) -> None:
        """An empty disk; `start` begins."""
        self._network = network
        settings = network.settings
        self.disk = SyncerDisk(network.invariants.recorded)
        self.machine = SyncerMachine(settings.for_syncer(), settings.fresh_state())
        self.disk.snapshot(self.machine.state)
        self.disk.ship()
        self.inputs: list[tuple[float, SyncerEvent | None]] = []
        self.outputs: list[list[SyncerEffect]] = []
        self.up = False
        self.crashes = 0
        self.resumed: set[str] = set()
        self.ended = False
        self.published = list(settings.initial_digests)
        # A process that has crashed hears nothing any more of what was begun for it.
        self.process = 0
        self._timer = 0
        self._clock_s = 0.0
        self._reached_s = float("-inf")
        self._busy = False
        # After how many more effects the syncer crashes; None for never.
        self._doom: int | None = None
        self._down_s = 0.0
        self._doomed_end: tuple[bool, float] | None = None
        self._is_lost = False
        # What the lock of the store names, which outlives disks.
        self._term_min, self._epoch_min = Term(0), Epoch(0)
        # While a write takes its time nothing is decided, and words wait.
        self._stalled = False
        self._inbox: deque[SyncerEvent] = deque()
        self._slow_until_s = self._full_until_s = float("-inf")
        self._write_s = 0.0

    @property
    def now_s(self) -> float:
        """By the clock of the process that runs."""
        return max(self._reached_s, self._network.agenda.now_s + self._clock_s)

    @property
    def stalled(self) -> bool:
        """A write takes its time."""
        return self._stalled

    # ---- faults ----------------------------------------------------------------------------------

    def doom(self, effects: int, down_s: float) -> bool:
        """Crash in the middle of that many effects from now; returns whether that can be."""
        if not self.up or self._doom is not None:
            return False
        self._doom, self._down_s = effects, down_s
        return True

    def doom_end(self, *, before: bool, down_s: float) -> None:
        """Crash when the run ends: before that is written, or after."""
        self._doomed_end = (before, down_s)

    def crash(self, down_s: float) -> bool:
        """Crash now; start again from the disk after that time. Returns whether there was anything to crash."""
        if not self.up:
            return False
        self.up, self._doom = False, None
        self.crashes += 1
        self.process += 1
        self._timer += 1
        self._stalled = False
        self._inbox.clear()
        if self._is_lost:
            self.disk.lose()
        else:
            self.disk.crash(self._network.rng)
        self._network.crashed()
        self._network.agenda.after(down_s, self._resume)
        return True

    def lose_disk(self, down_s: float) -> bool:
        """The machine dies with its disk; another goes on with what was shipped. Returns whether there was one."""
        if not self.up:
            return False
        books = self._network.invariants
        self._term_min = Term(max(self.machine.state.term, books.term) + 1)
        self._epoch_min = Epoch(max(self.machine.state.epoch, books.epoch, self._epoch_min) + 1)
        self._is_lost = True
        return self.crash(down_s)

    def slow_disk(self, write_s: float, lasts_s: float) -> None:
        """Each write takes that long, for a while."""
        self._write_s, self._slow_until_s = write_s, self._network.agenda.now_s + lasts_s

    def full_disk(self, lasts_s: float) -> None:
        """Writes are refused for a while, and tried again until they are in."""
        self._full_until_s = self._network.agenda.now_s + lasts_s

    # ---- the driver ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life."""
        network = self._network
        self.up = True
        # The clocks of two processes have nothing to do with each other, and none is ever written down.
        self._reached_s = float("-inf")
        self._clock_s = network.clock_step_s
        if network.settings.skewed:
            self._clock_s += network.rng.uniform(0.0, _CLOCK_MAX_S)
        if not network.settings.durable:
            self._flush_later(self.process)
        self.inputs.append((self.now_s, None))
        effects = self.machine.start(self.now_s)
        network.note("syncer", None, effects)
        self._carry_out(effects)

    def tell(self, event: SyncerEvent, process: int | None = None) -> None:
        """Give the machine an event, unless it was meant for a process that is gone."""
        if not self.up or process not in (None, self.process):
            return
        self._inbox.append(event)
        self._work_off()

    def store_s(self) -> float:
        """How long what is written now takes until it is in the journal."""
        return _STORE_S + self._write_wait_s()

    def _work_off(self) -> None:
        while self._inbox and not self._stalled and not self._busy:
            event = self._inbox.popleft()
            self._network.watch(event)
            self._network.talk.heard(event, self._network.agenda.now_s)
            now_s = self.now_s
            self.inputs.append((now_s, event))
            effects = self.machine.handle(event, now_s)
            self._network.note("syncer", event, effects)
            self._carry_out(effects)

    def _carry_out(self, effects: list[SyncerEffect]) -> None:
        self.outputs.append(effects)
        for effect in effects:
            self._network.invariants.decided(effect)
        self._network.talk.decided(effects, self._network.agenda.now_s)
        self._do(effects, 0)

    def _do(self, effects: list[SyncerEffect], first: int) -> None:
        self._busy = True
        self._do_until_stalled(effects, first)
        self._busy = False

    def _do_until_stalled(self, effects: list[SyncerEffect], first: int) -> None:
        process = self.process
        for index in range(first, len(effects)):
            effect = effects[index]
            if self._doom is not None:
                self._doom -= 1
                if self._doom < 0:
                    # A driver may write all records of a list before it does the rest.
                    if self._network.rng.random() < 0.5:
                        self._write([later for later in effects[index:] if isinstance(later, Record)])
                    self.crash(self._down_s)
                    return
            self._end_doom(effect)
            if process != self.process:
                return
            self._network.watch(effect)
            if isinstance(effect, Record) and effect.durable and (wait_s := self._write_wait_s()):
                # Until it is flushed a crash may leave it, a part of it, or nothing.
                self.disk.write(effect, flushed=False)
                self._stalled = True
                self._network.agenda.after(wait_s, partial(self._flushed, effects, index, process))
                return
            self._perform(effect)
        self._settled()

    def _end_doom(self, effect: SyncerEffect) -> None:
        if self._doomed_end is None or not isinstance(effect, Record) or not isinstance(effect.record, RunEnded):
            return
        (before, down_s), self._doomed_end = self._doomed_end, None
        if not before:
            self._write([effect])
        self.crash(down_s)

    def _flushed(self, effects: list[SyncerEffect], index: int, process: int) -> None:
        if process != self.process:
            return
        self.disk.flush()
        self._stalled = False
        self._do(effects, index + 1)
        self._work_off()

    def _settled(self) -> None:
        network = self._network
        network.invariants.balanced(self.machine)
        # What is kept for ever is there at the next look too. What the machine will be told next it can't know yet.
        if len(self.inputs) % _BOUNDS_EVERY == 0:
            sessions = network.num_sessions + len(self._inbox)
            check_syncer(self.machine, network.settings, sessions, network.resyncs)
        self._timer += 1
        deadline_s, number = self.machine.deadline_s(), self._timer
        if deadline_s is not None:
            network.agenda.at(deadline_s - self._clock_s, lambda: self._fire(number, deadline_s))

    def _fire(self, number: int, deadline_s: float) -> None:
        if number == self._timer:
            self._reached_s = deadline_s  # in spite of rounding
            self.tell(TimerFired())

    def _flush_later(self, process: int) -> None:
        """Records that nobody waits for are flushed now and then, while this process lives."""

        def flush() -> None:
            if process == self.process:
                self.disk.flush()
                self._flush_later(process)

        self._network.agenda.after(self._network.settings.flush_s, flush)

    def _resume(self) -> None:
        state = self.disk.restore()
        if self._is_lost:
            self._is_lost = False
            self._network.invariants.went_back(self.disk.tape)
            self._network.talk.went_back(self.disk.tape)
        self.resumed |= self._found(state)
        self.published = list(state.digests)
        self.ended = False
        settings = self._network.settings.for_syncer(self.process)
        settings = replace(settings, term_min=self._term_min, epoch_min=self._epoch_min)
        self.machine = SyncerMachine(settings, state)
        self._network.invariants.restarted(state)
        self._network.talk.restarted(self._network.agenda.now_s)
        self.start()

    def _found(self, state: SyncerState) -> set[str]:
        """What there was to be taken up, in the words of the table of transitions."""
        schedule, step = self._network.settings.schedule, min(state.global_step, self._network.settings.total_steps)
        due = [schedule.last_due_step(FragmentId(index), step) for index in range(len(state.due_steps))]
        found = {
            "rounds closed and not published": bool(state.closed),
            "rounds due and not closed": any(map(operator.gt, due, state.due_steps)),
            "work journalled and not merged": any(state.pool),
            "after the end": state.ended,
            "a torn record": self.disk.torn > 0,
        }
        return {what for what, is_there in found.items() if is_there}

    def _write(self, records: list[Record]) -> None:
        for effect in records:
            self.disk.write(effect)

    def _slowness_s(self) -> float:
        return self._write_s if self._network.agenda.now_s < self._slow_until_s else 0.0

    def _write_wait_s(self) -> float:
        return max(self._slowness_s(), self._full_until_s - self._network.agenda.now_s)

    def _perform(self, effect: SyncerEffect) -> None:
        match effect:
            case Record():
                self._write([effect])
            case StartMerge():
                self._network.invariants.merging(effect)
                process = self.process
                self._network.agenda.after(
                    self._network.settings.merge_s + self._slowness_s(), lambda: self._merge(effect, process)
                )
            case EndRun():
                self.ended = True
                self._network.invariants.over(self.machine)
            case ShowReason():
                pass
            case _:
                self._network.carry(effect)

    def _merge(self, effect: StartMerge, process: int) -> None:
        if process != self.process:
            return
        network = self._network
        if network.happens(network.settings.merge_fails) or network.agenda.now_s < self._full_until_s:
            self.tell(MergeFailed(round_id=effect.round_id, reason="the disk is full"))
            return
        rotten = tuple(entry.header.key for entry in effect.entries if network.happens(network.settings.rot))
        if rotten:
            self.tell(ContributionsUnreadable(round_id=effect.round_id, keys=rotten))
            return
        names = [(entry.header.key, entry.header.step_hi, entry.staleness) for entry in effect.entries]
        text = repr((self.published[effect.fragment_id], effect.to_version, names))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.published[effect.fragment_id] = digest
        finished = MergeFinished(
            round_id=effect.round_id, digest=digest, ref=digest, codes_bytes=500, scales_bytes=16, update_bytes=530
        )
        self.tell(finished)
