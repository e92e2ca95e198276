"""The real machines of a syncer and its learners on an invented network, in virtual time.

Weights are symbols here: a published value is the hash of what went into it, a learner holds such a hash. That
is enough to prove that equal versions are equal bits, and it is fast enough for thousands of runs. One
seed gives one run. Trials with real tensors and real bytes use the drivers under `virtual_loop`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import assert_never

from wan_diloco.protocol.events import (
    AcceptUpload,
    CloseSession,
    Connected,
    ConnectionLost,
    EndGiving,
    EndRun,
    ExitLearner,
    FetchState,
    GiveState,
    LearnerConnected,
    LearnerDisconnected,
    LearnerSaid,
    MergeFailed,
    MergeFinished,
    Record,
    RefuseUpload,
    SendToLearner,
    SendUpdate,
    SessionId,
    ShowReason,
    StartMerge,
    StateBroken,
    StateFetched,
    SyncerEffect,
    SyncerEvent,
    SyncerSaid,
    TimerFired,
    TransferBroken,
    UpdateArrived,
    UploadBroken,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import Acknowledged, ContributionHeader, LearnerMessage, RefusalReason
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.simulation.agenda import Agenda
from wan_diloco.simulation.checkers import Invariants, Violation
from wan_diloco.simulation.learner_node import LearnerNode
from wan_diloco.simulation.syncer_disk import SyncerDisk
from wan_diloco.simulation.world_settings import LinkProfile, WorldSettings
from wan_diloco.units import LearnerId, TransferId

__all__ = ["LearnerNode", "LinkProfile", "MachineWorld", "Said", "WorldSettings"]

# What may be told to whoever watches: an event or effect of the syncer, or a learner's end.
Said = SyncerEvent | SyncerEffect | ExitLearner
_UP, _DOWN = 0, 1
# From a contribution's last byte to its place in the journal.
_STORE_S = 0.001
# A state takes as long as that many contributions.
_STATE_UPLOADS = 16


class MachineWorld:
    """A whole run; `run` plays it.

    Args:
        settings: The run.
        seed: All chance in it.

    Attributes:
        inputs: What went into the syncer's machine, with its time; None is its start.
        outputs: What came out of it, one list an input.
        loses: Whether a transfer or an acknowledgement is lost while its stream lives on; chance by default.
        spoils: Whether a contribution turns out not to be finite; chance by default.
        watch: Is told of everything that passes the syncer, and of exits.
        nodes, everybody: The newest process of each learner, and all that ever were.
        ended: The syncer has ended the run; learners may still have to hear of it.
    """

    def __init__(self, settings: WorldSettings, seed: int) -> None:
        """Everybody starts at time 0."""
        self.settings = settings
        self.rng = random.Random(seed)
        self.agenda = Agenda()
        self.invariants = Invariants(settings.quorum)
        self.inputs: list[tuple[float, SyncerEvent | None]] = []
        self.outputs: list[list[SyncerEffect]] = []
        self.loses: Callable[[SyncerEffect], bool] = lambda _: self._happens(settings.drop)
        self.spoils: Callable[[ContributionHeader], bool] = lambda _: self._happens(settings.poison)
        self.watch: Callable[[Said], None] = lambda _: None
        self.ended = False
        self.published = list(settings.initial_digests)
        # Who gives which state; on which of its sessions.
        self.gives: dict[TransferId, tuple[LearnerNode, SessionId]] = {}
        self.sessions: dict[SessionId, LearnerNode] = {}
        self._last_session = 0
        self._timer = 0
        self.disk = SyncerDisk()
        self.syncer = SyncerMachine(settings.for_syncer(), settings.fresh_state())
        self.disk.snapshot(self.syncer.state)
        self.syncer_up = False
        # A process that has crashed hears nothing any more of what was begun for it.
        self._process = 0
        # After how many more effects the syncer crashes; None for never.
        self._doom: int | None = None
        self._down_s = 0.0
        self._start_syncer()
        self.nodes: dict[LearnerId, LearnerNode] = {}
        self.everybody: list[LearnerNode] = []
        for learner_id, link in zip(settings.learners, settings.links, strict=True):
            self.join(learner_id, link)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.agenda.now_s

    @property
    def tape(self) -> list[object]:
        """All records that were put on the tape and not lost."""
        return list(self.disk.tape)

    # ---- playing ---------------------------------------------------------------------------------

    def run(self, until_s: float = float("inf"), events_max: int = 1_000_000) -> None:
        """Play until the run has ended and all who live know it, or that time, or that many events.

        Raises:
            Violation: An invariant doesn't hold.
        """
        for _ in range(events_max):
            over = self.ended and not any(node.runs for node in self.everybody)
            if over:
                return
            if not self.agenda.step(until_s):
                break
        else:
            return
        if until_s < float("inf"):
            self.agenda.pass_until(until_s)

    # ---- faults ----------------------------------------------------------------------------------

    def join(self, learner_id: LearnerId, link: LinkProfile) -> LearnerNode:
        """A learner's process starts, from the initial weights; an older one of that name is left alone."""
        node = LearnerNode(learner_id, link, self, random.Random(self.rng.random()))
        self.nodes[learner_id] = node
        self.everybody.append(node)
        node.start()
        return node

    def cut(self, node: LearnerNode, *, syncer_notices_s: float = 0.0, learner_notices_s: float = 0.0) -> None:
        """Break a learner's connection: what was under way is gone; each end notices when told so."""
        session, node.session = node.session, None
        if session is None:
            return
        del self.sessions[session]
        node.uploads.clear()
        process = self._process
        gone = LearnerDisconnected(session=session, reason="cut")
        lost = ConnectionLost(reason="cut", refused=False)
        self.agenda.after(syncer_notices_s, lambda: self.tell(gone, process))
        self.agenda.after(learner_notices_s, lambda: node.handle(lost))

    def kill(self, node: LearnerNode) -> None:
        """End a learner's process; `revive` starts another life."""
        node.alive = False
        session, node.session = node.session, None
        if session is not None:
            del self.sessions[session]
            self.tell(LearnerDisconnected(session=session, reason="killed"))

    def revive(self, node: LearnerNode) -> LearnerNode:
        """A new life, from the initial weights, with nothing of its own left."""
        return self.join(node.learner_id, node.link)

    def doom_syncer(self, effects: int, down_s: float) -> None:
        """Crash the syncer in the middle of that many effects from now, and start it again after `down_s`."""
        if self.syncer_up and self._doom is None:
            self._doom, self._down_s = effects, down_s

    def restart_syncer(self, down_s: float) -> None:
        """Crash the syncer now; it starts again from its disk after `down_s`."""
        if self.syncer_up:
            self._crash(down_s)

    # ---- the syncer's driver ---------------------------------------------------------------------

    def tell(self, event: SyncerEvent, process: int | None = None) -> None:
        """Give the syncer's machine an event now, unless it was meant for a process that is gone."""
        if not self.syncer_up or process not in (None, self._process):
            return
        self.watch(event)
        self.inputs.append((self.now_s, event))
        self._carry_out(self.syncer.handle(event, self.now_s))

    def _start_syncer(self) -> None:
        self.syncer_up = True
        self.inputs.append((self.now_s, None))
        self._carry_out(self.syncer.start(self.now_s))

    def _carry_out(self, effects: list[SyncerEffect]) -> None:
        self.outputs.append(effects)
        process = self._process
        for index, effect in enumerate(effects):
            if self._doom is not None:
                self._doom -= 1
                if self._doom < 0:
                    # A driver may write all records of a list before it does the rest.
                    if self.rng.random() < 0.5:
                        self._write([later for later in effects[index:] if isinstance(later, Record)])
                    self._doom = None
                    self._crash(self._down_s)
            if process != self._process:
                return
            self.watch(effect)
            self._perform(effect)
        self.invariants.balanced(self.syncer)
        self._timer += 1
        deadline_s, number = self.syncer.deadline_s(), self._timer
        if deadline_s is not None:
            self.agenda.at(deadline_s, lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number == self._timer:
            self.tell(TimerFired())

    def _crash(self, down_s: float) -> None:
        self.syncer_up = False
        self._process += 1
        self._timer += 1
        self.disk.crash(self.rng)
        for node in list(self.sessions.values()):
            self.cut(node, learner_notices_s=self.delay_s(node))
        self.agenda.after(down_s, self._resume)

    def _resume(self) -> None:
        state = self.disk.restore()
        self.published = list(state.digests)
        self.ended = False
        self.syncer = SyncerMachine(self.settings.for_syncer(), state)
        self._start_syncer()

    def _write(self, records: list[Record]) -> None:
        for effect in records:
            self.disk.write(effect)
            self.invariants.recorded(effect.record)

    def _perform(self, effect: SyncerEffect) -> None:
        match effect:
            case SendToLearner():
                self._deliver(effect)
            case CloseSession():
                self._close(effect.session)
            case AcceptUpload():
                self._accept(effect)
            case RefuseUpload():
                if (node := self.sessions.get(effect.session)) is not None:
                    node.uploads.discard(effect.header)
            case ShowReason():
                pass
            case Record():
                self._write([effect])
            case StartMerge():
                self.invariants.merging(effect)
                process = self._process
                self.agenda.after(self.settings.merge_s, lambda: self._merge(effect, process))
            case SendUpdate():
                self._send_update(effect)
            case EndRun():
                self.ended = True
            case _:
                assert_never(effect)

    def _close(self, session: SessionId) -> None:
        node = self.sessions.get(session)
        if node is not None:
            # What was sent before arrives before.
            self._stream(node, _DOWN, lambda: self.cut(node))

    def _deliver(self, effect: SendToLearner) -> None:
        self.invariants.said(effect)
        node = self.sessions.get(effect.session)
        if node is None or (isinstance(effect.message, Acknowledged) and self.loses(effect)):
            return
        self._stream(node, _DOWN, lambda: node.handle(SyncerSaid(message=effect.message)))

    def _accept(self, effect: AcceptUpload) -> None:
        node, header = self.sessions.get(effect.session), effect.header
        if node is None:
            return
        node.uplink_free_s = max(node.uplink_free_s, self.now_s) + node.link.upload_s  # bytes follow at once
        lost = self.loses(effect)
        self.agenda.at(node.uplink_free_s, lambda: self._uploaded(effect.session, header, lost=lost))

    def _uploaded(self, session: SessionId, header: ContributionHeader, *, lost: bool) -> None:
        node = self.sessions.get(session)
        if node is None or header not in node.uploads:
            return
        node.uploads.remove(header)
        if lost:
            node.handle(UploadBroken(header=header))
            return
        event: SyncerEvent = UploadStored(
            session=session,
            header=header,
            ref=f"{header.key.learner_id}:{header.key.fragment_id}:{header.step_hi}",
            payload_bytes=516,
        )
        if self.spoils(header):
            event = UploadFailed(session=session, header=header, reason=RefusalReason.NON_FINITE, detail="poison")
        # Once the bytes are there they are journalled, whatever becomes of the connection.
        process = self._process
        self.agenda.after(_STORE_S, lambda: self.tell(event, process))

    def _merge(self, effect: StartMerge, process: int) -> None:
        if process != self._process:
            return
        if self._happens(self.settings.merge_fails):
            self.tell(MergeFailed(round_id=effect.round_id, reason="the disk is full"))
            return
        names = [(entry.header.key, entry.header.step_hi, entry.staleness) for entry in effect.entries]
        text = repr((self.published[effect.fragment_id], effect.to_version, names))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.published[effect.fragment_id] = digest
        finished = MergeFinished(
            round_id=effect.round_id, digest=digest, ref=digest, codes_bytes=500, scales_bytes=16, update_bytes=530
        )
        self.tell(finished)

    def _send_update(self, effect: SendUpdate) -> None:
        node, session, process = self.sessions.get(effect.session), effect.session, self._process
        if node is None:
            return
        broken = TransferBroken(session=session, fragment_id=effect.header.fragment_id)
        arrived = UpdateArrived(header=effect.header)
        lost = self.loses(effect)

        def arrive() -> None:
            if lost:
                self.tell(broken, process)
            elif node.session == session:
                node.handle(arrived)

        self.agenda.after(self.delay_s(node), arrive)

    # ---- a learner's surroundings ----------------------------------------------------------------

    def connect(self, node: LearnerNode) -> None:
        """A learner knocks; the answer takes a round trip."""
        self.agenda.after(2 * self.delay_s(node), lambda: self._connected(node))

    def _connected(self, node: LearnerNode) -> None:
        if not node.runs:
            return
        if not self.syncer_up:
            node.handle(ConnectionLost(reason="nobody answers", refused=False))
            return
        self._last_session += 1
        node.session = SessionId(self._last_session)
        node.uploads.clear()
        self.sessions[node.session] = node
        self.tell(LearnerConnected(session=node.session))
        node.handle(Connected())

    def say(self, node: LearnerNode, message: LearnerMessage) -> None:
        """A learner sends a control message."""
        session = node.session
        if session is None:
            return
        event = LearnerSaid(session=session, message=message)
        for _ in range(2 if self._happens(self.settings.repeat) else 1):
            self._stream(node, _UP, lambda: self.tell(event))

    def offer(self, node: LearnerNode, header: ContributionHeader) -> None:
        """A learner announces a contribution's bytes."""
        session = node.session
        if session is None or header in node.uploads:
            return
        node.uploads.add(header)
        if len(node.uploads) > self.settings.uploads_max:
            raise Violation(f"{node.learner_id} has {len(node.uploads)} uploads under way")
        offered = UploadOffered(session=session, header=header)
        self.agenda.after(self.delay_s(node), lambda: self.tell(offered) if session in self.sessions else None)

    def give(self, node: LearnerNode, effect: GiveState | EndGiving) -> None:
        """A learner begins to give its state, or stops."""
        if isinstance(effect, EndGiving) or node.session is None:
            self.gives.pop(effect.transfer, None)
        else:
            self.gives[effect.transfer] = (node, node.session)

    def fetch(self, node: LearnerNode, effect: FetchState) -> None:
        """A learner takes a state, for as long as several contributions take; it comes whole or not at all."""
        session, transfer = node.session, effect.offer.transfer

        def end() -> None:
            giver, giving = self.gives.pop(transfer, (None, None))
            whole = giver is not None and giver.runs and giver.session == giving and node.session == session
            if whole and session is not None and self._joins(session, transfer):
                node.handle(StateFetched(transfer=transfer))
            else:
                node.handle(StateBroken(transfer=transfer, reason="lost"))

        self.agenda.after(_STATE_UPLOADS * node.link.upload_s + 2 * self.delay_s(node), end)

    def _joins(self, session: SessionId, transfer: TransferId) -> bool:
        allowed = self.syncer_up and self.syncer.donors.allows(session, transfer, giving=False)
        return allowed and not self._happens(self.settings.drop)

    def poisoned(self) -> bool:
        """Whether an update turns out not to decode."""
        return self._happens(self.settings.poison)

    def exited(self, node: LearnerNode, effect: ExitLearner) -> None:
        """A learner's process ends, and with it its connection."""
        self.watch(effect)
        self.agenda.after(0.0, lambda: self.cut(node))

    # ---- inside ----------------------------------------------------------------------------------

    def delay_s(self, node: LearnerNode) -> float:
        """How long a learner's next message takes, one way."""
        return node.link.delay_s + node.link.jitter_s * self.rng.random()

    def _happens(self, chance: float) -> bool:
        return self.now_s < self.settings.calm_s and self.rng.random() < chance

    def _stream(self, node: LearnerNode, direction: int, action: Callable[[], None]) -> None:
        """Deliver on the control stream, in order; a cut connection loses what is under way."""
        session = node.session
        arrival_s = max(self.now_s + self.delay_s(node), node.stream_s[direction])
        node.stream_s[direction] = arrival_s
        self.agenda.at(arrival_s, lambda: action() if node.session == session else None)
