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
from typing import assert_never

from wan_diloco.errors import EXIT_AUTH, EXIT_CONFIG, EXIT_OK
from wan_diloco.protocol.events import (
    AllowSteps,
    ApplyUpdate,
    BoundaryPassed,
    Connect,
    Connected,
    ConnectionLost,
    DropUpload,
    ExitLearner,
    Identity,
    Installed,
    InstallUpdate,
    LearnerEffect,
    LearnerEvent,
    RequestSnapshot,
    SendToSyncer,
    SetPace,
    ShowReason,
    SnapshotTaken,
    StartUpload,
    SyncerSaid,
    TimerFired,
    UpdateApplied,
    UpdateArrived,
    UpdateBroken,
    UploadBroken,
)
from wan_diloco.protocol.learner_slots import Counters, FragmentState, LearnerSettings, Link, Slot
from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    Acknowledged,
    ContributionHeader,
    ContributionKey,
    ContributionRefused,
    Declined,
    DeclineReason,
    FragmentReport,
    Hello,
    LearnerMessage,
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
from wan_diloco.protocol.quorum import smooth
from wan_diloco.protocol.upload_queue import UploadChoice, choose_upload
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LocalStep, RoundId, Version

__all__ = ["FragmentState", "LearnerMachine", "LearnerSettings"]

# An upload that nothing is heard of is offered again after this, or after so many times the usual duration; the
# syncer knows repeated ones by their key.
_RESEND_MIN_S = 10.0
_RESEND_FACTOR = 4.0
_IDENTITY_REFUSED = frozenset({RefusalReason.FENCED, RefusalReason.UNKNOWN_LEARNER})


