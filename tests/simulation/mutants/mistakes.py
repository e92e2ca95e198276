"""Mistakes that somebody could make in the machines: each makes the wrong thing of the right one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from wan_diloco.protocol import rounds
from wan_diloco.protocol.admission import Standing, Terms
from wan_diloco.protocol.events import (
    ApplyUpdate,
    ContributionsUnreadable,
    InstallUpdate,
    LearnerDisconnected,
    Record,
    SendToLearner,
    SyncerEvent,
)
from wan_diloco.protocol.learner_donor import DonorPart
from wan_diloco.protocol.learner_machine import LearnerMachine
from wan_diloco.protocol.learner_rejoin import RejoinDesk
from wan_diloco.protocol.ledger import DiscardReason, Ledger
from wan_diloco.protocol.messages import Acknowledged, ContributionHeader, Hello, Refused, UpdateHeader, Welcome
from wan_diloco.protocol.rejoin_messages import Donate
from wan_diloco.protocol.rounds import Candidates, OpenRound
from wan_diloco.protocol.state_events import PinState
from wan_diloco.protocol.syncer_context import SyncerContext
from wan_diloco.protocol.syncer_contributions import ContributionDesk
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.syncer_rounds import RoundConductor
from wan_diloco.protocol.syncer_sessions import SessionDesk
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import LearnerAdmitted, LeaseEnded, RoundClosed, SyncerStarted, TapeRecord
from wan_diloco.units import FragmentId, Incarnation, LocalStep


def never(_right: Any) -> Any:
    return lambda *_args, **_kwargs: False


def always(_right: Any) -> Any:
    return lambda *_args, **_kwargs: True


def nothing(_right: Any) -> Any:
    return lambda *_args, **_kwargs: None


def tolerant(right: Any) -> Any:
    """The ledger's own alarm is off, so that the checkers must ring."""

    def journalled(self: Ledger, header: ContributionHeader) -> None:
        interval = self._find(header.key)
        if interval is not None and interval.settled == interval.lo:
            right(self, header)

    return journalled


def unalarmed(right: Any) -> Any:
    def settled(*args: Any) -> None:
        with suppress(AssertionError):
            right(*args)

    return settled


def unfenced(right: Any) -> Any:
    def examine(terms: Terms, hello: Hello, standing: Standing) -> Refused | None:
        as_said = replace(standing, incarnation=hello.incarnation or standing.incarnation, life_id="")
        refused: Refused | None = right(terms, hello, as_said)
        return refused

    return examine


def acknowledged_first(right: Any) -> Any:
    def stored(self: ContributionDesk, event: Any, now_s: float) -> None:
        right(self, event, now_s)
        effects = self.context.effects
        words = [one for one in effects if isinstance(one, SendToLearner) and isinstance(one.message, Acknowledged)]
        effects[:] = [*words, *(one for one in effects if one not in words)]

    return stored


def ageless(_right: Any) -> Any:
    """Every base counts as the current one."""

    def candidates(round_: OpenRound, pool: Any, version: Any, reachable: Any) -> Candidates:
        young = [replace(item, header=replace(item.header, base=version)) for item in pool]
        found = rounds.candidates(round_, young, version, reachable)
        headers = {item.header.key: item.header for item in pool}
        entries = tuple(replace(entry, header=headers[entry.header.key]) for entry in found.entries)
        return replace(found, entries=entries)

    return candidates


def held_counts(_right: Any) -> Any:
    """Whatever lies there counts towards the quorum."""

    def candidates(round_: OpenRound, pool: Any, version: Any, reachable: Any) -> Candidates:
        found = rounds.candidates(round_, pool, version, reachable)
        return replace(found, fresh=frozenset(entry.header.key.learner_id for entry in found.entries))

    return candidates


def unfitting(_right: Any) -> Any:
    def arrived(self: LearnerMachine, header: UpdateHeader) -> None:
        slot = self.context.slots[header.fragment_id]
        version, resync = slot.newest
        if slot.applying is None and (header.resync > resync or header.to_version > version):
            slot.applying = header
            self.context.effects.append(ApplyUpdate(header=header))
        elif slot.applying is None:
            self._acknowledge_update(header.fragment_id)

    return arrived


def not_leading(_right: Any) -> Any:
    """A chain begins wherever what is stored begins."""
    return lambda self, has, fragment_id, state: [
        update for update in state.updates[fragment_id] if update.to_version > has
    ][-1:]


def again(right: Any) -> Any:
    """After a reconnect what is held is installed once more, to be sure."""

    def welcome(self: LearnerMachine, message: Welcome, now_s: float) -> None:
        right(self, message, now_s)
        for index, slot in enumerate(self.context.slots):
            version, resync = slot.newest
            install = InstallUpdate(fragment_id=FragmentId(index), version=version, resync=resync, merged_hi=None)
            self.context.effects.append(install)

    return welcome


def empty(right: Any) -> Any:
    """A round that found nobody closes all the same, and momentum moves."""

    def decide(self: RoundConductor, round_: OpenRound, now_s: float) -> None:
        found = self._candidates(round_)
        if not found.entries and now_s >= round_.gives_up_s:
            round_.quorate_s = now_s
            self._close(round_, found, now_s)
        else:
            right(self, round_, now_s)

    return decide


def lease_kills(right: Any) -> Any:
    """A timer ends lives, which only a new life may."""

    def settle(self: SyncerMachine, now_s: float) -> None:
        for member in self.context.membership.live():
            if now_s >= self.context.membership.expires_s(member) and not self.state.ended:
                record = LearnerAdmitted(
                    learner_id=member.learner_id,
                    incarnation=Incarnation(member.incarnation + 1),
                    local_step=LocalStep(member.local_step),
                    tokens=member.tokens,
                    shard=self.state.leases[member.learner_id].shard,
                )
                self.context.record(record, durable=True)
                if member.session is not None:
                    self.context.membership.disconnected(member.session)
        right(self, now_s)

    return settle


