"""Taking contributions in: accept, journal, acknowledge, refuse.

Part of the syncer's machine; `intake.examine_contribution` says whether, this says what follows from it.
"""

from __future__ import annotations

from wan_diloco.protocol.events import AcceptUpload, RefuseUpload, SessionId, UploadFailed, UploadStored
from wan_diloco.protocol.intake import Refusal, examine_contribution, examine_data
from wan_diloco.protocol.messages import Acknowledged, ContributionHeader, ContributionRefused, RefusalReason
from wan_diloco.protocol.plausibility import examine_claim
from wan_diloco.protocol.syncer_context import SyncerContext
from wan_diloco.protocol.syncer_rounds import RoundConductor
from wan_diloco.protocol.syncer_state import Journalled
from wan_diloco.protocol.tape import ContributionJournalled

__all__ = ["ContributionDesk"]


class ContributionDesk:
    """What happens to contributions before a close record names them.

    Args:
        context: Of the machine that this is a part of.
        conductor: Is told which contributions come, and how long they take.
    """

    def __init__(self, context: SyncerContext, conductor: RoundConductor) -> None:
        """Nothing is under way."""
        self.context = context
        self.conductor = conductor

    def offered(self, session: SessionId, header: ContributionHeader, now_s: float) -> None:
        """A header came: let its bytes come too, or not."""
        if session in self.context.closing:
            # On its way when the session was ended: it must not make a learner live that said goodbye.
            self.context.effects.append(RefuseUpload(session=session, header=header))
            return
        member = self.context.membership.of(session)
        if member is None or (member.learner_id, member.incarnation) != (header.key.learner_id, header.key.incarnation):
            self.context.effects.append(RefuseUpload(session=session, header=header))
            if member is not None:  # otherwise its session was replaced meanwhile
                own = member.learner_id == header.key.learner_id
                self.context.state.rejected_once(RefusalReason.FENCED if own else RefusalReason.OTHER_LEARNER)
            self.context.close(session, "a contribution in another's name")
            return
        if self.context.membership.heard(member, now_s):
            self.conductor.ask_again()
        if header.key.fragment_id < len(self.context.state.versions) and self.context.state.ledger.is_repeated(header):
            self.context.effects.append(RefuseUpload(session=session, header=header))
            self._repeated(session, header)
            return
        refusal = self._examine(header)
        if refusal is not None:
            self.context.effects.append(RefuseUpload(session=session, header=header))
            self._refuse(header, refusal)
            return
        self.conductor.offered(header)
        self.context.effects.append(AcceptUpload(session=session, header=header))

    def stored(self, event: UploadStored, now_s: float) -> None:
        """The bytes are whole and valid: journal and acknowledge, unless they came too late."""
        header = event.header
        if self.context.state.ledger.is_repeated(header):
            self._repeated(event.session, header)
            return
        refusal = self._examine(header)
        if refusal is not None:
            self._refuse(header, refusal)
            return
        self._journalled(Journalled(header=header, ref=event.ref, payload_bytes=event.payload_bytes))
        self.conductor.observe_response(header, now_s)
        self.context.show(f"finite:{header.key.learner_id}", "")
        self._acknowledge(event.session, header)

    def failed(self, event: UploadFailed) -> None:
        """The bytes are bad: refused whole."""
        resync = event.reason is RefusalReason.NON_FINITE
        self._refuse(event.header, Refusal(event.reason, event.detail, resync=resync))

    def _examine(self, header: ContributionHeader) -> Refusal | None:
        """Why a contribution may not be journalled."""
        settings, state = self.context.settings, self.context.state
        refusal = examine_contribution(settings.intake, state, header)
        if refusal is not None:
            return refusal
        learner_id = header.key.learner_id
        claimed = examine_claim(
            header,
            said_step=self.context.membership.members[learner_id].local_step,
            position=state.ledger.lives[learner_id, header.key.incarnation].position,
            units=state.units.get(state.leases[learner_id].shard, 0),
            claim_max=settings.claim_steps_max,
            batch_tokens=settings.intake.batch_tokens,
        )
        return claimed or examine_data(state, header)

    def _repeated(self, session: SessionId, header: ContributionHeader) -> None:
        """It is in the journal or merged already: say so again. A newer attempt may count on it."""
        standing = self.context.state.pool[header.key.fragment_id].get(header.key)
        if standing is not None and standing.header.step_hi == header.step_hi:
            newer = (header.round_id, header.attempt) > (standing.header.round_id, standing.header.attempt)
            if newer and self._examine(header) is None:
                self._journalled(Journalled(header=header, ref=standing.ref, payload_bytes=standing.payload_bytes))
        self._acknowledge(session, header)

    def _journalled(self, item: Journalled) -> None:
        record = ContributionJournalled(header=item.header, ref=item.ref, payload_bytes=item.payload_bytes)
        self.context.record(record, durable=True)

    def _acknowledge(self, session: SessionId, header: ContributionHeader) -> None:
        member = self.context.membership.members.get(header.key.learner_id)
        target = member.session if member is not None and member.session is not None else session
        message = Acknowledged(fragment_id=header.key.fragment_id, step_lo=header.key.step_lo, step_hi=header.step_hi)
        self.context.send(target, message)

    def _refuse(self, header: ContributionHeader, refusal: Refusal) -> None:
        key = header.key
        self.conductor.refused(header, finite=refusal.reason is not RefusalReason.NON_FINITE)
        self.context.state.rejected_once(refusal.reason)
        if key.fragment_id < len(self.context.state.versions):
            self.context.state.ledger.refused(key)
        member = self.context.membership.members.get(key.learner_id)
        if member is None or member.session is None or member.incarnation != key.incarnation:
            return
        message = ContributionRefused(
            fragment_id=key.fragment_id,
            step_lo=key.step_lo,
            step_hi=header.step_hi,
            reason=refusal.reason,
            detail=refusal.detail,
        )
        self.context.send(member.session, message)
        if refusal.resync:
            self.context.downlink.want_resync(key.learner_id, key.fragment_id)
            self.context.send_updates(member)
