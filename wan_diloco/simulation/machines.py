"""The real machines of a syncer and its learners on an invented network, in virtual time.

Weights are symbols here: a published value is the hash of what went into it, a learner holds such a hash. That
is enough to prove that equal versions are equal bits, and it is fast enough for thousands of runs. One
seed gives one run. Trials with real tensors and real bytes use the drivers under `virtual_loop`.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from wan_diloco.protocol.admission import Terms
from wan_diloco.protocol.events import (
    AcceptUpload,
    AllowSteps,
    ApplyUpdate,
    BoundaryPassed,
    CloseSession,
    Connect,
    Connected,
    ConnectionLost,
    DropUpload,
    EndRun,
    ExitLearner,
    Identity,
    Installed,
    InstallUpdate,
    LearnerConnected,
    LearnerDisconnected,
    LearnerEffect,
    LearnerEvent,
    LearnerSaid,
    MergeFinished,
    Record,
    RefuseUpload,
    RequestSnapshot,
    SendToLearner,
    SendToSyncer,
    SendUpdate,
    SessionId,
    SetPace,
    ShowReason,
    SnapshotTaken,
    StartMerge,
    StartUpload,
    SyncerEffect,
    SyncerEvent,
    SyncerSaid,
    TimerFired,
    TransferBroken,
    UpdateApplied,
    UpdateArrived,
    UpdateBroken,
    UploadBroken,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.intake import FragmentSizes, IntakeRules
from wan_diloco.protocol.learner_machine import FragmentState, LearnerMachine, LearnerSettings
from wan_diloco.protocol.messages import Acknowledged, ContributionHeader, RefusalReason, SegmentKind, UpdateHeader
from wan_diloco.protocol.quorum import GracePolicy
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.protocol.syncer_machine import SyncerMachine, SyncerSettings
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.simulation.checkers import Invariants, Violation
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LearnerId, LocalStep, Version

__all__ = ["LearnerNode", "LinkProfile", "MachineWorld", "WorldSettings"]

_PARAMETERS = 1000
_BATCH_TOKENS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One learner's link and speed.

    Attributes:
        step_s: Duration of a step.
        delay_s: One way.
        jitter_s: Added at random, up to this; streams keep their order.
        upload_s: How long a contribution's bytes occupy the uplink; they go one after the other.
    """

    step_s: float = 1.0
    delay_s: float = 0.02
    jitter_s: float = 0.0
    upload_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """A run.

    Attributes:
        links: One a learner; their names are m0, m1, ...
        drop: Chance that a bulk transfer or an acknowledgement is lost while its stream lives on.
        repeat: Chance that a control message arrives twice.
        poison: Chance that a contribution turns out not to be finite.
    """

    links: tuple[LinkProfile, ...]
    num_fragments: int = 4
    period_steps: int = 4
    overlap_steps: int = 2
    quorum: int = 1
    safety: float = 0.9
    bound_steps: float = 4.0
    total_steps: int = 40
    lease_s: float = 10.0
    merge_s: float = 0.02
    drop: float = 0.0
    repeat: float = 0.0
    poison: float = 0.0


def _initial_digest(fragment: int) -> str:
    return f"initial-{fragment}"


@dataclass(slots=True)
class LearnerNode:
    """One learner process: its machine, its training loop, and its end of the connection.

    Attributes:
        session: Open connection as the syncer numbers it; None without one.
        stream_s: Per direction, when the last message of the stream arrives: streams keep their order.
        uplink_free_s: When the uplink has sent what it was given.
        held: Digest of each fragment's base, and of a pending one.
        wanted: Fragments to snapshot at the next boundary.
        allowed: Bound of the steps; None for none.
    """

    learner_id: LearnerId
    link: LinkProfile
    machine: LearnerMachine
    num_fragments: int
    session: SessionId | None = None
    stream_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    uplink_free_s: float = 0.0
    versions: list[Version] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    applied: dict[FragmentId, tuple[Version, str]] = field(default_factory=dict)
    installs: dict[FragmentId, InstallUpdate] = field(default_factory=dict)
    wanted: set[FragmentId] = field(default_factory=set)
    uploads: set[ContributionHeader] = field(default_factory=set)
    allowed: LocalStep | None = LocalStep(0)
    local_step: int = 0
    stepping: bool = False
    alive: bool = True
    exit_code: int | None = None
    timer: int = 0
    steps_s: list[tuple[float, int]] = field(default_factory=list)


