"""A simulated learner: the real machine, an invented training loop, and its end of the connection.

It knows nothing of the syncer; what leaves it goes through `Surroundings`. A published value is a
symbol here, and training changes no weights: only counters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, assert_never

from wan_diloco.protocol.events import (
    AllowSteps,
    ApplyUpdate,
    BoundaryPassed,
    Connect,
    DescribeState,
    DropUpload,
    EndGiving,
    ExitLearner,
    FetchState,
    GiveState,
    Installed,
    InstallMoments,
    InstallUpdate,
    LearnerEffect,
    LearnerEvent,
    LimitUplink,
    PinState,
    RefuseSyncer,
    ReleaseState,
    RequestSnapshot,
    SendToSyncer,
    SessionId,
    SetPace,
    SetRoundTrip,
    ShowReason,
    SnapshotTaken,
    StartUpload,
    StateDescribed,
    TimerFired,
    UpdateApplied,
    UpdateBroken,
)
from wan_diloco.protocol.learner_machine import FragmentState, LearnerMachine
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.messages import ContributionHeader, Goodbye, LearnerMessage, RefusalReason, SegmentKind
from wan_diloco.protocol.rejoin_messages import StateSettled
from wan_diloco.simulation.agenda import Agenda
from wan_diloco.simulation.bounds import check_learner
from wan_diloco.simulation.checkers import Invariants, must
from wan_diloco.simulation.lease_book import Unit
from wan_diloco.simulation.state_exchange import StateExchange
from wan_diloco.simulation.world_settings import BATCH_TOKENS, PARAMETERS, LinkProfile, WorldSettings
from wan_diloco.units import Epoch, FragmentId, Incarnation, LearnerId, LocalStep, ShardId, Term, TransferId, Version

__all__ = ["LearnerNode", "Note", "Surroundings"]

# Told of each input of any machine with what came out: who, the event (None for a syncer's start), the effects.
Note = Callable[[str, object, Sequence[object]], None]

# A clock that begins anywhere.
_CLOCK_MAX_S = 1e7


class Surroundings(Protocol):
    """What a node needs of the world around it."""

    settings: WorldSettings
    agenda: Agenda
    invariants: Invariants
    note: Note
    clock_step_s: float

    def connect(self, node: LearnerNode) -> None:
        """It knocks at the syncer's door."""
        ...

    def say(self, node: LearnerNode, message: LearnerMessage) -> None:
        """It sends a control message."""
        ...

    def offer(self, node: LearnerNode, header: ContributionHeader) -> None:
        """It announces a contribution's bytes."""
        ...

    @property
    def states(self) -> StateExchange:
        """How inner states get from learner to learner."""
        ...

    def poisoned(self) -> bool:
        """Whether an update turns out not to decode."""
        ...

    def exited(self, node: LearnerNode, effect: ExitLearner) -> None:
        """Its process ends."""
        ...