class LearnerMachine:
    """All decisions of one learner's uplink.

    Args:
        settings: Fixed for the run.
        identity: Incarnation 0 for a new life; another when the uplink, not the training, was restarted.
        fragments: What the training loop has installed.
        local_step, tokens, unit: Its counters.
        rng: For the jitter of reconnects.
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
    ) -> None:
        """Nothing is connected."""
        self.settings = settings
        self._identity = identity
        self._incarnation = identity.incarnation
        self._slots = [Slot(state) for state in fragments]
        self._counters = Counters(local_step, tokens, unit)
        self._rng = rng
        self._link = Link()
        self._effects: list[LearnerEffect] = []
        self._anchor = 0
        self._global_step = GlobalStep(0)
        self._total_steps = GlobalStep(0)
        self._started = False
        # A new life takes no step before it has the versions that the syncer named at its Welcome.
        self._joined = identity.incarnation > 0
        self._target: tuple[Version, ...] = ()
        self._allowed: LocalStep | None = local_step
        self._upload_s: float | None = None
        self._exiting = False

    @property
    def incarnation(self) -> Incarnation:
        """The life that the syncer gave; 0 before the first Welcome."""
        return self._incarnation

    # ---- the driver's side -----------------------------------------------------------------------

    def start(self) -> list[LearnerEffect]:
        """Connect."""
        self._effects.append(Connect())
        return self._take()

    def handle(self, event: LearnerEvent, now_s: float) -> list[LearnerEffect]:
        """Take note of an event, decide, and say what to do, in order."""
        match event:
            case Connected():
                self._hello()
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
                self._slots[event.fragment_id].applying = None
                self._send(ResyncRequest(fragment_id=event.fragment_id, reason=event.reason))
            case UploadBroken():
                self._upload_broken(event.header, now_s)
            case TimerFired():
                pass
            case _:
                assert_never(event)
        if not self._exiting:
            self._timers(now_s)
            self._start_uploads(now_s)
            self._allow()
        return self._take()

    def deadline_s(self) -> float | None:
        """When `TimerFired` is due next; None for never."""
        if self._exiting:
            return None
        times = [self._link.connect_s, self._link.heartbeat_s, *(slot.retry_s for slot in self._slots)]
        return min((time_s for time_s in times if time_s is not None), default=None)

    # ---- the connection --------------------------------------------------------------------------

    def _hello(self) -> None:
        identity, counters = self._identity, self._counters
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            run=identity.run,
            learner_id=identity.learner_id,
            incarnation=self._incarnation,
            layout=identity.layout,
            settings=identity.settings,
            initial_digests=identity.initial_digests,
            local_step=counters.local_step,
            tokens=counters.tokens,
        )
        self._effects.append(SendToSyncer(message=hello))

    def _lost(self, event: ConnectionLost, now_s: float) -> None:
        link = self._link
        if event.refused:
            self._exit(event.reason, EXIT_AUTH)
            return
        link.failures += 1
        link.welcomed, link.heartbeat_s = False, None
        link.connect_s = now_s + self.settings.retry.delay_s(link.failures, self._rng)
        for slot in self._slots:
            slot.retry_s = None
        self._effects.append(ShowReason(topic="syncer", text=f"the syncer can't be reached: {event.reason}"))

    def _said(self, message: SyncerMessage, now_s: float) -> None:
        match message:
            case Welcome():
                self._welcome(message, now_s)
            case Refused():
                code = EXIT_AUTH if message.reason in _IDENTITY_REFUSED else EXIT_CONFIG
                self._exit(f"refused ({message.reason}): {message.detail}", code)
            case Start():
                self._started = True
                self._pace(message.global_step, message.anchor)
            case Pace():
                self._pace(message.global_step, message.anchor)
            case Pull():
                self._pulled(message, now_s)
            case Acknowledged():
                self._upload_done(message.fragment_id, message.step_lo, message.step_hi, now_s)
            case ContributionRefused():
                self._upload_done(message.fragment_id, message.step_lo, message.step_hi, None)
                text = f"a contribution was refused ({message.reason}): {message.detail}"
                self._effects.append(ShowReason(topic=f"fragment:{message.fragment_id}", text=text))
            case Stop():
                self._exit(message.reason, EXIT_OK)
            case _:
                assert_never(message)

    def _welcome(self, message: Welcome, now_s: float) -> None:
        link = self._link
        link.welcomed, link.failures = True, 0
        self._effects.append(ShowReason(topic="syncer", text=""))
        self._total_steps = message.total_steps
        self._started = message.started
        new_life = message.incarnation != self._incarnation
        self._incarnation = message.incarnation
        if not self._joined:
            self._target = message.versions
        self._pace(message.global_step, message.anchor, message.next_unit if new_life else None)
        self._report(now_s)
        for slot in self._slots:
            if slot.upload is not None:
                self._start_upload(slot, slot.upload, 0.0, now_s)

    def _pace(self, global_step: GlobalStep, anchor: int, next_unit: int | None = None) -> None:
        """The schedule's argument is the step last heard plus own steps since.

        In lockstep every learner stands at the same step, and its own count is exact where a message may
        be late; so there the anchor is used, and the same run gives the same rates.
        """
        lockstep = self.settings.overlap_steps == 0
        own = anchor if lockstep else self._counters.local_step - global_step
        self._global_step = global_step
        if own == self._anchor and next_unit is None:
            return
        self._anchor = own
        self._effects.append(SetPace(anchor=own, total_steps=self._total_steps, next_unit=next_unit))

    # ---- boundaries ------------------------------------------------------------------------------

    def _boundary(self, event: BoundaryPassed, now_s: float) -> None:
        self._counters = Counters(
            event.local_step, event.tokens, event.unit, event.step_time_s, event.loss, event.learning_rate
        )
        for installed in event.installed:
            self._installed(installed)
        for snapshot in event.snapshots:
            self._snapshot(snapshot, now_s)
        self._report(now_s)

    def _installed(self, installed: Installed) -> None:
        slot = self._slots[installed.fragment_id]
        slot.state = FragmentState(
            version=installed.version,
            resync=installed.resync,
            step_lo=installed.step_lo,
            tokens_lo=installed.tokens_lo,
        )
        if slot.pending == (installed.version, installed.resync):
            slot.pending = None

    def _snapshot(self, snapshot: SnapshotTaken, now_s: float) -> None:
        slot = self._slots[snapshot.fragment_id]
        pull, slot.asked = slot.asked, None
        if pull is None:
            return
        counters, state = self._counters, slot.state
        if counters.local_step == state.step_lo:
            self._decline(pull, DeclineReason.ZERO_STEPS)
            return
        sizes = self.settings.sizes[snapshot.fragment_id]
        slot.upload = ContributionHeader(
            key=ContributionKey(
                learner_id=self._identity.learner_id,
                incarnation=self._incarnation,
                fragment_id=snapshot.fragment_id,
                step_lo=state.step_lo,
            ),
            round_id=pull.round_id,
            attempt=pull.attempt,
            base=state.version,
            step_hi=counters.local_step,
            tokens_lo=state.tokens_lo,
            tokens_hi=counters.tokens,
            unit_hi=counters.unit,
            codec=self.settings.codec,
            codes_bytes=sizes.codes_bytes,
            scales_bytes=sizes.scales_bytes,
        )
        slot.started_s = now_s
        self._start_upload(slot, slot.upload, pull.upload_s, now_s)

    def _report(self, now_s: float) -> None:
        counters = self._counters
        fragments = tuple(
            FragmentReport(
                fragment_id=FragmentId(index),
                version=slot.state.version,
                pending=slot.pending[0] if slot.pending else None,
                resync=slot.newest[1],
                step_lo=slot.state.step_lo,
                tokens_lo=slot.state.tokens_lo,
            )
            for index, slot in enumerate(self._slots)
        )
        report = Report(
            local_step=counters.local_step,
            tokens=counters.tokens,
            step_time_s=counters.step_time_s,
            loss=counters.loss,
            learning_rate=counters.learning_rate,
            fragments=fragments,
        )
        if self._link.welcomed:
            self._send(report)
            self._link.heartbeat_s = now_s + self.settings.heartbeat_s

    def _allow(self) -> None:
        """Tell the training loop how far it may go, when that changes."""
        allowed = self._allowed_step()
        if allowed != self._allowed:
            self._allowed = allowed
            self._effects.append(AllowSteps(until_step=allowed))

    def _allowed_step(self) -> LocalStep | None:
        local_step = self._counters.local_step
        if not self._joined:
            reached = [slot.state.version >= target for slot, target in zip(self._slots, self._target, strict=False)]
            self._joined = bool(reached) and all(reached)
        if not (self._started and self._joined):
            return local_step
        if self.settings.overlap_steps > 0:
            return None
        # Lockstep: hold until every round that is due by now has come back.
        schedule, step = self.settings.schedule, local_step - self._anchor
        for index, slot in enumerate(self._slots):
            if slot.state.version.count < schedule.rounds_due(FragmentId(index), step):
                return local_step
        return LocalStep(self._anchor + min(schedule.next_due_step(step), self._total_steps))

    # ---- uploads ---------------------------------------------------------------------------------

    def _pulled(self, pull: Pull, now_s: float) -> None:
        slot = self._slots[pull.fragment_id]
        slot.pull, slot.pulled_s = pull, now_s
        self._start_uploads(now_s)
        if slot.pull is not None:
            self._decline(pull, DeclineReason.BUSY)

    def _start_uploads(self, now_s: float) -> None:
        if not self._link.welcomed:
            return
        under_way = sum(slot.is_busy for slot in self._slots)
        while under_way < self.settings.uploads_max:
            waiting = [self._choice(FragmentId(index), slot, now_s) for index, slot in enumerate(self._slots)]
            chosen = choose_upload((choice for choice in waiting if choice is not None), self._upload_s or 0.0)
            if chosen is None:
                return
            slot = self._slots[chosen]
            slot.asked, slot.pull = slot.pull, None
            slot.sent_step = self._counters.local_step
            self._effects.append(RequestSnapshot(fragment_id=chosen))
            under_way += 1

    def _choice(self, fragment_id: FragmentId, slot: Slot, now_s: float) -> UploadChoice | None:
        pull, counters, schedule = slot.pull, self._counters, self.settings.schedule
        if pull is None or slot.is_busy:
            return None
        step = max(0, counters.local_step - self._anchor)
        since_offset = (step - schedule.offset(fragment_id)) % schedule.period_steps
        is_open = slot.state.version <= pull.version
        return UploadChoice(
            fragment_id=fragment_id,
            remaining_s=max(0.0, slot.pulled_s + pull.window_s - now_s) if is_open else None,
            due_s=(schedule.period_steps - since_offset) * counters.step_time_s,
            periods=(counters.local_step - slot.sent_step) // schedule.period_steps,
            steps=counters.local_step - slot.state.step_lo,
        )

    def _start_upload(self, slot: Slot, header: ContributionHeader, spread_s: float, now_s: float) -> None:
        """Send, and send again if neither an acknowledgement nor a broken stream is heard of."""
        slot.retry_s = now_s + max(_RESEND_MIN_S, spread_s + _RESEND_FACTOR * (self._upload_s or 0.0))
        self._effects.append(StartUpload(header=header, spread_s=spread_s))

    def _upload_done(
        self, fragment_id: FragmentId, step_lo: LocalStep, step_hi: LocalStep, acknowledged_s: float | None
    ) -> None:
        slot = self._slots[fragment_id]
        header = slot.upload
        if header is None or header.key.step_lo != step_lo or header.step_hi > step_hi:
            return
        if acknowledged_s is not None:
            self._upload_s = smooth(self._upload_s, acknowledged_s - slot.started_s)
        slot.upload, slot.retry_s, slot.failures = None, None, 0
        self._effects.append(DropUpload(header=header))

    def _upload_broken(self, header: ContributionHeader, now_s: float) -> None:
        slot = self._slots[header.key.fragment_id]
        if slot.upload == header and self._link.welcomed:
            slot.failures += 1
            slot.retry_s = now_s + self.settings.retry.delay_s(slot.failures, self._rng)

    def _decline(self, pull: Pull, reason: DeclineReason) -> None:
        self._send(
            Declined(round_id=RoundId(pull.round_id), attempt=pull.attempt, fragment_id=pull.fragment_id, reason=reason)
        )

    # ---- updates ---------------------------------------------------------------------------------

    def _arrived(self, header: UpdateHeader) -> None:
        slot = self._slots[header.fragment_id]
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
        self._effects.append(ApplyUpdate(header=header))

    def _applied(self, event: UpdateApplied) -> None:
        slot = self._slots[event.fragment_id]
        header, slot.applying = slot.applying, None
        slot.pending = (event.version, max(event.resync, slot.newest[1]))
        self._acknowledge_update(event.fragment_id)
        install = InstallUpdate(
            fragment_id=event.fragment_id,
            version=event.version,
            resync=slot.pending[1],
            merged_hi=self._merged_hi(slot, header),
        )
        self._effects.append(install)

    def _merged_hi(self, slot: Slot, header: UpdateHeader | None) -> LocalStep | None:
        notes = [] if header is None else [note for segment in header.segments for note in segment.merged]
        mine = [
            note.step_hi
            for note in notes
            if (note.learner_id, note.incarnation, note.step_lo)
            == (self._identity.learner_id, self._incarnation, slot.state.step_lo)
        ]
        return max(mine, default=None)

    def _acknowledge_update(self, fragment_id: FragmentId) -> None:
        version, resync = self._slots[fragment_id].newest
        self._send(UpdateReceived(fragment_id=fragment_id, version=version, resync=resync))

    # ---- inside ----------------------------------------------------------------------------------

    def _timers(self, now_s: float) -> None:
        link = self._link
        if link.connect_s is not None and now_s >= link.connect_s:
            link.connect_s = None
            self._effects.append(Connect())
        if link.heartbeat_s is not None and now_s >= link.heartbeat_s:
            self._report(now_s)
        for slot in self._slots:
            if slot.retry_s is not None and now_s >= slot.retry_s and slot.upload is not None:
                self._start_upload(slot, slot.upload, 0.0, now_s)

    def _send(self, message: LearnerMessage) -> None:
        if self._link.welcomed:
            self._effects.append(SendToSyncer(message=message))

    def _exit(self, reason: str, exit_code: int) -> None:
        self._exiting = True
        self._effects.append(ExitLearner(reason=reason, exit_code=exit_code))

    def _take(self) -> list[LearnerEffect]:
        effects, self._effects = self._effects, []
        return effects
