"""Talking with learners: Hello, reports, acknowledgements, goodbye.

Part of the syncer's machine.
"""

from __future__ import annotations

from typing import assert_never

from wan_diloco.protocol.admission import Standing, examine, is_of_a_copy, is_of_another_state, is_taken_over
from wan_diloco.protocol.events import SessionId, StateMissing, TakenOver
from wan_diloco.protocol.fence import are_two, same_term
from wan_diloco.protocol.ledger import Amount
from wan_diloco.protocol.membership import Member
from wan_diloco.protocol.messages import (
    Declined,
    Goodbye,
    Hello,
    LearnerMessage,
    RefusalReason,
    Refused,
    Report,
    ResyncRequest,
    Stop,
    UpdateReceived,
    Welcome,
)
from wan_diloco.protocol.plausibility import examine_report
from wan_diloco.protocol.rejoin_messages import StateDeclined, StateReady, StateSettled, StateWanted
from wan_diloco.protocol.syncer_context import SyncerContext
from wan_diloco.protocol.syncer_donors import DonorDesk
from wan_diloco.protocol.syncer_leases import LeaseDesk
from wan_diloco.protocol.syncer_rounds import RoundConductor
from wan_diloco.protocol.tape import LearnerAdmitted
from wan_diloco.units import FragmentId, GlobalStep, Incarnation

__all__ = ["SessionDesk"]

# What is believed of a step's duration: leases and grace follow it, and a machine that was suspended must not count as
# live for hours.
_STEP_S_MAX = 600.0


