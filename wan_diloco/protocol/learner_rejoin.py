"""A new life's way to its inner moments: its own, a peer's, or none; it takes no step before it has decided.

Part of the learner's machine. Partial state is never used: the driver tells of a fetch only when its digest is right.
"""

from __future__ import annotations

from wan_diloco.protocol.deadlines import REJOIN_PATIENCE_S
from wan_diloco.protocol.donors import keeps_own
from wan_diloco.protocol.events import ShowReason
from wan_diloco.protocol.learner_slots import LearnerContext
from wan_diloco.protocol.messages import Welcome
from wan_diloco.protocol.rejoin_messages import MomentsSource, StateOffered, StateSettled, StateWanted
from wan_diloco.protocol.state_events import FetchState, InstallMoments, ReleaseState, StateBroken, StateProgress
from wan_diloco.units import GlobalStep, LearnerId, TransferId

__all__ = ["RejoinDesk"]

_NO_TRANSFER = TransferId(0)


class RejoinDesk:
    """Of one life.

    Args:
        context: Of the machine that this is a part of.
        own_step: The global step that the training loop's moments are of; None when it has none.
        settled: This life has its moments, from before this uplink began.
    """

    def __init__(self, context: LearnerContext, own_step: int | None, *, settled: bool) -> None:
        """Nothing is known yet."""
        self.context = context
        self.settled = settled
        self._own_step = own_step
        self._result: StateSettled | None = None
        self._offer: StateOffered | None = None
        self._digest = ""
        self._patience_s: float | None = None
        self._shown = ""
        # The moments are on their way into the training loop, which tells at a boundary.
        self._installing = False

    def welcomed(self, welcome: Welcome, now_s: float) -> None:
        """A session began."""
        if self._result is not None:
            self.context.send(self._result)  # it may have been lost with the session before
        if self.settled or self._installing:
            return
        if keeps_own(self._own_step, welcome.global_step, self.context.settings.schedule.period_steps):
            self._fall_back()
            return
        self._offer = None
        if self._patience_s is None:
            self._await(now_s)
        else:
            # Only what comes renews it: on a link that breaks more often than that it would never be over.
            self._show_awaited()
        self._ask(_NO_TRANSFER)

    def offered(self, offer: StateOffered, now_s: float) -> None:
        """A donor is ready."""
        if self.settled or self._installing:
            return
        manifest = offer.manifest
        self._offer, self._digest = offer, manifest.digest
        self._await(now_s)
        epoch = self.context.clock.epoch
        is_foreign = any(version.epoch != epoch for version in manifest.versions)
        if is_foreign or manifest.layout != self.context.settings.state_layout:
            self._ask(offer.transfer)
            return
        self.context.effects.append(FetchState(offer=offer))

    def refused(self) -> None:
        """There is no donor."""
        if not (self.settled or self._installing):
            self._fall_back()

    def progressed(self, event: StateProgress, now_s: float) -> None:
        """More of it came."""
        if self._is_current(event.transfer):
            self._await(now_s)

    def broken(self, event: StateBroken) -> None:
        """It didn't come whole, or wasn't what it should be."""
        if self._is_current(event.transfer):
            self._ask(event.transfer)

    def fetched(self, transfer: TransferId) -> None:
        """It is here, and its digest is right."""
        if self._is_current(transfer) and self._offer is not None:
            self._installing, self._patience_s = True, None
            step = self._offer.manifest.global_step
            self.context.effects.append(InstallMoments(transfer=transfer, donor=self._offer.donor, global_step=step))

    def installed(self, transfer: TransferId) -> None:
        """The training loop has it."""
        if self._installing and self._offer is not None and self._offer.transfer == transfer:
            donor, step = self._offer.donor, self._offer.manifest.global_step
            self._settle(MomentsSource.PEER, donor, step)

    def expire(self, now_s: float) -> None:
        """Waiting comes to its end."""
        if self._patience_s is not None and now_s >= self._patience_s:
            self._fall_back()

    def deadline_s(self) -> float | None:
        """When waiting comes to its end."""
        return self._patience_s

    def _is_current(self, transfer: TransferId) -> bool:
        is_it = self._offer is not None and self._offer.transfer == transfer
        return is_it and not (self.settled or self._installing)

    def _await(self, now_s: float) -> None:
        self._patience_s = now_s + REJOIN_PATIENCE_S
        self._show_awaited()

    def _show_awaited(self) -> None:
        self._show(
            "no step yet: waits for a peer's inner moments"
            if self._offer is None
            else f"no step yet: takes the inner moments of {self._offer.donor}"
        )

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self.context.effects.append(ShowReason(topic="moments", text=text))

    def _ask(self, failed: TransferId) -> None:
        self._offer = None
        self.context.send(StateWanted(failed=failed, digest=self._digest))

    def _fall_back(self) -> None:
        """Begin with what the training loop has."""
        own = self._own_step is not None
        source = MomentsSource.OWN if own else MomentsSource.NONE
        self._settle(source, LearnerId(""), GlobalStep(self._own_step or 0))

    def _settle(self, source: MomentsSource, donor: LearnerId, step: GlobalStep) -> None:
        self.settled, self._installing = True, False
        asked, self._patience_s = self._patience_s is not None or source is MomentsSource.PEER, None
        self._offer = None
        self._result = StateSettled(source=source, donor=donor, global_step=step)
        self.context.send(self._result)
        self._show("")
        if asked:
            self.context.effects.append(ReleaseState())
