"""A learner as a donor: it pins its inner moments at a step boundary, and gives them to whom the syncer names.

Part of the learner's machine. One pin at a time, shared by all who come while it is new enough; what was pinned is
kept a while, so that a joiner whose connection broke can go on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wan_diloco.protocol.deadlines import DONOR_KEEP_S
from wan_diloco.protocol.donors import is_recent
from wan_diloco.protocol.events import BoundaryPassed
from wan_diloco.protocol.learner_slots import LearnerContext
from wan_diloco.protocol.rejoin_messages import (
    Donate,
    StateDeclined,
    StateManifest,
    StateReady,
    StateRefusal,
    SyncerClock,
)
from wan_diloco.protocol.state_events import (
    DescribeState,
    EndGiving,
    GiveState,
    PinState,
    ReleaseState,
    StateDescribed,
)
from wan_diloco.units import GlobalStep, TransferId, Version

__all__ = ["DonorPart"]


@dataclass(slots=True)
class _Pin:
    """What is pinned, or will be at the next boundary.

    Attributes:
        number: Tells it from those before.
        clock: Of the syncer's state that it belongs to.
        step, versions: Of the boundary; None before it.
        manifest: Once it is described.
        takers: Transfers that it serves.
    """

    number: int
    clock: SyncerClock
    step: GlobalStep | None = None
    versions: tuple[Version, ...] = ()
    manifest: StateManifest | None = None
    takers: set[TransferId] = field(default_factory=set)


class DonorPart:
    """All that a learner gives.

    Args:
        context: Of the machine that this is a part of.
    """

    def __init__(self, context: LearnerContext) -> None:
        """Nothing is pinned."""
        self.context = context
        self._asked: dict[TransferId, Donate] = {}
        self._pin: _Pin | None = None
        self._numbers = 0
        self._keep_s: float | None = None

    def asked(self, donate: Donate) -> None:
        """The syncer wants this learner to give; answered as soon as it has seen that clock."""
        self._asked[donate.transfer] = donate

    def over(self, transfer: TransferId, now_s: float) -> None:
        """A transfer is over."""
        self._asked.pop(transfer, None)
        if self._pin is not None and transfer in self._pin.takers:
            self._pin.takers.discard(transfer)
            self.context.effects.append(EndGiving(transfer=transfer))
            self._keep(now_s)

    def lost(self, now_s: float) -> None:
        """The connection is gone, and all transfers with it."""
        self._asked.clear()
        if self._pin is not None:
            self._pin.takers.clear()
            self._keep(now_s)

    def boundary(self, event: BoundaryPassed) -> None:
        """The training loop may have pinned what it was asked for."""
        pin = self._pin
        if pin is None and event.pinned:
            self.context.effects.append(ReleaseState())  # nobody wants it any more
        if pin is None or pin.number != event.pinned:
            return
        pin.step = GlobalStep(max(0, event.local_step - self.context.anchor))
        pin.versions = tuple(slot.state.version for slot in self.context.slots)
        self.context.effects.append(DescribeState(number=pin.number))

    def described(self, event: StateDescribed) -> None:
        """Size and digest of what was pinned are known."""
        pin = self._pin
        if pin is None or pin.number != event.number or pin.step is None:
            return
        if not event.finite:
            for transfer in sorted(pin.takers):
                self._decline(transfer, StateRefusal.NON_FINITE)
            self._drop()
            return
        pin.manifest = StateManifest(
            global_step=pin.step,
            versions=pin.versions,
            layout=self.context.settings.state_layout,
            size_bytes=event.size_bytes,
            digest=event.digest,
        )
        for transfer in sorted(pin.takers):
            self._give(transfer, pin.manifest)

    def settle(self, now_s: float, *, has_moments: bool) -> None:
        """Answer what can be answered; let go of what nobody came back for."""
        if self._keep_s is not None and now_s >= self._keep_s:
            self._drop()
        for transfer, donate in list(self._asked.items()):
            if not self.context.clock.is_of(donate.clock):
                self._refuse(transfer, StateRefusal.OTHER_CLOCK)
            elif not has_moments:
                self._refuse(transfer, StateRefusal.NO_MOMENTS)
            elif self.context.clock.has_seen(donate.clock):
                del self._asked[transfer]
                self._serve(donate)

    def deadline_s(self) -> float | None:
        """When what is pinned is let go of."""
        return self._keep_s

    def _serve(self, donate: Donate) -> None:
        pin = self._pin
        if pin is not None and not self._suits(pin, donate):
            if pin.takers:
                self._decline(donate.transfer, StateRefusal.BUSY)
                return
            pin = None
        if pin is None:
            self._numbers += 1
            pin = self._pin = _Pin(self._numbers, donate.clock)
            self.context.effects.append(PinState(number=pin.number))
        self._keep_s = None
        pin.takers.add(donate.transfer)
        if pin.manifest is not None:
            self._give(donate.transfer, pin.manifest)

    def _suits(self, pin: _Pin, donate: Donate) -> bool:
        period = self.context.settings.schedule.period_steps
        is_new = pin.step is None or is_recent(donate.clock.global_step, pin.step, period)
        return is_new and pin.clock.is_of(donate.clock)

    def _give(self, transfer: TransferId, manifest: StateManifest) -> None:
        self.context.send(StateReady(transfer=transfer, manifest=manifest))
        self.context.effects.append(GiveState(transfer=transfer))

    def _refuse(self, transfer: TransferId, reason: StateRefusal) -> None:
        del self._asked[transfer]
        self._decline(transfer, reason)

    def _decline(self, transfer: TransferId, reason: StateRefusal) -> None:
        self.context.send(StateDeclined(transfer=transfer, reason=reason))

    def _keep(self, now_s: float) -> None:
        if self._pin is not None and not self._pin.takers:
            self._keep_s = now_s + DONOR_KEEP_S

    def _drop(self) -> None:
        self._pin, self._keep_s = None, None
        self.context.effects.append(ReleaseState())
