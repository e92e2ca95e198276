"""The real machines of a syncer and its learners on an invented network, in virtual time.

Weights are symbols here: a published value is the hash of what went into it, a learner holds such a hash. That
is enough to prove that equal versions are equal bits, and it is fast enough for thousands of runs. One
seed gives one run. Trials with real tensors and real bytes use the drivers under `virtual_loop`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from wan_diloco.errors import EXIT_TEMPORARY
from wan_diloco.protocol.events import (
    AcceptUpload,
    CloseSession,
    Connected,
    ConnectionLost,
    ExitLearner,
    LearnerConnected,
    LearnerDisconnected,
    LearnerSaid,
    RefuseUpload,
    SendToLearner,
    SendUpdate,
    SessionId,
    SyncerEffect,
    SyncerEvent,
    SyncerSaid,
    TransferBroken,
    UpdateArrived,
    UploadBroken,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import Acknowledged, ContributionHeader, LearnerMessage, RefusalReason
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.tape import TapeRecord
from wan_diloco.simulation.agenda import Agenda
from wan_diloco.simulation.checkers import Invariants, must
from wan_diloco.simulation.learner_node import LearnerNode, Note
from wan_diloco.simulation.lease_book import LeaseBook
from wan_diloco.simulation.liveliness import Liveliness
from wan_diloco.simulation.state_exchange import StateExchange
from wan_diloco.simulation.syncer_disk import SyncerDisk
from wan_diloco.simulation.syncer_node import Said, SyncerNode
from wan_diloco.simulation.talk import Talk
from wan_diloco.simulation.world_settings import LinkProfile, WorldSettings
from wan_diloco.units import LearnerId

__all__ = ["LearnerNode", "LinkProfile", "MachineWorld", "Said", "WorldSettings"]

_UP, _DOWN = 0, 1
# After how long both ends give up a connection over which nothing comes back; the second may need a little longer.
_KEEPALIVE_S = 8.0
_KEEPALIVE_SPREAD_S = 4.0
# How much later the last words on a broken connection come.
_LAST_WORDS_S = 0.6
# Until who asked to be started again is.
_RESTART_S = 3.0
# Of streams that break, how many break when all is there.
_BROKEN_AND_THERE = 0.3


class MachineWorld:
    """A whole run; `run` plays it.

    Args:
        settings: The run.
        seed: All chance in it.
        note: Is told each input of any machine with what came out: who, the event, the effects.

    Attributes:
        loses: Whether a transfer or an acknowledgement is lost while its stream lives on; chance by default.
        spoils: Whether a contribution turns out not to be finite; chance by default.
        watch: Is told of everything that passes the syncer, and of exits.
        nodes, everybody: The newest process of each learner, and all that ever were.
        mishaps: How often chance had something lost, repeated, spoiled or fail.
        clock_step_s: By how much the wall clock was set, from which the clocks of new processes begin.
        befell: What went wrong, and how often; whoever has it go wrong counts.
    """

    def __init__(self, settings: WorldSettings, seed: int, note: Note = lambda _who, _event, _effects: None) -> None:
        """Everybody starts at time 0."""
        self.settings = settings
        self._uploads_max = settings.uploads_max
        self.rng = random.Random(seed)
        self.agenda = Agenda()
        leases = LeaseBook(settings.learners, settings.num_spare_shards)
        self.invariants = Invariants(settings.quorum, settings.durable, leases)
        self.talk = Talk(settings, self.invariants)
        self.note = note
        self.loses: Callable[[SyncerEffect], bool] = lambda _: self.happens(settings.drop)
        self.spoils: Callable[[ContributionHeader], bool] = lambda _: self.happens(settings.poison)
        self.watch: Callable[[Said], None] = lambda _: None
        self.mishaps = 0
        self.clock_step_s = 0.0
        self.befell: Counter[str] = Counter()
        self.states = StateExchange(self)
        self.sessions: dict[SessionId, LearnerNode] = {}
        # Of strangers, who never get as far as a Welcome, and those of whose end the machine doesn't know yet.
        self.strangers: set[SessionId] = set()
        self._untold: set[SessionId] = set()
        self._last_session = 0
        self.liveliness = Liveliness(settings, self.invariants, self.talk)
        self.node = SyncerNode(self)
        self.node.start()
        self.nodes: dict[LearnerId, LearnerNode] = {}
        self.everybody: list[LearnerNode] = []
        for learner_id in settings.learners:
            if learner_id not in settings.late:
                self.join(learner_id, settings.link(learner_id))

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.agenda.now_s

    @property
    def syncer(self) -> SyncerMachine:
        """The machine of the syncer's newest process."""
        return self.node.machine

    @property
    def disk(self) -> SyncerDisk:
        """The syncer's."""
        return self.node.disk

    @property
    def inputs(self) -> list[tuple[float, SyncerEvent | None]]:
        """What went into the syncer's machine, with its time; None is its start."""
        return self.node.inputs

    @property
    def outputs(self) -> list[list[SyncerEffect]]:
        """What came out of it, one list an input."""
        return self.node.outputs

    @property
    def ended(self) -> bool:
        """The syncer has ended the run; learners may still have to hear of it."""
        return self.node.ended

    @property
    def syncer_up(self) -> bool:
        """Its process is there."""
        return self.node.up

    @property
    def resyncs(self) -> list[int]:
        """Of each fragment, how often learners took the published value whatever they had."""
        return [sum(node.resyncs[index] for node in self.everybody) for index in range(self.settings.num_fragments)]

    @property
    def num_sessions(self) -> int:
        """Connections of whose end the syncer's machine doesn't know."""
        return len(self._untold)

    @property
    def tape(self) -> list[TapeRecord]:
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
            self.liveliness.look(self.now_s, self.node, self.nodes.values())
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
        node.held = ([], [])
        lost = ConnectionLost(reason="cut", refused=False)
        process = self.node.process
        self.agenda.after(syncer_notices_s, lambda: self._gone(session, "cut", process))
        generation = node.generation
        self.agenda.after(learner_notices_s, lambda: node.handle(lost) if node.generation == generation else None)

    def part(self, node: LearnerNode, direction: int, lasts_s: float) -> None:
        """Nothing passes one way for a while (0 is up, 1 is down); a short time is only a delay, as with TCP."""
        session = node.session
        node.blocked[direction] += 1
        self.agenda.after(lasts_s, lambda: self._heal(node, direction))
        if lasts_s > _KEEPALIVE_S:
            self.agenda.after(_KEEPALIVE_S, lambda: self._give_up(node, session))

    def kill(self, node: LearnerNode) -> None:
        """End a learner's process; `revive` starts another life."""
        node.alive = False
        self._drop(node, "killed")

    def restart_uplink(self, node: LearnerNode) -> None:
        """The process between training and syncer dies, and another takes its place."""
        self._drop(node, "the uplink died")
        node.restart_uplink()

    def revive(self, node: LearnerNode) -> LearnerNode:
        """A new life, from the initial weights, with nothing of its own left."""
        return self.join(node.learner_id, node.link)

    def start_again(self, node: LearnerNode) -> None:
        """A new life in place of one that is over, unless somebody has started one meanwhile."""
        if self.nodes[node.learner_id] is node:
            self.revive(node)

    def doom_syncer(self, effects: int, down_s: float) -> bool:
        """Crash the syncer in the middle of that many effects from now, and start it again after `down_s`."""
        return self.node.doom(effects, down_s)

    def restart_syncer(self, down_s: float) -> bool:
        """Crash the syncer now; it starts again from its disk after `down_s`."""
        return self.node.crash(down_s)

    def stranger(self, words: Sequence[LearnerMessage]) -> bool:
        """Somebody connects, and says these words whatever is answered; returns whether anybody answers."""
        if not self.node.up:
            return False
        self._last_session += 1
        session = SessionId(self._last_session)
        self.strangers.add(session)
        self._untold.add(session)
        self.tell(LearnerConnected(session=session))
        for word in words:
            self.tell(LearnerSaid(session=session, message=word))
        self.agenda.after(1.0, lambda: self._gone(session, "a stranger left", self.node.process))
        return True

    def tell(self, event: SyncerEvent, process: int | None = None) -> None:
        """Give the syncer's machine an event now, unless it was meant for a process that is gone."""
        self.node.tell(event, process)

    # ---- what the syncer wants -------------------------------------------------------------------

    def carry(self, effect: SyncerEffect) -> None:
        """Do what concerns learners."""
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
            case SendUpdate():
                self._send_update(effect)
            case _:
                raise AssertionError(f"{type(effect).__name__} is the syncer's own affair")

    def crashed(self) -> None:
        """The syncer's process is gone, and with it all connections."""
        self._untold.clear()
        self.strangers.clear()
        for node in list(self.sessions.values()):
            self.cut(node, learner_notices_s=self.delay_s(node))

    def _close(self, session: SessionId) -> None:
        if session in self.strangers:
            process = self.node.process
            self.agenda.after(0.0, lambda: self._gone(session, "closed", process))
        node = self.sessions.get(session)
        if node is not None:
            # What was sent before arrives before.
            self._stream(node, _DOWN, lambda: self.cut(node))

    def _deliver(self, effect: SendToLearner) -> None:
        self.talk.said(effect)
        node = self.sessions.get(effect.session)
        if node is None or (isinstance(effect.message, Acknowledged) and self.loses(effect)):
            return
        said = SyncerSaid(message=effect.message)
        for _ in range(2 if self.settings.echo and self.happens(self.settings.echo) else 1):
            self._stream(node, _DOWN, lambda: node.handle(said))

    def _accept(self, effect: AcceptUpload) -> None:
        node, header = self.sessions.get(effect.session), effect.header
        if node is None:
            return
        node.uplink_free_s = max(node.uplink_free_s, self.now_s) + node.link.upload_s  # bytes follow at once
        lost = self.loses(effect)
        arrival_s = node.uplink_free_s + self._bulk_s()
        self._bulk(node, _UP, arrival_s, lambda: self._uploaded(effect.session, header, lost=lost))

    def _uploaded(self, session: SessionId, header: ContributionHeader, *, lost: bool) -> None:
        node = self.sessions.get(session)
        if node is None or header not in node.uploads:
            return
        node.uploads.remove(header)
        if lost:
            node.handle(UploadBroken(header=header))
            if self.rng.random() >= _BROKEN_AND_THERE:
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
        process = self.node.process
        self.agenda.after(self.node.store_s(), lambda: self.tell(event, process))

    def _send_update(self, effect: SendUpdate) -> None:
        node, session, process = self.sessions.get(effect.session), effect.session, self.node.process
        if node is None:
            return
        broken = TransferBroken(session=session, fragment_id=effect.header.fragment_id)
        arrived = UpdateArrived(header=effect.header)
        lost = self.loses(effect)

        # A stream may break at its very end, when all is there.
        there = not lost or self.rng.random() < _BROKEN_AND_THERE

        def arrive() -> None:
            if there and node.session == session:
                node.handle(arrived)
            if lost:
                self.tell(broken, process)

        self.agenda.after(self.delay_s(node) + self._bulk_s(), lambda: self._descend(node, session, arrive))

    # ---- a learner's surroundings ----------------------------------------------------------------

    def connect(self, node: LearnerNode) -> None:
        """A learner knocks; the answer takes a round trip."""
        generation = node.generation
        self.agenda.after(2 * self.delay_s(node), lambda: self._connected(node, generation))

    def _connected(self, node: LearnerNode, generation: int) -> None:
        if not node.runs or node.generation != generation:
            return
        if not self.node.up or any(node.blocked):
            node.handle(ConnectionLost(reason="nobody answers", refused=False))
            return
        self._last_session += 1
        node.session = SessionId(self._last_session)
        node.uploads.clear()
        self.sessions[node.session] = node
        self._untold.add(node.session)
        self.tell(LearnerConnected(session=node.session))
        node.handle(Connected())

    def say(self, node: LearnerNode, message: LearnerMessage) -> None:
        """A learner sends a control message."""
        session = node.session
        if session is None:
            return
        event = LearnerSaid(session=session, message=message)
        for _ in range(2 if self.happens(self.settings.repeat) else 1):
            self._stream(node, _UP, lambda: self.tell(event))

    def offer(self, node: LearnerNode, header: ContributionHeader) -> None:
        """A learner announces a contribution's bytes."""
        session = node.session
        if session is None or header in node.uploads:
            return
        node.uploads.add(header)
        under_way = len(node.uploads)
        must(under_way <= self._uploads_max, f"{node.learner_id} has {under_way} uploads under way")
        offered = UploadOffered(session=session, header=header)
        arrival_s = self.now_s + self.delay_s(node) + self._bulk_s()
        self._bulk(node, _UP, arrival_s, lambda: self.tell(offered))

    def poisoned(self) -> bool:
        """Whether an update turns out not to decode."""
        return self.happens(self.settings.poison)

    def exited(self, node: LearnerNode, effect: ExitLearner) -> None:
        """A learner's process ends, and with it its connection."""
        self.watch(effect)
        self.agenda.after(0.0, lambda: self.cut(node))
        if effect.exit_code == EXIT_TEMPORARY:
            self.agenda.after(_RESTART_S, lambda: self.start_again(node))  # as a supervisor does

    # ---- inside ----------------------------------------------------------------------------------

    def delay_s(self, node: LearnerNode) -> float:
        """How long a learner's next message takes, one way."""
        return node.link.delay_s + node.link.jitter_s * self.rng.random()

    def happens(self, chance: float) -> bool:
        """Whether something befalls now that has this chance."""
        befalls = self.now_s < self.settings.calm_s and self.rng.random() < chance
        self.mishaps += befalls
        if befalls:
            self.liveliness.disturbed(self.now_s)
        return befalls

    def _bulk_s(self) -> float:
        return self.settings.bulk_jitter_s * self.rng.random() if self.settings.bulk_jitter_s else 0.0

    def _drop(self, node: LearnerNode, reason: str) -> None:
        session, node.session = node.session, None
        if session is not None:
            del self.sessions[session]
            node.held = ([], [])
            self._gone(session, reason, self.node.process)

    def _gone(self, session: SessionId, reason: str, process: int) -> None:
        """The syncer hears of a session's end, once."""
        if session in self._untold and process == self.node.process:
            self._untold.discard(session)
            self.strangers.discard(session)
            self.liveliness.disturbed(self.now_s)
            self.tell(LearnerDisconnected(session=session, reason=reason), process)

    def _give_up(self, node: LearnerNode, session: SessionId | None) -> None:
        if session is not None and node.session == session and any(node.blocked):
            late_s = [_KEEPALIVE_SPREAD_S * self.rng.random() for _ in range(2)]
            self.cut(node, syncer_notices_s=late_s[0], learner_notices_s=late_s[1])

    def _heal(self, node: LearnerNode, direction: int) -> None:
        node.blocked[direction] -= 1
        self.liveliness.disturbed(self.now_s)
        if not node.blocked[direction]:
            held = list(node.held[direction])
            node.held[direction].clear()
            for session, action in held:
                self._arrive(node, session, direction, action)

    def _stream(self, node: LearnerNode, direction: int, action: Callable[[], None]) -> None:
        """Deliver on the control stream, in order; a cut connection loses what is under way."""
        arrival_s = max(self.now_s + self.delay_s(node), node.stream_s[direction])
        node.stream_s[direction] = arrival_s
        self._bulk(node, direction, arrival_s, action)

    def _bulk(self, node: LearnerNode, direction: int, arrival_s: float, action: Callable[[], None]) -> None:
        """Deliver at that time, unless the connection is gone by then, or its way is blocked."""
        session = node.session
        self.agenda.at(arrival_s, lambda: self._arrive(node, session, direction, action))

    def _arrive(self, node: LearnerNode, session: SessionId | None, direction: int, action: Callable[[], None]) -> None:
        if session is None:
            return
        if node.session != session:
            # What was said before a learner lost its connection may come all the same, and after its next Hello.
            if direction == _UP and not node.blocked[_UP]:
                self.agenda.after(_LAST_WORDS_S, lambda: action() if session in self._untold else None)
            return
        if node.blocked[direction]:
            node.held[direction].append((session, action))
        else:
            action()

    def _descend(self, node: LearnerNode, session: SessionId, action: Callable[[], None]) -> None:
        """An update is there, or its end; a sender notices also when the receiver is gone."""
        if node.session == session and node.blocked[_DOWN]:
            node.held[_DOWN].append((session, action))
        elif session in self._untold:
            action()

    def change_link(self, node: LearnerNode, *, slower: float, steps_slower: float, lasts_s: float) -> None:
        """A link, or a machine, is slower for a while."""
        usual = node.usual_link
        node.link = replace(usual, upload_s=usual.upload_s * slower, step_s=usual.step_s * steps_slower)
        node.link_change += 1
        change = node.link_change
        self.agenda.after(lasts_s, lambda: self._usual(node, change))

    def _usual(self, node: LearnerNode, change: int) -> None:
        if node.link_change == change:
            node.link = node.usual_link
            self.liveliness.disturbed(self.now_s)