class MachineWorld:
    """A whole run; `run` plays it.

    Args:
        settings: The run.
        seed: All chance in it.
    """

    def __init__(self, settings: WorldSettings, seed: int) -> None:
        """Everybody starts at time 0."""
        self.settings = settings
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.invariants = Invariants(settings.quorum)
        self.inputs: list[tuple[float, SyncerEvent]] = []
        self.outputs: list[list[SyncerEffect]] = []
        self.tape: list[object] = []
        self.ended = False
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self._sessions = 0
        self._timer = 0
        self.syncer_up = True
        self.published = [_initial_digest(fragment) for fragment in range(settings.num_fragments)]
        self.links: dict[SessionId, LearnerNode] = {}
        names = tuple(LearnerId(f"m{index}") for index in range(len(settings.links)))
        self._terms = Terms(
            run="world",
            learners=names,
            layout=("a layout",),
            settings=(("a", "setting"),),
            initial_digests=tuple(self.published),
        )
        self.schedule = Schedule(num_fragments=settings.num_fragments, period_steps=settings.period_steps)
        self._sizes = tuple(
            FragmentSizes(parameters=_PARAMETERS, codes_bytes=_PARAMETERS // 2, scales_bytes=16)
            for _ in range(settings.num_fragments)
        )
        self.syncer = self.new_syncer(
            SyncerState(
                parameters=(_PARAMETERS,) * settings.num_fragments,
                initial_digests=tuple(self.published),
                keep_updates=8,
            )
        )
        self._perform(self.syncer.start(0.0))
        self.nodes = {name: self._new_node(name, link) for name, link in zip(names, settings.links, strict=True)}
        for node in self.nodes.values():
            self._perform_learner(node, node.machine.start())

    def new_syncer(self, state: SyncerState) -> SyncerMachine:
        """A syncer's machine over a state."""
        settings = self.settings
        return SyncerMachine(
            SyncerSettings(
                terms=self._terms,
                schedule=self.schedule,
                policy=GracePolicy(
                    quorum=settings.quorum,
                    overlap_steps=settings.overlap_steps,
                    safety=settings.safety,
                    bound_steps=settings.bound_steps,
                ),
                intake=IntakeRules(
                    codec="int4",
                    fragments=self._sizes,
                    batch_tokens=dict.fromkeys(self._terms.learners, _BATCH_TOKENS),
                ),
                total_steps=GlobalStep(settings.total_steps),
                lease_s=settings.lease_s,
                start_timeout_s=60.0,
                shards=("",) * settings.num_fragments,
                lossless=False,
            ),
            state,
        )

    # ---- playing ---------------------------------------------------------------------------------

    def run(self, until_s: float = float("inf"), events_max: int = 1_000_000) -> None:
        """Play until the run ends, or that time, or that many events.

        Raises:
            Violation: An invariant doesn't hold.
        """
        for _ in range(events_max):
            if self.ended or not self._agenda or self._agenda[0][0] > until_s:
                return
            self.now_s, _, action = heapq.heappop(self._agenda)
            action()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._counter += 1
        heapq.heappush(self._agenda, (self.now_s + delay_s, self._counter, action))

    # ---- faults ----------------------------------------------------------------------------------

    def cut(self, node: LearnerNode) -> None:
        """Break a learner's connection; both ends notice, what was under way is gone."""
        session, node.session = node.session, None
        if session is not None:
            del self.links[session]
            node.uploads.clear()
            self.tell(LearnerDisconnected(session=session, reason="cut"))
            self.tell_learner(node, ConnectionLost(reason="cut", refused=False))

    def kill(self, node: LearnerNode) -> None:
        """End a learner's process; `revive` starts another life."""
        node.alive = False
        session, node.session = node.session, None
        if session is not None:
            del self.links[session]
            self.tell(LearnerDisconnected(session=session, reason="killed"))

    def revive(self, node: LearnerNode) -> None:
        """A new life, from the initial weights, with nothing of its own left."""
        fresh = self._new_node(node.learner_id, node.link)
        self.nodes[node.learner_id] = fresh
        self._perform_learner(fresh, fresh.machine.start())

    # ---- the syncer's driver ---------------------------------------------------------------------

    def tell(self, event: SyncerEvent) -> None:
        """Give the syncer's machine an event now."""
        if self.ended:
            return
        self.inputs.append((self.now_s, event))
        effects = self.syncer.handle(event, self.now_s)
        self.outputs.append(effects)
        self._perform(effects)
        self.invariants.balanced(self.syncer)
        self._arm()

    def _arm(self) -> None:
        self._timer += 1
        deadline_s, number = self.syncer.deadline_s(), self._timer
        if deadline_s is not None:
            self.at(max(0.0, deadline_s - self.now_s), lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number == self._timer:
            self.tell(TimerFired())

    def _perform(self, effects: list[SyncerEffect]) -> None:
        for effect in effects:
            match effect:
                case SendToLearner():
                    self._deliver(effect)
                case CloseSession():
                    node = self.links.get(effect.session)
                    if node is not None:
                        self.at(0.001, lambda node=node, session=effect.session: self._closed(node, session))  # type: ignore[misc]
                case AcceptUpload():
                    self._accept(effect)
                case RefuseUpload() | ShowReason():
                    pass
                case Record():
                    self.tape.append(effect.record)
                    self.invariants.recorded(effect.record)
                case StartMerge():
                    self.invariants.merging(effect)
                    self.at(self.settings.merge_s, lambda effect=effect: self._merge(effect))  # type: ignore[misc]
                case SendUpdate():
                    self._send_update(effect)
                case EndRun():
                    self.ended = True
                case _:
                    assert_never(effect)

    def _closed(self, node: LearnerNode, session: SessionId) -> None:
        if node.session == session:
            self.cut(node)

    def _deliver(self, effect: SendToLearner) -> None:
        node = self.links.get(effect.session)
        if node is None:
            return
        if isinstance(effect.message, Acknowledged) and self.rng.random() < self.settings.drop:
            return
        event = SyncerSaid(message=effect.message)
        self._stream(node, 1, lambda: self.tell_learner(node, event))

    def _accept(self, effect: AcceptUpload) -> None:
        node = self.links.get(effect.session)
        if node is None:
            return
        header, session = effect.header, effect.session
        node.uplink_free_s = max(node.uplink_free_s, self.now_s) + node.link.upload_s
        delay_s = node.uplink_free_s - self.now_s  # the bytes follow their header without waiting
        if self.rng.random() < self.settings.drop:
            self.at(delay_s, lambda: self._upload_lost(node, header))
            return
        self.at(delay_s, lambda: self._stored(session, header))

    def _upload_lost(self, node: LearnerNode, header: ContributionHeader) -> None:
        if header in node.uploads:
            node.uploads.remove(header)
            self.tell_learner(node, UploadBroken(header=header))

    def _stored(self, session: SessionId, header: ContributionHeader) -> None:
        if session not in self.links or header not in self.links[session].uploads:
            return
        self.links[session].uploads.remove(header)
        if self.rng.random() < self.settings.poison:
            self.tell(UploadFailed(session=session, header=header, reason=RefusalReason.NON_FINITE, detail="poison"))
            return
        ref = f"{header.key.learner_id}:{header.key.fragment_id}:{header.step_hi}"
        self.tell(UploadStored(session=session, header=header, ref=ref, payload_bytes=516))

    def _merge(self, effect: StartMerge) -> None:
        if effect.round_id not in {record.round_id for record in self.syncer.state.closed.values()}:
            return
        names = [(entry.header.key, entry.header.step_hi, entry.staleness) for entry in effect.entries]
        text = repr((self.published[effect.fragment_id], effect.to_version, names))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.published[effect.fragment_id] = digest
        self.tell(
            MergeFinished(
                round_id=effect.round_id, digest=digest, ref=digest, codes_bytes=500, scales_bytes=16, update_bytes=530
            )
        )

    def _send_update(self, effect: SendUpdate) -> None:
        node = self.links.get(effect.session)
        if node is None:
            return
        header, session = effect.header, effect.session
        if self.rng.random() < self.settings.drop:
            broken = TransferBroken(session=session, fragment_id=header.fragment_id)
            self.at(self._delay_s(node), lambda: self.tell(broken))
            return
        self.at(self._delay_s(node), lambda: self._update_arrives(node, session, header))

    def _update_arrives(self, node: LearnerNode, session: SessionId, header: UpdateHeader) -> None:
        if node.session == session and node.alive:
            self.tell_learner(node, UpdateArrived(header=header))

    # ---- a learner's driver ----------------------------------------------------------------------

    def tell_learner(self, node: LearnerNode, event: LearnerEvent) -> None:
        """Give a learner's machine an event now."""
        if not node.alive or node.exit_code is not None:
            return
        self._perform_learner(node, node.machine.handle(event, self.now_s))
        node.timer += 1
        deadline_s, number = node.machine.deadline_s(), node.timer
        if deadline_s is not None:
            self.at(max(0.0, deadline_s - self.now_s), lambda: self._fire_learner(node, number))

    def _fire_learner(self, node: LearnerNode, number: int) -> None:
        if number == node.timer:
            self.tell_learner(node, TimerFired())

    def _perform_learner(self, node: LearnerNode, effects: list[LearnerEffect]) -> None:
        for effect in effects:
            match effect:
                case Connect():
                    self.at(self._delay_s(node) * 2, lambda: self._connect(node))
                case SendToSyncer():
                    self._say(node, effect)
                case RequestSnapshot():
                    node.wanted.add(effect.fragment_id)
                case StartUpload():
                    self._start_upload(node, effect.header)
                case DropUpload():
                    node.uploads.discard(effect.header)
                case ApplyUpdate():
                    self._apply(node, effect)
                case InstallUpdate():
                    node.installs[effect.fragment_id] = effect
                case AllowSteps():
                    node.allowed = effect.until_step
                case SetPace() | ShowReason():
                    pass
                case ExitLearner():
                    node.exit_code = effect.exit_code
                case _:
                    assert_never(effect)
        if not node.stepping and node.alive and node.exit_code is None:
            node.stepping = True
            self.at(0.0, lambda: self._boundary(node, stepped=False))

    def _connect(self, node: LearnerNode) -> None:
        if not node.alive:
            return
        if not self.syncer_up:
            self.tell_learner(node, ConnectionLost(reason="nobody answers", refused=False))
            return
        self._sessions += 1
        node.session = SessionId(self._sessions)
        node.uploads.clear()
        self.links[node.session] = node
        self.tell(LearnerConnected(session=node.session))
        self.tell_learner(node, Connected())

    def _say(self, node: LearnerNode, effect: SendToSyncer) -> None:
        session = node.session
        if session is None:
            return
        event = LearnerSaid(session=session, message=effect.message)
        times = 2 if self.rng.random() < self.settings.repeat else 1
        for _ in range(times):
            self._stream(node, 0, lambda: self._hear(session, event))

    def _hear(self, session: SessionId, event: LearnerSaid) -> None:
        if session in self.links:
            self.tell(event)

    def _start_upload(self, node: LearnerNode, header: ContributionHeader) -> None:
        session = node.session
        if session is None or header in node.uploads:
            return
        node.uploads.add(header)
        offered = UploadOffered(session=session, header=header)
        self.at(self._delay_s(node), lambda: self.tell(offered) if session in self.links else None)

    def _apply(self, node: LearnerNode, effect: ApplyUpdate) -> None:
        header = effect.header
        fragment_id = header.fragment_id
        held = node.applied.get(fragment_id, (node.versions[fragment_id], node.held[fragment_id]))
        for segment in header.segments:
            if segment.kind is SegmentKind.DIFFERENCE and segment.from_version != held[0]:
                raise Violation(f"{node.learner_id} adds a difference from {segment.from_version} to {held[0]}")
            held = (segment.to_version, segment.digest)
        if self.rng.random() < self.settings.poison:
            broken = UpdateBroken(fragment_id=fragment_id, version=held[0], reason=RefusalReason.DIGEST)
            self.at(0.0, lambda: self.tell_learner(node, broken))
            return
        node.applied[fragment_id] = held
        self.invariants.saw(fragment_id, *held)
        event = UpdateApplied(fragment_id=fragment_id, version=held[0], resync=header.resync)
        self.at(0.0, lambda: self.tell_learner(node, event))

    def _boundary(self, node: LearnerNode, *, stepped: bool) -> None:
        """What the training loop does between two steps."""
        node.stepping = False
        if not node.alive or node.exit_code is not None:
            return
        node.local_step += stepped
        tokens = node.local_step * _BATCH_TOKENS
        installed = []
        for fragment_id, install in sorted(node.installs.items()):
            version, digest = node.applied[fragment_id]
            if version == install.version:
                node.versions[fragment_id], node.held[fragment_id] = version, digest
                del node.applied[fragment_id]
            installed.append(
                Installed(
                    fragment_id=fragment_id,
                    version=install.version,
                    resync=install.resync,
                    step_lo=LocalStep(node.local_step),
                    tokens_lo=tokens,
                )
            )
        node.installs.clear()
        wanted, node.wanted = sorted(node.wanted), set()
        steps_on = node.allowed is None or node.local_step < node.allowed
        if steps_on:
            node.stepping = True
            self.at(node.link.step_s, lambda: self._boundary(node, stepped=True))
        if stepped or installed or wanted:
            node.steps_s.append((self.now_s, node.local_step))
            self.tell_learner(
                node,
                BoundaryPassed(
                    local_step=LocalStep(node.local_step),
                    tokens=tokens,
                    unit=node.local_step,
                    step_time_s=node.link.step_s,
                    loss=1.0,
                    learning_rate=0.1,
                    installed=tuple(installed),
                    snapshots=tuple(SnapshotTaken(fragment_id=fragment) for fragment in wanted),
                ),
            )

    # ---- inside ----------------------------------------------------------------------------------

    def _new_node(self, learner_id: LearnerId, link: LinkProfile) -> LearnerNode:
        settings = self.settings
        machine = LearnerMachine(
            LearnerSettings(
                schedule=self.schedule,
                overlap_steps=settings.overlap_steps,
                codec="int4",
                sizes=self._sizes,
                heartbeat_s=settings.lease_s / 3,
                retry=RetryPolicy(),
            ),
            Identity(
                run="world",
                learner_id=learner_id,
                incarnation=Incarnation(0),
                layout=self._terms.layout,
                settings=self._terms.settings,
                initial_digests=self._terms.initial_digests,
            ),
            [
                FragmentState(version=Version(self.syncer.state.epoch, 0), resync=0, step_lo=LocalStep(0), tokens_lo=0)
                for _ in range(settings.num_fragments)
            ],
            local_step=LocalStep(0),
            tokens=0,
            unit=0,
            rng=random.Random(self.rng.random()),
        )
        node = LearnerNode(learner_id, link, machine, settings.num_fragments)
        node.versions = [Version(self.syncer.state.epoch, 0)] * settings.num_fragments
        node.held = [_initial_digest(fragment) for fragment in range(settings.num_fragments)]
        return node

    def _delay_s(self, node: LearnerNode) -> float:
        return node.link.delay_s + node.link.jitter_s * self.rng.random()

    def _stream(self, node: LearnerNode, direction: int, action: Callable[[], None]) -> None:
        """Deliver on the control stream, in order; a cut connection loses what is under way."""
        session = node.session
        arrival_s = max(self.now_s + self._delay_s(node), node.stream_s[direction])
        node.stream_s[direction] = arrival_s
        self.at(arrival_s - self.now_s, lambda: action() if node.session == session else None)