class SessionDesk:
    """What learners say, and what is answered at once.

    Args:
        context: Of the machine that this is a part of.
        conductor: Is told of joins, declines and arrivals.
        donors: Are told of whatever concerns a joiner's state.
    """

    def __init__(self, context: SyncerContext, conductor: RoundConductor, donors: DonorDesk) -> None:
        """Nobody is there."""
        self.context = context
        self.conductor = conductor
        self.donors = donors
        self._leases = LeaseDesk(context)

    def said(self, session: SessionId, message: LearnerMessage, now_s: float) -> None:
        """A control message came."""
        if session in self.context.closing:
            # What was on its way when the session was ended. A Hello that comes twice must not end the life that the
            # first one began: nobody would know of the second.
            return
        if isinstance(message, Hello):
            self._hello(session, message, now_s)
            return
        member = self.context.membership.of(session)
        if member is None:
            # A session that was replaced, or that never said Hello: its words have lost their meaning.
            self.context.close(session, "no standing session")
            return
        # Who wakes only to go is not asked for anything.
        if not isinstance(message, Goodbye) and self.context.membership.heard(member, now_s):
            self.conductor.ask_again()
        match message:
            case Report():
                self._report(member, message)
            case Declined():
                self.conductor.declined(member, message)
            case UpdateReceived():
                if message.fragment_id < self.context.downlink.num_fragments:
                    self.context.downlink.received(member.learner_id, message)
                    self.conductor.observe_sync(message, now_s)
                    self.context.send_updates(member)
            case ResyncRequest():
                if message.fragment_id < self.context.downlink.num_fragments:
                    self.context.state.rejected_once(message.reason)
                    if message.reason is RefusalReason.NON_FINITE:
                        self.conductor.spoiled(member.learner_id, message.fragment_id)
                    self.context.downlink.want_resync(member.learner_id, message.fragment_id)
                    self.context.send_updates(member)
            case StateWanted():
                self.donors.wanted(member, message)
            case StateReady():
                self.donors.ready(member, message)
            case StateDeclined():
                self.donors.declined(member, message)
            case StateSettled():
                self.donors.settled(member, message)
            case Goodbye():
                self.context.membership.leave(member)
                self.context.close(session, "goodbye")
            case _:
                assert_never(message)

    def _hello(self, session: SessionId, hello: Hello, now_s: float) -> None:
        state, learner_id = self.context.state, hello.learner_id
        if self.context.membership.of(session) is not None:
            state.rejected_once(RefusalReason.GARBAGE)
            self.context.close(session, "a second Hello")
            return
        standing = self._standing(hello)
        is_foreign = is_of_another_state(self.context.settings.terms, hello, standing)
        if is_foreign and not state.started:
            # Of a mistyped folder, say, or a disk that isn't mounted: nobody may come to harm by it.
            self.context.taken_over = True
            self.context.effects.append(StateMissing(learner_id=learner_id, local_step=hello.local_step))
            return
        if is_taken_over(self.context.settings.terms, hello, state.term):
            # Before anything else is decided about it: a life that the other gave looks like one that nobody gave.
            self.context.taken_over = True
            self.context.effects.append(TakenOver(learner_id=learner_id, term=hello.term))
            return
        if is_foreign:
            # It isn't told to end: it goes on by itself until the syncer is there that has its run.
            state.rejected_once(RefusalReason.FENCED)
            text = (
                f"{learner_id} is at step {hello.local_step} of a run of which this state knows nothing: not taken in"
            )
            self.context.show(f"foreign:{learner_id}", text)
            self.context.close(session, "this syncer has another state of the run, in which you never took part")
            return
        if is_of_a_copy(self.context.settings.terms, hello, state.term, self.context.settings.term_id):
            # It stays with the one that it met first. This one can't know which of the two goes on, and doesn't end.
            state.rejected_once(RefusalReason.FENCED)
            self.context.show(f"copy:{learner_id}", f"{same_term(state.term)}; {learner_id} is with it: not taken in")
            self.context.close(session, same_term(state.term))
            return
        refused = examine(self.context.settings.terms, hello, standing)
        if refused is not None:
            self._refuse_session(session, refused)
            return
        if state.ended:
            self.context.send(session, Stop(reason="the run has ended", global_step=GlobalStep(state.global_step)))
            self.context.close(session, "the run has ended")
            return
        # A Hello that was held up on a connection which its learner has given up since must not begin another life,
        # which nobody would live and which would fence the one that somebody does.
        begins = learner_id not in state.leases or not standing.lives(hello) or standing.is_another(hello)
        if begins and (refused := self._begin_life(hello, standing.incarnation, now_s)) is not None:
            self._refuse_session(session, refused)
            return
        self._welcome(session, hello, now_s, begins=begins)
        self.conductor.ask_again()

    def _standing(self, hello: Hello) -> Standing:
        state, learner_id = self.context.state, hello.learner_id
        return Standing(
            incarnation=state.incarnations.get(learner_id, Incarnation(0)),
            life_id=state.life_ids.get(learner_id, ""),
            unlisted=sum(name not in state.shards for name in state.incarnations),
            once_listed=learner_id in state.shards,
            went_back=state.epoch > 0,
            strayed=are_two(state.term_ids.get(hello.term, ""), hello.term_id),
        )

    def _begin_life(self, hello: Hello, standing: Incarnation, now_s: float) -> Refused | None:
        """Admit a new life, if there are data for it.

        Also one that was forgotten, or that another state's process has had since, begins anew, under a number that it
        didn't have: its data, its position in them and its account do, and what it has learned so far is of an epoch
        that is over, or of versions that have the numbers of ours and other bits.
        """
        shard = self._leases.lend(hello.learner_id, now_s)
        if isinstance(shard, Refused):
            return shard
        record = LearnerAdmitted(
            learner_id=hello.learner_id,
            incarnation=Incarnation(max(hello.incarnation, standing) + 1),
            local_step=hello.local_step,
            tokens=hello.tokens,
            life_id=hello.life_id,
            shard=shard,
        )
        self.context.record(record, durable=True)
        self.context.responses.forget(hello.learner_id)
        return None

    def _welcome(self, session: SessionId, hello: Hello, now_s: float, *, begins: bool) -> None:
        context, state, learner_id = self.context, self.context.state, hello.learner_id
        incarnation, lease = state.incarnations[learner_id], state.leases[learner_id]
        earlier = context.membership.welcome(learner_id, incarnation, session, hello.local_step, hello.tokens, now_s)
        if earlier is not None:
            context.close(earlier, "a newer session of the same learner")
        context.downlink.connected(learner_id, new_life=begins)
        if hello.incarnation not in (0, incarnation):
            # It trained on as a life that is over: what its weights have since their bases must not be merged.
            for index in range(context.downlink.num_fragments):
                context.downlink.want_resync(learner_id, FragmentId(index))
        welcome = Welcome(
            incarnation=incarnation,
            term=state.term,
            epoch=state.epoch,
            global_step=GlobalStep(context.membership.global_step),
            anchor=context.membership.members[learner_id].anchor,
            total_steps=context.settings.total_steps,
            versions=tuple(state.versions),
            data_shard=lease.shard,
            next_unit=state.units.get(lease.shard, 0),
            shards=context.settings.shards,
            started=state.started,
            term_id=context.settings.term_id,
        )
        context.show(f"copy:{learner_id}", "")
        context.send(session, welcome)

    def _refuse_session(self, session: SessionId, refused: Refused) -> None:
        self.context.state.rejected_once(refused.reason)
        self.context.send(session, refused)
        self.context.close(session, f"refused: {refused.detail}")

    def _report(self, member: Member, report: Report) -> None:
        if report.local_step < member.local_step:
            return  # from before a reconnect; what came since is newer
        learner_id, incarnation = member.learner_id, member.incarnation
        if not self._is_plausible(member, report):
            return
        said_step = member.local_step
        leap = self.context.membership.progressed(member, report.local_step, report.tokens)
        text = f"{learner_id} went from step {said_step} to {report.local_step} at once: it counts from here"
        self.context.show(f"leap:{learner_id}", text if leap else "")
        member.step_time_s = min(report.step_time_s, _STEP_S_MAX)
        member.loss, member.learning_rate, member.rtt_s = report.loss, report.learning_rate, report.rtt_s
        if report.echo:
            self.context.echoes[learner_id] = report.echo
        member.reported = True
        ledger = self.context.state.ledger
        for item in report.fragments:
            # What was installed in another epoch is lost anyway, and will be replaced whenever it was installed.
            if item.fragment_id < ledger.num_fragments and item.version.epoch == self.context.state.epoch:
                lo = Amount(item.step_lo, item.tokens_lo)
                ledger.installed(learner_id, incarnation, item.fragment_id, lo)
        ledger.observe(learner_id, incarnation, Amount(report.local_step, report.tokens))
        self.context.downlink.reported(learner_id, report)
        self.context.send_updates(member)

    def _is_plausible(self, member: Member, report: Report) -> bool:
        """Refuse a report that can't be true: nothing of it is believed, and its session ends."""
        life = self.context.state.ledger.lives.get((member.learner_id, member.incarnation))
        assert life is not None or self.context.state.ended, "who is a member was admitted"
        settings = self.context.settings
        refusal = examine_report(
            report,
            said_step=member.local_step,
            position=Amount(report.local_step, report.tokens) if life is None else life.position,
            claim_max=settings.claim_steps_max,
            batch_tokens=settings.intake.batch_tokens,
        )
        if refusal is None:
            return True
        self.context.state.rejected_once(refusal.reason)
        assert member.session is not None
        self.context.close(member.session, f"a report that can't be true: {refusal.detail}")
        return False
