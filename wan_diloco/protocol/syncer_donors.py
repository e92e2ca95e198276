"""Who gives its inner moments to whom: joiners that wait, donors that give, and what becomes of both.

Part of the syncer's machine; `donors.choose_donor` says who, this says what follows. Nothing here is durable: after a
restart joiners ask again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from wan_diloco.protocol.donors import Candidate, choose_donor, is_proven
from wan_diloco.protocol.events import SessionId
from wan_diloco.protocol.membership import Member
from wan_diloco.protocol.rejoin_messages import (
    Donate,
    DonationOver,
    MomentsSource,
    NoDonor,
    StateDeclined,
    StateManifest,
    StateOffered,
    StateReady,
    StateSettled,
    StateWanted,
    SyncerClock,
)
from wan_diloco.protocol.syncer_context import SyncerContext
from wan_diloco.units import GlobalStep, Incarnation, LearnerId, TransferId

__all__ = ["DonorDesk"]

# For one joiner: each may be another donor, and then it is better to train.
_FAILURES_MAX = 4
# A donor pins at a step boundary; whoever hasn't by then is in a step that hangs.
_PIN_STEPS = 5
# Transfers of one term; terms make them unique beyond it.
_NUMBERS = 2**32


@dataclass(slots=True)
class _Joiner:
    """A learner that wants moments; in the order of asking.

    Attributes:
        session: On which it asked; None when that is gone, and it may come back and ask again.
        failures: Of each donor that it was given.
        digest: Of the row of which it has a part.
        held_by: Who pinned that row.
        transfer: Under way; None while it waits.
    """

    incarnation: Incarnation
    session: SessionId | None
    failures: Counter[LearnerId] = field(default_factory=Counter)
    digest: str = ""
    held_by: LearnerId | None = None
    transfer: TransferId | None = None


@dataclass(slots=True)
class _Transfer:
    """One donor's gift to one joiner.

    Attributes:
        pin_by_s: Until when the donor should have pinned its state.
        manifest: None before it has.
    """

    donor: LearnerId
    donor_session: SessionId
    joiner: LearnerId
    joiner_session: SessionId
    pin_by_s: float
    manifest: StateManifest | None = None


class DonorDesk:
    """All transfers of state.

    Args:
        context: Of the machine that this is a part of.
    """

    def __init__(self, context: SyncerContext) -> None:
        """Nobody wants anything."""
        self.context = context
        self._joiners: dict[LearnerId, _Joiner] = {}
        self._transfers: dict[TransferId, _Transfer] = {}
        self._last = 0

    # ---- what is heard ---------------------------------------------------------------------------

    def wanted(self, member: Member, message: StateWanted) -> None:
        """A new life asks for a donor, for the first time or again."""
        assert member.session is not None, "who speaks has a session"
        joiner = self._joiners.setdefault(member.learner_id, _Joiner(member.incarnation, member.session))
        joiner.session, joiner.digest = member.session, message.digest
        if joiner.transfer is not None:
            self._end(joiner.transfer, failed=joiner.transfer == message.failed)

    def ready(self, member: Member, message: StateReady) -> None:
        """A donor has pinned its state: its joiner may come and take it."""
        transfer = self._given_by(member, message.transfer)
        if transfer is None or transfer.manifest is not None:
            return
        transfer.manifest = message.manifest
        self._joiners[transfer.joiner].held_by = transfer.donor
        offer = StateOffered(transfer=message.transfer, donor=transfer.donor, manifest=message.manifest)
        self.context.send(transfer.joiner_session, offer)

    def declined(self, member: Member, message: StateDeclined) -> None:
        """A learner can't be a donor now."""
        if self._given_by(member, message.transfer) is not None:
            self._end(message.transfer, failed=True)

    def settled(self, member: Member, message: StateSettled) -> None:
        """A new life has its moments, wherever they are from."""
        peer = f" of {message.donor}" if message.source is MomentsSource.PEER else ""
        member.moments = f"{message.source.value}{peer}"
        self._leave(member.learner_id)

    def allows(self, session: SessionId, transfer_id: TransferId, *, giving: bool) -> bool:
        """Whether a session may give, or take, that transfer's bytes."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        if giving:
            # Its call may come before its word that it is ready.
            return session == transfer.donor_session
        return session == transfer.joiner_session and transfer.manifest is not None

    # ---- what follows ----------------------------------------------------------------------------

    def settle(self, now_s: float) -> None:
        """Let go of who is gone, and give donors to those who wait."""
        for learner_id, joiner in list(self._joiners.items()):
            member = self.context.membership.members.get(learner_id)
            if member is None or member.incarnation != joiner.incarnation or not (member.live or member.session):
                self._leave(learner_id)
            elif member.session != joiner.session:
                joiner.session = None
                if joiner.transfer is not None:
                    self._end(joiner.transfer, failed=False)
        for transfer_id, transfer in list(self._transfers.items()):
            late = transfer.manifest is None and now_s >= transfer.pin_by_s
            if late or not self._stands(transfer):
                self._end(transfer_id, failed=True)
        for learner_id, joiner in list(self._joiners.items()):
            if joiner.transfer is None and joiner.session is not None:
                self._assign(learner_id, joiner, joiner.session, now_s)

    def deadlines_s(self) -> list[float]:
        """When a donor should have answered."""
        return [transfer.pin_by_s for transfer in self._transfers.values() if transfer.manifest is None]

    def _assign(self, learner_id: LearnerId, joiner: _Joiner, session: SessionId, now_s: float) -> None:
        joiners_max = self.context.settings.joiners_max
        choice = choose_donor(self._candidates(learner_id, joiner), joiners_max)
        failures = joiner.failures.total()
        if failures >= _FAILURES_MAX:
            self._refuse(learner_id, session, f"{failures} transfers failed")
        elif choice.donor is not None:
            self._begin(learner_id, joiner, session, choice.donor, now_s)
        elif choice.later:
            text = f"{learner_id} waits for inner moments: every donor serves {joiners_max} others"
            self.context.show(f"donor:{learner_id}", text)
        else:
            self._refuse(learner_id, session, "no peer is proven, up to date and within reach")

    def _begin(
        self, learner_id: LearnerId, joiner: _Joiner, session: SessionId, donor_id: LearnerId, now_s: float
    ) -> None:
        context, donor = self.context, self.context.membership.members[donor_id]
        assert donor.session is not None, "candidates have sessions"
        self._last += 1
        joiner.transfer = TransferId(context.state.term * _NUMBERS + self._last)
        pin_s = max(context.settings.lease_s, _PIN_STEPS * donor.step_time_s)
        self._transfers[joiner.transfer] = _Transfer(
            donor=donor_id,
            donor_session=donor.session,
            joiner=learner_id,
            joiner_session=session,
            pin_by_s=now_s + pin_s,
        )
        clock = SyncerClock(
            term=context.state.term,
            epoch=context.state.epoch,
            global_step=GlobalStep(context.membership.global_step),
        )
        context.show(f"donor:{learner_id}", "")
        context.send(donor.session, Donate(transfer=joiner.transfer, joiner=learner_id, clock=clock))

    def _refuse(self, learner_id: LearnerId, session: SessionId, reason: str) -> None:
        self.context.send(session, NoDonor(reason=reason))
        self._leave(learner_id)

    def _leave(self, learner_id: LearnerId) -> None:
        """A joiner wants nothing any more."""
        joiner = self._joiners.get(learner_id)
        if joiner is not None:
            if joiner.transfer is not None:
                self._end(joiner.transfer, failed=False)
            del self._joiners[learner_id]
            self.context.show(f"donor:{learner_id}", "")

    def _end(self, transfer_id: TransferId, *, failed: bool) -> None:
        """A transfer is over; its joiner waits again."""
        transfer = self._transfers.pop(transfer_id)
        joiner = self._joiners[transfer.joiner]
        joiner.transfer = None
        joiner.failures[transfer.donor] += failed
        if self.context.membership.of(transfer.donor_session) is not None:
            self.context.send(transfer.donor_session, DonationOver(transfer=transfer_id))

    def _candidates(self, learner_id: LearnerId, joiner: _Joiner) -> list[Candidate]:
        context = self.context
        serving = Counter(transfer.donor for transfer in self._transfers.values())
        return [
            Candidate(
                learner_id=member.learner_id,
                serving=serving[member.learner_id],
                failures=joiner.failures[member.learner_id],
                holds=bool(joiner.digest) and joiner.held_by == member.learner_id,
            )
            for member in context.membership.live()
            if member.learner_id != learner_id
            and member.learner_id not in self._joiners
            and member.session is not None
            and member.reported
            and context.downlink.is_up_to_date(member.learner_id, context.state)
            and is_proven(context.state, member.learner_id, member.incarnation)
        ]

    def _given_by(self, member: Member, transfer_id: TransferId) -> _Transfer | None:
        transfer = self._transfers.get(transfer_id)
        return transfer if transfer is not None and transfer.donor_session == member.session else None

    def _stands(self, transfer: _Transfer) -> bool:
        donor = self.context.membership.members[transfer.donor]
        return donor.live and donor.session == transfer.donor_session