class LearnerNode:
    """One learner process.

    Attributes:
        session: Open connection as the syncer numbers it; None without one.
        stream_s: Per direction, when the last message of the stream arrives: streams keep their order.
        blocked: Per direction, how many faults let nothing through now.
        held: Per direction, what waits for that to end.
        generation: How many uplink processes it has had before this one.
        usual_link, link_change: What `link` is without faults, and how often one changed it.
        uplink_free_s: When the uplink has sent what it was given.
        versions, digests: Installed version of each fragment, and its symbol.
        life_id: Of its process.
        installed_at: Local step and tokens of each fragment's last install: where its counters begin.
        tokens: Trained on; steps whose loss isn't finite have none.
        uploads: Contributions on their way.
        moments: What its inner moments are, a symbol: whose, and as of which of its steps; empty while it has none.
        moments_step: The global step that they are of.
        pinned: What it has to give, a symbol: whose, and as of which of its steps.
        shard, unit: The data that its next step takes; of none before the syncer has said which.
        read: The data that each of its steps took, from the first on.
        steps_s: (time, local step) of each boundary.

    Args:
        learner_id: Its name.
        link: Its link and speed.
        world: What is around it.
        rng: For the jitter of its reconnects.
    """

    def __init__(self, learner_id: LearnerId, link: LinkProfile, world: Surroundings, rng: random.Random) -> None:
        """A new life, from the initial weights, before its first step."""
        settings = world.settings
        initial = Version(Epoch(0), 0)
        self.learner_id = learner_id
        self.link = link
        self.usual_link = link
        self.link_change = 0
        self.session: SessionId | None = None
        self.stream_s = [0.0, 0.0]
        self.blocked = [0, 0]
        self.held: tuple[list[tuple[SessionId, Callable[[], None]]], ...] = ([], [])
        self.uplink_free_s = 0.0
        self.versions = [initial] * settings.num_fragments
        self.resyncs = [0] * settings.num_fragments
        self.digests = list(settings.initial_digests)
        self.installed_at = [(0, 0)] * settings.num_fragments
        self.uploads: set[ContributionHeader] = set()
        self.moments = ""
        self.moments_step: int | None = None
        self.pinned = ""
        self.local_step = 0
        self.tokens = 0
        self.shard: ShardId | None = None
        self.unit = 0
        self.read: list[Unit] = []
        self._lease: Lease | None = None
        self._barren_until_s = 0.0
        self.alive = True
        self.exit_code: int | None = None
        self.steps_s: list[tuple[float, int]] = []
        self._world = world
        self._uploads_max = settings.uploads_max
        self._rng = rng
        self.life_id = f"{rng.getrandbits(64):016x}"
        self.machine = self._new_machine(Incarnation(0), Term(0), "")
        self._clock_s = world.clock_step_s + (rng.uniform(0.0, _CLOCK_MAX_S) if settings.skewed else 0.0)
        self._reached_s = float("-inf")
        self._newest = list(zip(self.versions, self.digests, strict=True))
        self._installs: dict[FragmentId, tuple[InstallUpdate, str]] = {}
        self._announced: set[ContributionHeader] = set()
        self._wanted: set[FragmentId] = set()
        self._pin = 0
        # Whether it has decided what its moments are; none of its steps may come before.
        self._settled = False
        self._moments_of: InstallMoments | None = None
        self._allowed: LocalStep | None = LocalStep(0)
        self._stepping = False
        self._timer = 0
        self.generation = 0
        self._frozen = False
        self._backlog: list[Callable[[], None]] = []

    @property
    def runs(self) -> bool:
        """Its process is there."""
        return self.alive and self.exit_code is None

    @property
    def is_frozen(self) -> bool:
        """Its process hangs."""
        return self._frozen

    @property
    def is_able(self) -> bool:
        """It runs, the syncer and it hear each other, and its work is worth something."""
        connected = self.session is not None and not any(self.blocked)
        finite = self._world.agenda.now_s >= self._barren_until_s
        return self.runs and not self._frozen and connected and finite

    def start(self) -> None:
        """Begin."""
        self._perform(self.machine.start())

    def handle(self, event: LearnerEvent) -> None:
        """Give its machine an event; a process that hangs takes note of it when it wakes."""
        self._do(lambda: self._handle(event))

    def freeze(self, duration_s: float) -> bool:
        """The process hangs: nothing of it goes on, while its connection stands. Returns whether it does."""
        if self._frozen or not self.runs:
            return False
        self._frozen = True
        self._world.agenda.after(duration_s, self._thaw)
        return True

    def go_barren(self, duration_s: float) -> None:
        """Losses aren't finite for a while: its steps have no tokens."""
        self._barren_until_s = self._world.agenda.now_s + duration_s

    def leave(self) -> None:
        """It says goodbye, and its process ends."""
        self._world.say(self, Goodbye(reason="the operator stopped it"))
        self.alive = False

    def restart_uplink(self) -> None:
        """Another uplink process serves the same training; the connection is gone already."""
        self.uploads.clear()
        self._announced.clear()
        self._installs.clear()
        self._newest = list(zip(self.versions, self.digests, strict=True))
        self._wanted.clear()
        self.generation += 1
        self._timer += 1
        before = self.machine
        self.machine = self._new_machine(before.incarnation, before.term, before.term_id)
        self._perform(self.machine.start())

    def _new_machine(self, incarnation: Incarnation, term: Term, term_id: str) -> LearnerMachine:
        settings = self._world.settings
        identity = replace(settings.identity(self.learner_id), incarnation=incarnation, life_id=self.life_id)
        states = [
            FragmentState(version=version, resync=resync, step_lo=LocalStep(step), tokens_lo=tokens)
            for version, resync, (step, tokens) in zip(self.versions, self.resyncs, self.installed_at, strict=True)
        ]
        return LearnerMachine(
            settings.for_learner(),
            replace(identity, term=term, term_id=term_id),
            states,
            local_step=LocalStep(self.local_step),
            tokens=self.tokens,
            unit=self.unit,
            rng=self._rng,
            joined=self.local_step > 0,
            moments_step=self.moments_step,
            shard=self.shard,
        )

    def _thaw(self) -> None:
        self._frozen = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            action()

    # ---- inside ----------------------------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        if self._frozen:
            self._backlog.append(action)
        elif self.runs:
            action()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._world.agenda.after(delay_s, lambda: self._do(action))

    def _handle(self, event: LearnerEvent) -> None:
        effects = self.machine.handle(event, max(self._reached_s, self._world.agenda.now_s + self._clock_s))
        self._world.note(self.learner_id, event, effects)
        self._perform(effects)
        check_learner(self.machine, self._uploads_max)
        self._timer += 1
        deadline_s, number = self.machine.deadline_s(), self._timer
        if deadline_s is not None:
            self._world.agenda.at(deadline_s - self._clock_s, lambda: self._do(lambda: self._fire(number, deadline_s)))

    def _fire(self, number: int, deadline_s: float) -> None:
        if number == self._timer:
            self._reached_s = deadline_s  # in spite of rounding
            self._handle(TimerFired())

    def _perform(self, effects: list[LearnerEffect]) -> None:
        for effect in effects:
            match effect:
                case Connect():
                    self._world.connect(self)
                case SendToSyncer():
                    self._settled |= isinstance(effect.message, StateSettled)
                    self._world.say(self, effect.message)
                case RequestSnapshot():
                    self._wanted.add(effect.fragment_id)
                case StartUpload():
                    self._upload(effect.header)
                case DropUpload():
                    self.uploads.discard(effect.header)
                case ApplyUpdate():
                    self._apply(effect)
                case InstallUpdate():
                    version, digest = self._newest[effect.fragment_id]
                    must(version == effect.version, f"{self.learner_id} is to install what it doesn't have")
                    self._installs[effect.fragment_id] = (effect, digest)
                case AllowSteps():
                    self._allowed = effect.until_step
                case PinState():
                    self._pin = effect.number
                case DescribeState():
                    # Of steps without a finite loss moments aren't finite either.
                    finite = self._world.agenda.now_s >= self._barren_until_s
                    described = StateDescribed(
                        number=effect.number, size_bytes=8 * PARAMETERS, digest=self.pinned, finite=finite
                    )
                    self._later(0.0, partial(self._handle, described))
                case GiveState() | EndGiving():
                    self._world.states.give(self, effect)
                case FetchState():
                    self._world.states.fetch(self, effect)
                case InstallMoments():
                    self._moments_of = effect
                case ReleaseState():
                    self.pinned = ""
                    self._settled = True  # who lost its session meanwhile says so in the next one
                case SetPace():
                    self._lease = effect.lease or self._lease
                case LimitUplink() | SetRoundTrip() | ShowReason():
                    pass
                case RefuseSyncer(reason=reason):
                    must(False, f"{self.learner_id} refuses the only syncer that there is: {reason}")
                case ExitLearner():
                    self.exit_code = effect.exit_code
                    self._world.exited(self, effect)
                case _:
                    assert_never(effect)
        if not self._stepping and self.runs:
            self._stepping = True
            self._later(0.0, lambda: self._boundary(stepped=False))

    def _upload(self, header: ContributionHeader) -> None:
        if header not in self._announced:
            self._announced.add(header)
            fragment_id = header.key.fragment_id
            base, since = self.versions[fragment_id], self.installed_at[fragment_id][0]
            must(header.base == base, f"{self.learner_id} names {header.base} as the base of a delta to {base}")
            span = (int(header.key.step_lo), int(header.step_hi))
            must(
                span == (since, self.local_step), f"{self.learner_id} sends steps {span}, not {since, self.local_step}"
            )
            self._world.invariants.leases.made(header, self.read[since : self.local_step])
        self._world.offer(self, header)

    def _apply(self, effect: ApplyUpdate) -> None:
        header = effect.header
        fragment_id = header.fragment_id
        held = self._newest[fragment_id]
        for segment in header.segments:
            fits = segment.kind is SegmentKind.VALUE or segment.from_version == held[0]
            must(fits, f"{self.learner_id} adds a difference from {segment.from_version} to {held[0]}")
            held = (segment.to_version, segment.digest)
        if self._world.poisoned():
            broken = UpdateBroken(fragment_id=fragment_id, version=held[0], reason=RefusalReason.DIGEST)
            self._soon(broken)
            return
        self._newest[fragment_id] = held
        self._world.invariants.saw(fragment_id, *held)
        event = UpdateApplied(fragment_id=fragment_id, version=held[0], resync=header.resync)
        self._soon(event)

    def _soon(self, event: LearnerEvent) -> None:
        """What this uplink process began comes back to it, if it is still there."""
        generation = self.generation
        decode_s = self._world.settings.decode_s
        self._later(decode_s, lambda: self._handle(event) if generation == self.generation else None)

    def _boundary(self, *, stepped: bool) -> None:
        """What the training loop does between two steps."""
        self._stepping = False
        must(self._settled or not stepped, f"{self.learner_id} takes a step before it has its moments")
        if stepped:
            self._step()
        finite = self._world.agenda.now_s >= self._barren_until_s
        self.tokens += BATCH_TOKENS * (stepped and finite)
        if (lease := self._lease) is not None:
            self.shard, self.unit, self._lease = lease.shard, lease.first_unit, None
        installed = self._install()
        wanted, self._wanted = sorted(self._wanted), set()
        pin, self._pin = self._pin, 0
        if pin:
            self.pinned = f"{self.learner_id}:{self.machine.incarnation}:{self.local_step}"
        taken, self._moments_of = self._moments_of, None
        if taken is not None:
            self.moments, self.moments_step = f"{taken.donor}@{taken.global_step}", taken.global_step
        if self._allowed is None or self.local_step < self._allowed:
            self._stepping = True
            self._later(self.link.step_s, lambda: self._boundary(stepped=True))
        if not (stepped or installed or wanted or pin or taken):
            return
        self.steps_s.append((self._world.agenda.now_s, self.local_step))
        passed = BoundaryPassed(
            local_step=LocalStep(self.local_step),
            tokens=self.tokens,
            unit=self.unit,
            step_time_s=self.link.step_s,
            loss=1.0 if finite else None,
            learning_rate=0.1,
            installed=installed,
            snapshots=tuple(SnapshotTaken(fragment_id=fragment) for fragment in wanted),
            pinned=pin,
            moments_of=TransferId(0) if taken is None else taken.transfer,
        )
        self._handle(passed)

    def _step(self) -> None:
        must(self.shard is not None, f"{self.learner_id} takes a step before it knows its data")
        assert self.shard is not None
        self.read.append((self.shard, self.unit))
        self.local_step += 1
        self.unit += 1

    def _install(self) -> tuple[Installed, ...]:
        installed = []
        for fragment_id, (install, digest) in sorted(self._installs.items()):
            before = (self.versions[fragment_id], self.resyncs[fragment_id])
            is_new = install.resync > before[1] or install.version > before[0]
            must(is_new, f"{self.learner_id} installs version {install.version} of fragment {fragment_id} again")
            self.versions[fragment_id], self.digests[fragment_id] = install.version, digest
            self.resyncs[fragment_id] = install.resync
            self.installed_at[fragment_id] = (self.local_step, self.tokens)
            self._world.invariants.saw(fragment_id, install.version, digest)
            installed.append(
                Installed(
                    fragment_id=fragment_id,
                    version=install.version,
                    resync=install.resync,
                    step_lo=LocalStep(self.local_step),
                    tokens_lo=self.tokens,
                )
            )
        self._installs.clear()
        return tuple(installed)
