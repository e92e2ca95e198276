"""The learner's decisions: connecting, answering pulls, taking updates in, and how far training may go.

It runs in the uplink process, beside the training and never in its way: what it asks of the training loop
happens at the next step boundary, and comes back as `BoundaryPassed`. Installs of a boundary come before its
snapshots, so that a pull can't overtake an update and carry a stale base.

The caller's duties are those of the syncer's machine: `start` once, `now_s` that never goes back, `TimerFired` at
`deadline_s`, effects in order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from wan_diloco.errors import EXIT_AUTH, EXIT_CONFIG, EXIT_OK, EXIT_TEMPORARY
from wan_diloco.protocol.events import (
    AllowSteps,
    ApplyUpdate,
    BoundaryPassed,
    Connect,
    Connected,
    ConnectionLost,
    ExitLearner,
    Identity,
    Installed,
    InstallUpdate,
    LearnerEffect,
    LearnerEvent,
    LimitUplink,
    RefuseSyncer,
    SendToSyncer,
    SetPace,
    SetRoundTrip,
    ShowReason,
    SyncerSaid,
    TimerFired,
    UpdateApplied,
    UpdateArrived,
    UpdateBroken,
    UploadBroken,
)
from wan_diloco.protocol.fence import is_over
from wan_diloco.protocol.learner_donor import DonorPart
from wan_diloco.protocol.learner_rejoin import RejoinDesk
from wan_diloco.protocol.learner_slots import Counters, FragmentState, LearnerContext, LearnerSettings, Slot
from wan_diloco.protocol.learner_uploads import UploadDesk
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionRefused,
    FragmentReport,
    Pace,
    Pull,
    RefusalReason,
    Refused,
    Report,
    ResyncRequest,
    SegmentKind,
    Start,
    Stop,
    SyncerMessage,
    UpdateHeader,
    UpdateReceived,
    Welcome,
)
from wan_diloco.protocol.rejoin_messages import Donate, DonationOver, NoDonor, StateOffered, SyncerClock
from wan_diloco.protocol.state_events import StateBroken, StateDescribed, StateFetched, StateProgress
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Incarnation, LocalStep, ShardId, Term, Version

__all__ = ["FragmentState", "LearnerMachine", "LearnerSettings"]

# A name that may not take part, or not any more; data that may be free later; everything else is a wrong configuration.
_EXIT_CODES = {
    RefusalReason.FENCED: EXIT_AUTH,
    RefusalReason.UNKNOWN_LEARNER: EXIT_AUTH,
    RefusalReason.TOO_MANY_LEARNERS: EXIT_AUTH,
    RefusalReason.NO_SHARD: EXIT_TEMPORARY,
}


class LearnerMachine:
    """All decisions of one learner's uplink.

    Args:
        settings: Fixed for the run.
        identity: Incarnation 0 for a new life; another when the uplink, not the training, was restarted.
        fragments: What the training loop has installed.
        local_step, tokens, unit: Its counters.
        rng: For the jitter of reconnects.
        joined: This life has its first bases and moments, and takes steps; by default, whoever has an incarnation has.
        moments_step: The global step that the training loop's inner moments are of; None when it has none.
        shard: Of the data, that the training loop reads; None when it was told of none yet.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        identity: Identity,
        fragments: Sequence[FragmentState],
        *,
        local_step: LocalStep,
        tokens: int,
        unit: int,
        rng: random.Random,
        joined: bool | None = None,
        moments_step: int | None = None,
        shard: ShardId | None = None,
    ) -> None:
        """Nothing is connected."""
        self.context = LearnerContext(
            settings=settings,
            identity=identity,
            slots=[Slot(state) for state in fragments],
            counters=Counters(local_step, tokens, unit),
            incarnation=identity.incarnation,
            clock=SyncerClock(term=identity.term, epoch=Epoch(0), global_step=GlobalStep(0)),
            term_id=identity.term_id,
        )
        self._uploads = UploadDesk(self.context, rng)
        # A new life takes no step before it has the versions that the syncer named at its Welcome, and its moments.
        self._joined = identity.incarnation > 0 if joined is None else joined
        self._rejoin = RejoinDesk(self.context, moments_step, settled=self._joined)
        self._donor = DonorPart(self.context)
        self._rng = rng
        self._shard = shard
        self._total_steps = GlobalStep(0)
        self._heard = False
        # The training loop outlives an uplink, and may still go by an anchor that an earlier one told it.
        self._paced = False
        # Step and anchor as the syncer said them last.
        self._told: tuple[GlobalStep, int] | None = None
        self._started = False
        self._target: tuple[Version, ...] = ()
        self._allowed: LocalStep | None = local_step
        self._held = ""
        self._exiting = False

    @property
    def incarnation(self) -> Incarnation:
        """The life that the syncer gave; 0 before the first Welcome."""
        return self.context.incarnation

    @property
    def term(self) -> Term:
        """The highest that this process was welcomed in; 0 before the first Welcome."""
        return self.context.clock.term

    @property
    def term_id(self) -> str:
        """Of the process that began it; empty where that isn't known."""
        return self.context.term_id

    # ---- the driver's side -----------------------------------------------------------------------

    def start(self) -> list[LearnerEffect]:
        """Connect."""
        self.context.effects.append(Connect())
        return self.context.take()

    def handle(self, event: LearnerEvent, now_s: float) -> list[LearnerEffect]:
        """Take note of an event, decide, and say what to do, in order."""
        match event:
            case Connected():
                self.context.link.hello_s, self.context.link.refused = now_s, False
                self.context.effects.append(SendToSyncer(message=self.context.hello()))
            case ConnectionLost():
                self._lost(event, now_s)
            case SyncerSaid():
                self._said(event.message, now_s)
            case BoundaryPassed():
                self._boundary(event, now_s)
            case UpdateArrived():
                self._arrived(event.header)
            case UpdateApplied():
                self._applied(event)
            case UpdateBroken():
                self.context.slots[event.fragment_id].applying = None
                self.context.send(ResyncRequest(fragment_id=event.fragment_id, reason=event.reason))
            case UploadBroken():
                self._uploads.broken(event.header, now_s)
            case StateDescribed():
                self._donor.described(event)
            case StateProgress():
                self._rejoin.progressed(event, now_s)
            case StateFetched():
                self._rejoin.fetched(event.transfer)
            case StateBroken():
                self._rejoin.broken(event)
            case TimerFired():
                pass
            case _:
                assert_never(event)
        if not self._exiting:
            self._timers(now_s)
            self._uploads.settle(now_s)
            self._rejoin.expire(now_s)
            self._donor.settle(now_s, has_moments=self._rejoin.settled)
            self._allow()
            rtt_s = self.context.link.round_trip.news()
            if rtt_s is not None:
                self.context.effects.append(SetRoundTrip(rtt_s=rtt_s))
        return self.context.take()

    def deadline_s(self) -> float | None:
        """When `TimerFired` is due next; None for never."""
        if self._exiting:
            return None
        times = [
            self.context.link.connect_s,
            self.context.link.heartbeat_s,
            self._rejoin.deadline_s(),
            self._donor.deadline_s(),
            *(slot.retry_s for slot in self.context.slots),
        ]
        return min((time_s for time_s in times if time_s is not None), default=None)

    # ---- the connection --------------------------------------------------------------------------

    def _lost(self, event: ConnectionLost, now_s: float) -> None:
        link = self.context.link
        if event.refused:
            self._exit(event.reason, EXIT_AUTH)
            return
        link.failures += 1
        link.welcomed, link.heartbeat_s = False, None
        link.round_trip.lost()
        link.connect_s = now_s + self.context.settings.retry.delay_s(link.failures, self._rng)
        for slot in self.context.slots:
            slot.retry_s = None
        self._donor.lost(now_s)
        self.context.effects.append(ShowReason(topic="syncer", text=f"the syncer can't be reached: {event.reason}"))

    def _said(self, message: SyncerMessage, now_s: float) -> None:
        if self.context.link.refused:
            return
        match message:
            case Pull() | Acknowledged() | ContributionRefused() if message.fragment_id >= len(self.context.slots):
                pass  # whoever says it means another model
            case Welcome():
                self._welcome(message, now_s)
            case Refused():
                code = _EXIT_CODES.get(message.reason, EXIT_CONFIG)
                self._exit(f"refused ({message.reason}): {message.detail}", code)
            case Start():
                self._started = True
                self._pace(message.global_step, message.anchor)
            case Pace():
                self.context.link.round_trip.answered(message.echo, now_s)
                self._limit(message.rate_bytes_per_s)
                if (message.global_step, message.anchor) != self._told:  # else it only says a number back
                    self._pace(message.global_step, message.anchor)
            case Pull():
                self._uploads.pulled(message, now_s)
            case Acknowledged():
                self._uploads.done(message.fragment_id, message.step_lo, message.step_hi, now_s)
            case ContributionRefused():
                self._uploads.done(message.fragment_id, message.step_lo, message.step_hi, None)
                text = f"a contribution was refused ({message.reason}): {message.detail}"
                self.context.effects.append(ShowReason(topic=f"fragment:{message.fragment_id}", text=text))
            case StateOffered():
                self._rejoin.offered(message, now_s)
            case NoDonor():
                self._rejoin.refused()
            case Donate():
                self._donor.asked(message)
            case DonationOver():
                self._donor.over(message.transfer, now_s)
            case Stop():
                self._exit(message.reason, EXIT_OK)
            case _:
                assert_never(message)

    def _welcome(self, message: Welcome, now_s: float) -> None:
        link = self.context.link
        if is_over(message.term, message.term_id, heard=self.term, heard_id=self.term_id):
            # What it merges is lost, or another's; what it sends is of a state that went on elsewhere.
            link.refused = True
            self.context.effects.append(RefuseSyncer(said=message.term, heard=self.term))
            return
        link.welcomed, link.failures = True, 0
        # It may have waited at a busy syncer for longer than it travelled: then the first report will tell.
        link.round_trip.took(now_s - link.hello_s)
        self.context.effects.append(ShowReason(topic="syncer", text=""))
        self._total_steps = message.total_steps
        self._heard = True
        self._started = message.started
        new_life = message.incarnation != self.context.incarnation
        if new_life and self.context.incarnation:
            self._uploads.void()
        self.context.incarnation = message.incarnation
        if not self._joined:
            self._target = message.versions
        if message.term > self.term or message.term_id:
            self.context.term_id = message.term_id
        self.context.clock = SyncerClock(term=message.term, epoch=message.epoch, global_step=message.global_step)
        lease = None
        # An earlier uplink may have died before it could tell.
        if new_life or message.data_shard != self._shard:
            self._shard = message.data_shard
            lease = Lease(shard=message.data_shard, first_unit=message.next_unit)
        self._pace(message.global_step, message.anchor, lease)
        self._report(now_s)
        self._rejoin.welcomed(message, now_s)
        self._uploads.welcomed(now_s)

    def _limit(self, rate_bytes_per_s: float) -> None:
        if rate_bytes_per_s != self.context.link.granted_bytes_per_s:
            self.context.link.granted_bytes_per_s = rate_bytes_per_s
            self.context.effects.append(LimitUplink(rate_bytes_per_s=rate_bytes_per_s or None))

    def _pace(self, global_step: GlobalStep, anchor: int, lease: Lease | None = None) -> None:
        """The schedule's argument is the step last heard plus own steps since.

        In lockstep every learner stands at the same step, and its own count is exact where a message may
        be late; so there the anchor is used, and the same run gives the same rates.
        """
        self._told = (global_step, anchor)
        stretch_steps = self.context.settings.schedule.period_steps
        self.context.step_ratio.heard(global_step, self.context.counters.local_step, stretch_steps=stretch_steps)
        lockstep = self.context.settings.overlap_steps == 0
        own = anchor if lockstep else self.context.counters.local_step - global_step
        self.context.clock = replace(self.context.clock, global_step=global_step)
        if self._paced and own == self.context.anchor and lease is None:
            return
        self._paced, self.context.anchor = True, own
        self.context.effects.append(SetPace(anchor=own, total_steps=self._total_steps, lease=lease))

    # ---- boundaries ------------------------------------------------------------------------------

    def _boundary(self, event: BoundaryPassed, now_s: float) -> None:
        self.context.counters = Counters(
            event.local_step, event.tokens, event.unit, event.step_time_s, event.loss, event.learning_rate
        )
        for installed in event.installed:
            self._installed(installed)
        self._rejoin.installed(event.moments_of)
        self._donor.boundary(event)
        for snapshot in event.snapshots:
            self._uploads.snapshot(snapshot, now_s)
        self._report(now_s)

    def _installed(self, installed: Installed) -> None:
        slot = self.context.slots[installed.fragment_id]
        slot.state = FragmentState(
            version=installed.version,
            resync=installed.resync,
            step_lo=installed.step_lo,
            tokens_lo=installed.tokens_lo,
        )
        if slot.pending == (installed.version, installed.resync):
            slot.pending = None

    def _report(self, now_s: float) -> None:
        link, counters = self.context.link, self.context.counters
        if not link.welcomed:
            return
        fragments = tuple(
            FragmentReport(
                fragment_id=FragmentId(index),
                version=slot.state.version,
                pending=slot.pending[0] if slot.pending else None,
                resync=slot.newest[1],
                step_lo=slot.state.step_lo,
                tokens_lo=slot.state.tokens_lo,
            )
            for index, slot in enumerate(self.context.slots)
        )
        report = Report(
            local_step=counters.local_step,
            tokens=counters.tokens,
            step_time_s=counters.step_time_s,
            loss=counters.loss,
            learning_rate=counters.learning_rate,
            fragments=fragments,
            echo=link.round_trip.ask(now_s),
            rtt_s=link.round_trip.rtt_s,
        )
        self.context.send(report)
        link.heartbeat_s = now_s + self.context.settings.heartbeat_s

    def _allow(self) -> None:
        """Tell the training loop how far it may go, when that changes.

        Until this uplink has heard the syncer, what an earlier one allowed stands: training goes on, up to the
        run's last step. There it holds: what it would learn beyond has no place in the schedule, and no round.
        """
        if not self._heard:
            return
        allowed = self._allowed_step()
        if allowed != self._allowed:
            self._allowed = allowed
            self.context.effects.append(AllowSteps(until_step=allowed))
        joined, settled, last = self._joined, self._rejoin.settled, self._total_steps
        held = self.context.why_no_step(started=self._started, joined=joined, settled=settled, total_steps=last)
        if held != self._held:
            self._held = held
            self.context.effects.append(ShowReason(topic="step", text=held))

    @property
    def _step(self) -> int:
        """The global step, as well as it is known here."""
        return self.context.counters.local_step - self.context.anchor

    def _allowed_step(self) -> LocalStep | None:
        local_step = self.context.counters.local_step
        if not self._joined:
            reached = [
                slot.state.version >= target for slot, target in zip(self.context.slots, self._target, strict=False)
            ]
            self._joined = bool(reached) and all(reached)
        if not (self._started and self._joined and self._rejoin.settled):
            return local_step
        if self.context.settings.overlap_steps > 0:
            return LocalStep(max(self.context.anchor + self._total_steps, self.context.work_until))
        # Lockstep: hold until every round that is due by now has come back.
        schedule, step = self.context.settings.schedule, self._step
        held = [
            slot
            for index, slot in enumerate(self.context.slots)
            if slot.state.version.count < schedule.rounds_due(FragmentId(index), step)
        ]
        if not held:
            return LocalStep(self.context.anchor + min(schedule.next_due_step(step), self._total_steps))
        # Who joined or was resynced at a due step has nothing to contribute, nor has one whose steps had no finite
        # loss, and the round can't close without it: it takes one step more. While it held, nobody would know that it
        # is well again.
        lacks_work = any(
            local_step == slot.state.step_lo or self.context.counters.tokens == slot.state.tokens_lo for slot in held
        )
        return LocalStep(local_step + 1) if lacks_work else local_step

    # ---- updates ---------------------------------------------------------------------------------

    def _arrived(self, header: UpdateHeader) -> None:
        slot = self.context.slots[header.fragment_id]
        if self.context.link.refused:
            return
        if slot.applying is not None:
            return  # its acknowledgement will tell the syncer what is held
        version, resync = slot.newest
        first = header.segments[0]
        is_new = header.resync > resync or (header.resync == 0 and header.to_version > version)
        fits = first.kind is SegmentKind.VALUE or first.from_version == version
        if not (is_new and fits):
            self._acknowledge_update(header.fragment_id)
            return
        slot.applying = header
        self.context.effects.append(ApplyUpdate(header=header))

    def _applied(self, event: UpdateApplied) -> None:
        slot = self.context.slots[event.fragment_id]
        header, slot.applying = slot.applying, None
        slot.pending = (event.version, max(event.resync, slot.newest[1]))
        self._acknowledge_update(event.fragment_id)
        install = InstallUpdate(
            fragment_id=event.fragment_id,
            version=event.version,
            resync=slot.pending[1],
            merged_hi=self._merged_hi(slot, header),
        )
        self.context.effects.append(install)

    def _merged_hi(self, slot: Slot, header: UpdateHeader | None) -> LocalStep | None:
        notes = [] if header is None else [note for segment in header.segments for note in segment.merged]
        mine = [
            note.step_hi
            for note in notes
            if (note.learner_id, note.incarnation, note.step_lo)
            == (self.context.identity.learner_id, self.context.incarnation, slot.state.step_lo)
        ]
        return max(mine, default=None)

    def _acknowledge_update(self, fragment_id: FragmentId) -> None:
        version, resync = self.context.slots[fragment_id].newest
        self.context.send(UpdateReceived(fragment_id=fragment_id, version=version, resync=resync))

    # ---- inside ----------------------------------------------------------------------------------

    def _timers(self, now_s: float) -> None:
        link = self.context.link
        if link.connect_s is not None and now_s >= link.connect_s:
            link.connect_s = None
            self.context.effects.append(Connect())
        if link.heartbeat_s is not None and now_s >= link.heartbeat_s:
            self._report(now_s)

    def _exit(self, reason: str, exit_code: int) -> None:
        self._exiting = True
        self.context.effects.append(ExitLearner(reason=reason, exit_code=exit_code))
