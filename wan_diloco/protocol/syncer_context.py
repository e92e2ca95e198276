"""What the parts of the syncer's machine share: its state, its members, and the effects so far.

Owner: the syncer's machine. The parts hold no state of their own that another part writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from wan_diloco.protocol.admission import Terms
from wan_diloco.protocol.downlink import Downlink
from wan_diloco.protocol.events import CloseSession, Record, SendToLearner, SessionId, ShowReason, SyncerEffect
from wan_diloco.protocol.grants import Ingress
from wan_diloco.protocol.intake import IntakeRules
from wan_diloco.protocol.membership import Member, Membership
from wan_diloco.protocol.messages import SyncerMessage
from wan_diloco.protocol.pacing import DOWNLINK_SHARE
from wan_diloco.protocol.plausibility import claim_steps_max, leap_steps_max
from wan_diloco.protocol.quorum import Estimates, GracePolicy, ResponseTimes
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import (
    LearnerAdmitted,
    LeaseEnded,
    RunEnded,
    RunStarted,
    ShardsAssigned,
    SyncerStarted,
    TapeRecord,
)
from wan_diloco.units import Epoch, GlobalStep, LearnerId, ShardId, Term

__all__ = ["SyncerContext", "SyncerSettings"]

_NO_TERM = Term(0)
_FIRST_EPOCH = Epoch(0)
# What fences must be known to the next process whatever else is lost.
_KEPT = (SyncerStarted, ShardsAssigned, LearnerAdmitted, LeaseEnded, RunStarted, RunEnded)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSettings:
    """What is fixed for a run.

    Attributes:
        lease_s: Membership lease.
        start_timeout_s: After which the run starts without the regions that haven't come.
        shards: Address of the shard that owns each fragment; "" is this one.
        lossless: Whether the codec is; publications are values then.
        durable: Nothing is acknowledged or sent before it is durable; otherwise only lives, and a run's start and end.
        ingress: What may come in, at the start; it can be changed.
        joiners_max: Learners that one donor gives its moments to at once.
        data_shards: The part of the training text that is each configured learner's.
        spare_shards: The parts that are none's.
        term_min, epoch_min: At least these a process must begin with: another may have had those before, with a state
            that this one knows nothing of.
        term_id: Drawn by chance for this process; empty for none.
    """

    terms: Terms
    schedule: Schedule
    policy: GracePolicy
    intake: IntakeRules
    total_steps: GlobalStep
    lease_s: float
    start_timeout_s: float
    shards: tuple[str, ...]
    lossless: bool
    ingress: Ingress = field(default_factory=Ingress)
    joiners_max: int = 2
    durable: bool = True
    data_shards: tuple[tuple[LearnerId, ShardId], ...] = ()
    spare_shards: tuple[ShardId, ...] = ()
    term_min: Term = _NO_TERM
    epoch_min: Epoch = _FIRST_EPOCH
    term_id: str = ""

    @property
    def rounds_max(self) -> int:
        """How many rounds may be in progress: what falls due while one is held open to its bound."""
        return self.schedule.fragments_a_step_max * max(1, math.ceil(self.policy.bound_steps))

    @property
    def claim_steps_max(self) -> int:
        """How far beyond its last word a learner may claim to be."""
        return claim_steps_max(self.total_steps)

    @property
    def leap_steps_max(self) -> int:
        """Up to which advance at once the global step follows a learner."""
        return leap_steps_max(self.total_steps, self.schedule.period_steps)


@dataclass(slots=True)
class SyncerContext:
    """Shared by the parts; see the module.

    Attributes:
        effects: Of the event that is being handled, in order.
        waiting: Reasons shown and not withdrawn, by topic.
        echoes: Of the report that is being handled, by learner: the number to be said back.
        ingress: What may come in, now.
        responses, sync_s: Measured as the run goes, not durable.
        began_s: When this process began; None before.
        closing: Sessions that were ended and aren't gone yet.
        taken_over: Another process has this run, or its state is elsewhere: nothing is decided any more.
    """

    settings: SyncerSettings
    state: SyncerState
    membership: Membership = field(init=False)
    downlink: Downlink = field(init=False)
    ingress: Ingress = field(init=False)
    effects: list[SyncerEffect] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    echoes: dict[LearnerId, int] = field(default_factory=dict)
    responses: ResponseTimes = field(default_factory=ResponseTimes)
    sync_s: float | None = None
    began_s: float | None = None
    closing: set[SessionId] = field(default_factory=set)
    taken_over: bool = False

    def __post_init__(self) -> None:
        """Nobody is there yet."""
        settings = self.settings
        self.ingress = settings.ingress
        self.membership = Membership(
            settings.policy.quorum, settings.lease_s, self.state.global_step, settings.leap_steps_max
        )
        self.downlink = Downlink(len(settings.intake.fragments), settings.intake.codec, settings.lossless)

    def send(self, session: SessionId, message: SyncerMessage) -> None:
        """Send a control message."""
        self.effects.append(SendToLearner(session=session, message=message))

    def close(self, session: SessionId, reason: str) -> None:
        """End a session; once."""
        if session in self.closing:
            return
        self.closing.add(session)
        self.effects.append(CloseSession(session=session, reason=reason))

    def record(self, record: TapeRecord, *, durable: bool) -> None:
        """Apply a decision, and put it on the tape."""
        self.state.apply(record)
        kept = self.settings.durable or isinstance(record, _KEPT)
        self.effects.append(Record(record=record, durable=durable and kept))

    def show(self, topic: str, text: str) -> None:
        """Tell the operator why something does not happen, once per change; an empty text withdraws it."""
        if self.waiting.get(topic, "") == text:
            return
        if text:
            self.waiting[topic] = text
        else:
            del self.waiting[topic]
        self.effects.append(ShowReason(topic=topic, text=text))

    def send_updates(self, member: Member) -> None:
        """Send what a learner lacks, as much as may be under way: the rest is chosen when its sending starts.

        What lies in a queue grows old. Behind a narrow downlink everything that a learner installed would be too old
        for its next contribution, and the link would be full all the same.
        """
        if member.session is None:
            return
        step_s, policy = self.membership.step_s() or 0.0, self.settings.policy
        travelling_steps = round(member.rtt_s / step_s) if step_s else 0
        at_once = self.settings.schedule.uploads_max(policy.overlap_steps, travelling_steps)
        free = max(0, at_once - self.downlink.num_sending(member.learner_id))
        lacking = self.downlink.lacking(member.learner_id, self.state)
        # Who waits behind shouldn't wait for longer than the link needs.
        spread_s = DOWNLINK_SHARE * policy.overlap_steps * step_s if len(lacking) <= free else 0.0
        for fragment_id in lacking[:free]:
            effect = self.downlink.next_update(member.learner_id, member.session, fragment_id, self.state, spread_s)
            if effect is not None:
                self.effects.append(effect)

    def estimates(self) -> Estimates:
        """What has been measured so far."""
        return Estimates(
            step_s=self.membership.step_s(), sync_s=self.sync_s or 0.0, responses=self.responses.estimates()
        )

    def take(self) -> list[SyncerEffect]:
        """The effects of the event just handled."""
        effects, self.effects = self.effects, []
        # One that wasn't said back at once would measure how long it lay here.
        self.echoes.clear()
        return effects
