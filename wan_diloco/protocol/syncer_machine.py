"""The syncer's decisions: a pure function of its state, an event and the time.

A driver feeds events, and performs the effects in their order. Whatever the event, the machine first takes
note of it, then settles: leases, start, pace, due rounds, quorums, the end. So a decision is made in one
place, whichever event made it possible.

The caller's duties: call `start` once before any event; give a `now_s` that never goes back; call with
`TimerFired` when `deadline_s` has come; perform effects in order.
"""

from __future__ import annotations

from typing import assert_never

from wan_diloco.errors import LocalProtocolError
from wan_diloco.protocol.epochs import next_epoch
from wan_diloco.protocol.events import (
    CallsRefused,
    ContributionsUnreadable,
    EndRun,
    IngressChanged,
    LearnerConnected,
    LearnerDisconnected,
    LearnerSaid,
    MergeFailed,
    MergeFinished,
    SyncerEffect,
    SyncerEvent,
    TimerFired,
    TransferBroken,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import Pace, Start, Stop
from wan_diloco.protocol.syncer_context import SyncerContext, SyncerSettings
from wan_diloco.protocol.syncer_contributions import ContributionDesk
from wan_diloco.protocol.syncer_donors import DonorDesk
from wan_diloco.protocol.syncer_rounds import RoundConductor
from wan_diloco.protocol.syncer_sessions import SessionDesk
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import MembershipChanged, RunEnded, RunStarted, ShardsAssigned, SyncerStarted
from wan_diloco.units import GlobalStep, LocalStep, Term

__all__ = ["SyncerMachine", "SyncerSettings"]

# Figures fall by no more than this over a restart; a note a second is little beside the rounds.
_NOTE_S = 1.0
# More than a process opens in a lifetime.
_ROUNDS_A_TERM_MAX = 1_000_000_000


class SyncerMachine:
    """All decisions of one syncer process.

    Args:
        settings: Fixed for the run.
        state: Fresh, or restored from a snapshot and the tape behind it.
    """

    def __init__(self, settings: SyncerSettings, state: SyncerState) -> None:
        """Hold the state; `start` begins."""
        self.context = SyncerContext(settings, state)
        self.conductor = RoundConductor(self.context)
        self._contributions = ContributionDesk(self.context, self.conductor)
        self.donors = DonorDesk(self.context)
        self._sessions = SessionDesk(self.context, self.conductor, self.donors)
        self._paced: tuple[int, int] = (self.context.membership.global_step, 0)
        self._recorded = 0
        self._noted = state.progress()
        self._note_due_s = 0.0
        self._finished = False

    @property
    def state(self) -> SyncerState:
        """The durable state, for snapshots; only this machine changes it."""
        return self.context.state

    def start(self, now_s: float) -> list[SyncerEffect]:
        """Take the state: a new term, and the merges that were closed and not published."""
        self.context.began_s = now_s
        settings = self.context.settings
        epoch = next_epoch(self.state, settings.epoch_min)
        term = Term(max(self.state.term + 1, settings.term_min))
        # Rounds that another process opened may have been answered; their numbers must not come again, or those answers
        # would count for a question never asked. Nothing is known of those that it never closed, or whose closing was
        # lost; so each term has numbers of its own.
        next_round = max(self.state.next_round, (term - 1) * _ROUNDS_A_TERM_MAX)
        record = SyncerStarted(
            term=term, epoch=epoch, next_round=next_round, durable=settings.durable, term_id=settings.term_id
        )
        self.context.record(record, durable=True)
        shards = settings.data_shards
        if shards != self.state.listed:
            # Also who is gone: nobody waits for it, and what it had under way has its fate.
            self.context.record(ShardsAssigned(shards=shards), durable=True)
        self._remember(now_s)
        self.conductor.restart(now_s)
        self._settle(now_s)
        return self.context.take()

    def _remember(self, now_s: float) -> None:
        for learner_id, anchor in self.state.anchors.items():
            incarnation = self.state.incarnations[learner_id]
            life = self.state.ledger.lives.get((learner_id, incarnation))
            if life is not None:
                step = LocalStep(life.position.steps)
                self.context.membership.remember(learner_id, incarnation, step, anchor, now_s)

    def handle(self, event: SyncerEvent, now_s: float) -> list[SyncerEffect]:
        """Take note of an event, decide, and say what to do, in order.

        Raises:
            LocalProtocolError: The driver misuses the machine.
        """
        if self.context.began_s is None:
            raise LocalProtocolError("the machine was not started")
        if self.context.taken_over:
            return []
        self._note(event, now_s)
        self._settle(now_s)
        return self.context.take()

    def deadline_s(self) -> float | None:
        """When `TimerFired` is due next; None for never."""
        if self._finished or self.context.taken_over:
            return None
        membership = self.context.membership
        times = [membership.expires_s(member) for member in membership.live()]
        times += self.conductor.deadlines_s()
        times += self.donors.deadlines_s()
        if not self.state.started and self.context.began_s is not None and membership.live():
            times.append(self.context.began_s + self.context.settings.start_timeout_s)
        return min(times, default=None)

    def _note(self, event: SyncerEvent, now_s: float) -> None:
        membership = self.context.membership
        match event:
            case LearnerConnected() | TimerFired():
                pass
            case CallsRefused():
                self.state.rejected[event.reason] += event.number
            case LearnerDisconnected():
                self.context.closing.discard(event.session)
                membership.disconnected(event.session)
            case LearnerSaid():
                self._sessions.said(event.session, event.message, now_s)
            case UploadOffered():
                self._contributions.offered(event.session, event.header, now_s)
            case UploadStored():
                self._contributions.stored(event, now_s)
            case UploadFailed():
                self._contributions.failed(event)
            case MergeFinished():
                self.conductor.merged(event)
            case MergeFailed():
                self.conductor.merge_failed(event, now_s)
            case ContributionsUnreadable():
                self.conductor.unreadable(event, now_s)
            case TransferBroken():
                member = membership.of(event.session)
                if event.unreadable:
                    self.context.downlink.chain_lost(event.fragment_id, self.state.versions[event.fragment_id])
                if member is not None:
                    self.context.downlink.broken(member.learner_id, event.fragment_id)
                    self.context.send_updates(member)
            case IngressChanged():
                self.context.ingress = event.ingress
                self.conductor.cap_changed()
            case _:
                assert_never(event)

    def _settle(self, now_s: float) -> None:
        """Make every decision that has become possible."""
        if self._finished or self.context.taken_over:
            return
        context = self.context
        for member in context.membership.expire(now_s):
            context.show(
                f"member:{member.learner_id}",
                f"nothing was heard of {member.learner_id} for a whole lease: rounds go on without it",
            )
        for member in context.membership.live():
            context.show(f"member:{member.learner_id}", "")
        self._start_run(now_s)
        if self.state.started:
            self._advance(now_s)
            self.conductor.settle(now_s)
        self.donors.settle(now_s)
        self._note_progress(now_s)
        self._end_run()

    def _note_progress(self, now_s: float) -> None:
        """Put on the tape what only reports and refusals tell, at most once a second."""
        if now_s < self._note_due_s:
            return
        progress = self.state.progress()
        if progress != self._noted:
            self._noted, self._note_due_s = progress, now_s + _NOTE_S
            self.context.record(progress, durable=False)

    def _start_run(self, now_s: float) -> None:
        context, membership = self.context, self.context.membership
        if self.state.started or context.began_s is None:
            return
        live, listed = {member.learner_id for member in membership.live()}, context.settings.terms.learners
        present = [learner for learner in listed if learner in live]
        absent = [learner for learner in listed if learner not in live]
        over = now_s >= context.began_s + context.settings.start_timeout_s
        if absent and not (over and live):
            context.show("start", f"waiting for {', '.join(absent)} before the first step")
            return
        started = RunStarted(present=tuple(present), absent=tuple(absent), total_steps=context.settings.total_steps)
        context.record(started, durable=True)
        context.show("start", "")
        for member in membership.connected():
            if member.session is not None:
                start = Start(global_step=GlobalStep(membership.global_step), anchor=member.anchor)
                context.send(member.session, start)

    def _advance(self, now_s: float) -> None:
        """Follow the members' progress, and tell them the step whenever it or their anchors change, or they ask."""
        membership = self.context.membership
        if self._recorded != membership.changes:
            self._recorded = membership.changes
            anchors = tuple((member.learner_id, member.anchor) for member in membership.live())
            changed = MembershipChanged(global_step=GlobalStep(membership.global_step), anchors=anchors)
            self.context.record(changed, durable=True)
        before = membership.global_step
        # In lockstep learners count rounds by their steps, so each must be held: the step doesn't pass one.
        lockstep = self.context.settings.policy.overlap_steps == 0
        last = self.context.settings.total_steps
        if membership.advance(min(last, self.conductor.next_stop()) if lockstep else last):
            self.conductor.fall_due(before, membership.global_step, now_s)
        elif len(membership.live()) < membership.quorum:
            text = f"{len(membership.live())} of {membership.quorum} learners are live"
            self.context.show("quorum", text)
        if len(membership.live()) >= membership.quorum:
            self.context.show("quorum", "")
        standing = (membership.global_step, membership.changes)
        is_news, self._paced = self._paced != standing, standing
        rates = self.context.ingress.rates(member.learner_id for member in membership.senders())
        for member in membership.connected():
            echo = self.context.echoes.get(member.learner_id, 0)
            rate = rates.get(member.learner_id, 0.0)
            # Who lost its lease may send all the same: it hears of its rate, though not of each step.
            is_due = (member.live and (is_news or echo)) or rate != member.granted_bytes_per_s
            if member.session is not None and is_due:
                member.granted_bytes_per_s = rate
                pace = Pace(
                    global_step=GlobalStep(membership.global_step),
                    anchor=member.anchor,
                    echo=echo,
                    rate_bytes_per_s=rate,
                )
                self.context.send(member.session, pace)

    def _end_run(self) -> None:
        """At the last step, when every round is done, or none that is left ever can be, the run ends."""
        context, membership = self.context, self.context.membership
        reached = membership.global_step >= context.settings.total_steps
        if not (self.state.started and reached):
            return
        barren = self.conductor.is_barren and not self.state.closed
        if not (self.conductor.is_idle or barren):
            text = f"all {context.settings.total_steps} steps are done: learners hold while the last rounds finish"
            context.show("end", text)
            return
        context.show("end", "")
        self._finished = True
        step = GlobalStep(membership.global_step)
        reason = "the last step is reached"
        if barren:
            reason += "; its last rounds lack learners whose loss is finite"
        if not self.state.ended:
            context.record(RunEnded(global_step=step, reason=reason), durable=True)
        for member in membership.connected():
            if member.session is not None:
                context.send(member.session, Stop(reason=reason, global_step=step))
        context.effects.append(EndRun(reason=reason))