def timer_takes_data(right: Any) -> Any:
    """Whoever is silent for its membership lease loses its data, whether anybody needs them or not."""

    def settle(self: SyncerMachine, now_s: float) -> None:
        right(self, now_s)
        state, membership = self.state, self.context.membership
        for learner_id, lease in list(state.leases.items()):
            member = membership.members.get(learner_id)
            lent = learner_id not in self.context.settings.terms.learners
            if lent and member is not None and not member.live and not state.ended:
                incarnation = state.incarnations[learner_id]
                record = LeaseEnded(learner_id=learner_id, incarnation=incarnation, shard=lease.shard)
                self.context.record(record, durable=True)
                if member.session is not None:
                    self.context.close(member.session, "its data lease has ended")
                    membership.disconnected(member.session)

    return settle


def nobody_is_live(_right: Any) -> Any:
    """Data are taken from whoever was silent longest, also from who is there."""
    return lambda self, now_s: {
        learner_id: now_s - self.context.membership.members[learner_id].heard_s
        for learner_id in self.context.state.leases
        if learner_id in self.context.membership.members
    }


def same_numbers(right: Any) -> Any:
    def apply(self: SyncerState, record: TapeRecord) -> None:
        right(self, replace(record, next_round=0) if isinstance(record, SyncerStarted) else record)

    return apply


def hears_the_dead(right: Any) -> Any:
    def said(self: SessionDesk, session: Any, message: Any, now_s: float) -> None:
        closing = self.context.closing
        hidden = {session} & closing
        closing -= hidden
        right(self, session, message, now_s)
        closing |= hidden

    return said


def forgets_closed(right: Any) -> Any:
    def restart(self: RoundConductor, now_s: float) -> None:
        closed, self.context.state.closed = self.context.state.closed, {}
        right(self, now_s)
        self.context.state.closed = closed

    return restart


def drops_the_dead(right: Any) -> Any:
    """What a life had journalled dies with it."""

    def apply(self: SyncerState, record: TapeRecord) -> None:
        if isinstance(record, LearnerAdmitted):
            for pool in self.pool:
                for key in [key for key in pool if key.learner_id == record.learner_id]:
                    self.ledger.settled(pool.pop(key).header, DiscardReason.CRASHED)
        right(self, record)

    return apply


def keeps_sessions(right: Any) -> Any:
    def note(self: SyncerMachine, event: SyncerEvent, now_s: float) -> None:
        kept = set(self.context.closing)
        right(self, event, now_s)
        if isinstance(event, LearnerDisconnected):
            self.context.closing |= kept | {event.session}

    return note


def not_durable(right: Any) -> Any:
    def record(self: SyncerContext, record: TapeRecord, *, durable: bool) -> None:
        right(self, record, durable=durable and not isinstance(record, RoundClosed))

    return record


def forgets_units(right: Any) -> Any:
    def send(self: SyncerContext, session: Any, message: Any) -> None:
        right(self, session, replace(message, next_unit=0) if isinstance(message, Welcome) else message)

    return send


def loses_work(right: Any) -> Any:
    """What an install overwrites is nowhere in the account."""
    return lambda self, fragment_id, reason, amount: (
        None if reason is DiscardReason.OVERLAP else right(self, fragment_id, reason, amount)
    )


def reverses(right: Any) -> Any:
    def candidates(*args: Any) -> Candidates:
        found: Candidates = right(*args)
        return replace(found, entries=found.entries[::-1])

    return candidates


def anonymous(right: Any) -> Any:
    """Nobody remembers who asked for a life."""

    def apply(self: SyncerState, record: TapeRecord) -> None:
        right(self, replace(record, life_id="") if isinstance(record, LearnerAdmitted) else record)

    return apply


def any_number(right: Any) -> Any:
    return lambda known, _: right(known, 99)


def impatient(right: Any) -> Any:
    """A new life takes steps at once."""

    def welcomed(self: RejoinDesk, welcome: Welcome, now_s: float) -> None:
        right(self, welcome, now_s)
        self.settled = True

    return welcomed


def pins_again(right: Any) -> Any:
    """A donor takes its newest moments instead of those that it told of."""

    def serve(self: DonorPart, donate: Donate) -> None:
        right(self, donate)
        self.context.effects.append(PinState(number=self._numbers))

    return serve


def under_its_number(right: Any) -> Any:
    """A life that nobody knows of any more goes on as what it was."""

    def begin(self: SessionDesk, hello: Hello, standing: Incarnation, now_s: float) -> Refused | None:
        before = max(0, hello.incarnation - 1)
        refused: Refused | None = right(self, replace(hello, incarnation=Incarnation(before)), standing, now_s)
        return refused

    return begin


def merges_the_rest(right: Any) -> Any:
    """A round whose contributions are lost is published with whoever is left."""

    def unreadable(self: RoundConductor, event: ContributionsUnreadable, now_s: float) -> None:
        settings = self.context.settings
        self.context.settings = replace(settings, policy=replace(settings.policy, quorum=1))
        right(self, event, now_s)
        self.context.settings = settings

    return unreadable


def record_lags(right: Any) -> Any:
    """The merge begins before its close record."""

    def take(self: SyncerContext) -> list[Any]:
        effects = right(self)
        closes = [one for one in effects if isinstance(one, Record) and isinstance(one.record, RoundClosed)]
        return [*(one for one in effects if one not in closes), *closes]

    return take
