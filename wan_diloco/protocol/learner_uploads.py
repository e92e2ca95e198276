"""Which snapshots a learner takes and sends, and until when it keeps them.

Part of the learner's machine; `upload_queue.choose_upload` says which comes next, this says what follows from it.
"""

from __future__ import annotations

import random

from wan_diloco.protocol.deadlines import RESEND_MIN_S
from wan_diloco.protocol.events import DropUpload, RequestSnapshot, ShowReason, SnapshotTaken, StartUpload
from wan_diloco.protocol.learner_slots import LearnerContext, Slot
from wan_diloco.protocol.messages import ContributionHeader, ContributionKey, Declined, DeclineReason, Pull
from wan_diloco.protocol.quorum import smooth
from wan_diloco.protocol.upload_queue import UploadChoice, choose_upload
from wan_diloco.units import FragmentId, LocalStep, RoundId

__all__ = ["UploadDesk"]

_RESEND_FACTOR = 4.0


class UploadDesk:
    """All uploads of a learner.

    Args:
        context: Of the machine that this is a part of.
        rng: For the jitter of retries.
    """

    def __init__(self, context: LearnerContext, rng: random.Random) -> None:
        """Nothing is under way."""
        self.context = context
        self._rng = rng
        self._upload_s: float | None = None
        self._barren = False

    def welcomed(self, now_s: float) -> None:
        """A session began: what an earlier one left unfinished goes on where the syncer says."""
        for slot in self.context.slots:
            if slot.upload is not None:
                self._start_upload(slot, slot.upload, 0.0, now_s, again=True)

    def pulled(self, pull: Pull, now_s: float) -> None:
        """The syncer asks for a fragment."""
        slot = self.context.slots[pull.fragment_id]
        slot.pull, slot.pulled_s = pull, now_s
        self.settle(now_s)
        # A place comes free within about one upload. If that is too late for this round, its syncer should
        # not wait; the fragment keeps its place in the queue, and rides along in the next round.
        if slot.is_waiting and 2 * (self._upload_s or 0.0) > pull.window_s:
            self._decline(pull, DeclineReason.BUSY)

    def void(self) -> None:
        """The life that all this was of is over: nothing of it counts any more, and each fragment comes anew."""
        self.context.born_step = self.context.counters.local_step
        for slot in self.context.slots:
            if slot.upload is not None:
                self.context.effects.append(DropUpload(header=slot.upload))
            slot.pull, slot.asked, slot.upload, slot.retry_s, slot.failures = None, None, None, None, 0

    def settle(self, now_s: float) -> None:
        """Ask for snapshots while places are free; offer again what nothing was heard of."""
        for slot in self.context.slots:
            if slot.upload is not None and slot.retry_s is not None and now_s >= slot.retry_s:
                self._start_upload(slot, slot.upload, 0.0, now_s, again=True)
        if not self.context.link.welcomed:
            return
        under_way = sum(slot.is_busy for slot in self.context.slots)
        while under_way < self._uploads_max():
            waiting = [self._choice(FragmentId(index), slot, now_s) for index, slot in enumerate(self.context.slots)]
            chosen = choose_upload((choice for choice in waiting if choice is not None), self._upload_s or 0.0)
            if chosen is None:
                return
            slot = self.context.slots[chosen]
            slot.asked, slot.pull = slot.pull, None
            slot.sent_step = self.context.counters.local_step
            self.context.effects.append(RequestSnapshot(fragment_id=chosen))
            under_way += 1

    def _uploads_max(self) -> int:
        """How many uploads may be under way.

        A snapshot waits for the end of a step. Who is slower than the run is asked several times meanwhile, and must be
        able to answer them all at that boundary: otherwise the rest waits for the next one, and is late for good.
        """
        settings, step_s = self.context.settings, self.context.counters.step_time_s
        ratio = self.context.step_ratio.value
        travelling_steps = round(ratio - 1.0 + (ratio * self.context.link.round_trip.rtt_s / step_s if step_s else 0.0))
        return settings.schedule.uploads_max(settings.overlap_steps, travelling_steps)

    def _choice(self, fragment_id: FragmentId, slot: Slot, now_s: float) -> UploadChoice | None:
        pull, counters, schedule = slot.pull, self.context.counters, self.context.settings.schedule
        if pull is None or slot.is_busy or slot.state.step_lo < self.context.born_step:
            return None
        step = max(0, counters.local_step - self.context.anchor)
        since_offset = (step - schedule.offset(fragment_id)) % schedule.period_steps
        is_open = slot.state.version <= pull.version
        return UploadChoice(
            fragment_id=fragment_id,
            remaining_s=max(0.0, slot.pulled_s + pull.window_s - now_s) if is_open else None,
            due_s=(schedule.period_steps - since_offset) * counters.step_time_s,
            periods=(counters.local_step - slot.sent_step) // schedule.period_steps,
            steps=counters.local_step - slot.state.step_lo,
        )

    def snapshot(self, snapshot: SnapshotTaken, now_s: float) -> None:
        """A fragment was copied: announce its contribution and send it."""
        slot = self.context.slots[snapshot.fragment_id]
        pull, slot.asked = slot.asked, None
        if pull is None:
            return
        counters, state = self.context.counters, slot.state
        if counters.local_step == state.step_lo:
            # At the end of the run this learner may hold, and the round can't close without work.
            self.context.work_until = counters.local_step + 1
            self._decline(pull, DeclineReason.ZERO_STEPS)
            return
        if counters.tokens == state.tokens_lo:
            self._show_barren(f"no loss or gradient was finite since step {state.step_lo}: its steps count for nothing")
            self._decline(pull, DeclineReason.NO_TOKENS)
            return
        self._show_barren("")
        sizes = self.context.settings.sizes[snapshot.fragment_id]
        slot.upload = ContributionHeader(
            key=ContributionKey(
                learner_id=self.context.identity.learner_id,
                incarnation=self.context.incarnation,
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
            codec=self.context.settings.codec,
            codes_bytes=sizes.codes_bytes,
            scales_bytes=sizes.scales_bytes,
        )
        self._start_upload(slot, slot.upload, pull.upload_s, now_s, again=False)

    def _show_barren(self, text: str) -> None:
        """Say that training gives nothing any more, and when it does again: once each."""
        if self._barren != bool(text):
            self._barren = bool(text)
            self.context.effects.append(ShowReason(topic="finite", text=text))

    def _start_upload(
        self, slot: Slot, header: ContributionHeader, spread_s: float, now_s: float, *, again: bool
    ) -> None:
        """Send, and send again if neither an acknowledgement nor a broken stream is heard of."""
        slot.started_s, slot.again = now_s, again
        slot.retry_s = now_s + max(RESEND_MIN_S, spread_s + _RESEND_FACTOR * (self._upload_s or 0.0))
        self.context.effects.append(StartUpload(header=header, spread_s=spread_s))

    def done(
        self, fragment_id: FragmentId, step_lo: LocalStep, step_hi: LocalStep, acknowledged_s: float | None
    ) -> None:
        """A contribution is acknowledged at that time, or, with None, refused: its bytes aren't needed any more."""
        slot = self.context.slots[fragment_id]
        header = slot.upload
        if header is None or header.key.step_lo != step_lo or header.step_hi > step_hi:
            return
        if acknowledged_s is not None:
            took_s = acknowledged_s - slot.started_s
            # Up at once and down slowly: the first deltas of a run are small and travel alone, and what is taken for
            # quicker than it is comes too late, period after period. What was begun again took that long at least; for
            # how long the syncer was away, or an acknowledgement lost, says nothing of the link.
            usual_s = self._upload_s or 0.0 if slot.again else smooth(self._upload_s, took_s)
            self._upload_s = max(took_s, usual_s)
        slot.upload, slot.retry_s, slot.failures = None, None, 0
        self.context.effects.append(DropUpload(header=header))

    def broken(self, header: ContributionHeader, now_s: float) -> None:
        """An upload's stream ended while the connection lives on: again, a little later."""
        slot = self.context.slots[header.key.fragment_id]
        if slot.upload == header and self.context.link.welcomed:
            slot.failures += 1
            slot.retry_s = now_s + self.context.settings.retry.delay_s(slot.failures, self._rng)

    def _decline(self, pull: Pull, reason: DeclineReason) -> None:
        self.context.send(
            Declined(round_id=RoundId(pull.round_id), attempt=pull.attempt, fragment_id=pull.fragment_id, reason=reason)
        )
