"""Faults planted in the real machines, each a mistake that somebody could make, and that must be found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from wan_diloco.protocol import quorum, rounds, syncer_donors, syncer_rounds, syncer_sessions
from wan_diloco.protocol.admission import Standing, Terms
from wan_diloco.protocol.downlink import Downlink
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
from wan_diloco.protocol.syncer_leases import LeaseDesk
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.syncer_rounds import RoundConductor
from wan_diloco.protocol.syncer_sessions import SessionDesk
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import LearnerAdmitted, LeaseEnded, RoundClosed, SyncerStarted, TapeRecord
from wan_diloco.units import FragmentId, Incarnation, LocalStep

__all__ = ["MUTANTS", "Mutant", "planted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted fault.

    Attributes:
        patches: (owner, name, what makes the wrong thing of the right one).
        seed: The first world that finds it out.
        says: What the checker that does says, or a part of it.
    """

    name: str
    patches: tuple[tuple[Any, str, Callable[[Any], Any]], ...]
    seed: int
    says: str


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The machines have the fault while this lasts."""
    with ExitStack() as stack:
        for owner, name, make in mutant.patches:
            right = owner.__dict__[name]
            setattr(owner, name, make(right))
            stack.callback(setattr, owner, name, right)
        yield


def _never(_right: Any) -> Any:
    return lambda *_args, **_kwargs: False


def _always(_right: Any) -> Any:
    return lambda *_args, **_kwargs: True


def _nothing(_right: Any) -> Any:
    return lambda *_args, **_kwargs: None


def _tolerant(right: Any) -> Any:
    """The ledger's own alarm is off, so that the checkers must ring."""

    def journalled(self: Ledger, header: ContributionHeader) -> None:
        interval = self._find(header.key)
        if interval is not None and interval.settled == interval.lo:
            right(self, header)

    return journalled


def _unalarmed(right: Any) -> Any:
    def settled(*args: Any) -> None:
        with suppress(AssertionError):
            right(*args)

    return settled


def _unfenced(right: Any) -> Any:
    def examine(terms: Terms, hello: Hello, standing: Standing) -> Refused | None:
        as_said = replace(standing, incarnation=hello.incarnation or standing.incarnation, life_id="")
        refused: Refused | None = right(terms, hello, as_said)
        return refused

    return examine


def _acknowledged_first(right: Any) -> Any:
    def stored(self: ContributionDesk, event: Any, now_s: float) -> None:
        right(self, event, now_s)
        effects = self.context.effects
        words = [one for one in effects if isinstance(one, SendToLearner) and isinstance(one.message, Acknowledged)]
        effects[:] = [*words, *(one for one in effects if one not in words)]

    return stored


def _ageless(_right: Any) -> Any:
    """Every base counts as the current one."""

    def candidates(round_: OpenRound, pool: Any, version: Any, reachable: Any) -> Candidates:
        young = [replace(item, header=replace(item.header, base=version)) for item in pool]
        found = rounds.candidates(round_, young, version, reachable)
        headers = {item.header.key: item.header for item in pool}
        entries = tuple(replace(entry, header=headers[entry.header.key]) for entry in found.entries)
        return replace(found, entries=entries)

    return candidates


def _held_counts(_right: Any) -> Any:
    """Whatever lies there counts towards the quorum."""

    def candidates(round_: OpenRound, pool: Any, version: Any, reachable: Any) -> Candidates:
        found = rounds.candidates(round_, pool, version, reachable)
        return replace(found, fresh=frozenset(entry.header.key.learner_id for entry in found.entries))

    return candidates


def _unfitting(_right: Any) -> Any:
    def arrived(self: LearnerMachine, header: UpdateHeader) -> None:
        slot = self.context.slots[header.fragment_id]
        version, resync = slot.newest
        if slot.applying is None and (header.resync > resync or header.to_version > version):
            slot.applying = header
            self.context.effects.append(ApplyUpdate(header=header))
        elif slot.applying is None:
            self._acknowledge_update(header.fragment_id)

    return arrived


def _not_leading(_right: Any) -> Any:
    """A chain begins wherever what is stored begins."""
    return lambda self, has, fragment_id, state: [
        update for update in state.updates[fragment_id] if update.to_version > has
    ][-1:]


def _again(right: Any) -> Any:
    """After a reconnect what is held is installed once more, to be sure."""

    def welcome(self: LearnerMachine, message: Welcome, now_s: float) -> None:
        right(self, message, now_s)
        for index, slot in enumerate(self.context.slots):
            version, resync = slot.newest
            install = InstallUpdate(fragment_id=FragmentId(index), version=version, resync=resync, merged_hi=None)
            self.context.effects.append(install)

    return welcome


def _empty(right: Any) -> Any:
    """A round that found nobody closes all the same, and momentum moves."""

    def decide(self: RoundConductor, round_: OpenRound, now_s: float) -> None:
        found = self._candidates(round_)
        if not found.entries and now_s >= round_.gives_up_s:
            round_.quorate_s = now_s
            self._close(round_, found, now_s)
        else:
            right(self, round_, now_s)

    return decide


def _lease_kills(right: Any) -> Any:
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


def _timer_takes_data(right: Any) -> Any:
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


def _nobody_is_live(_right: Any) -> Any:
    """Data are taken from whoever was silent longest, also from who is there."""
    return lambda self, now_s: {
        learner_id: now_s - self.context.membership.members[learner_id].heard_s
        for learner_id in self.context.state.leases
        if learner_id in self.context.membership.members
    }


def _same_numbers(right: Any) -> Any:
    def apply(self: SyncerState, record: TapeRecord) -> None:
        right(self, replace(record, next_round=0) if isinstance(record, SyncerStarted) else record)

    return apply


def _hears_the_dead(right: Any) -> Any:
    def said(self: SessionDesk, session: Any, message: Any, now_s: float) -> None:
        closing = self.context.closing
        hidden = {session} & closing
        closing -= hidden
        right(self, session, message, now_s)
        closing |= hidden

    return said


def _forgets_closed(right: Any) -> Any:
    def restart(self: RoundConductor, now_s: float) -> None:
        closed, self.context.state.closed = self.context.state.closed, {}
        right(self, now_s)
        self.context.state.closed = closed

    return restart


def _drops_the_dead(right: Any) -> Any:
    """What a life had journalled dies with it."""

    def apply(self: SyncerState, record: TapeRecord) -> None:
        if isinstance(record, LearnerAdmitted):
            for pool in self.pool:
                for key in [key for key in pool if key.learner_id == record.learner_id]:
                    self.ledger.settled(pool.pop(key).header, DiscardReason.CRASHED)
        right(self, record)

    return apply


def _keeps_sessions(right: Any) -> Any:
    def note(self: SyncerMachine, event: SyncerEvent, now_s: float) -> None:
        kept = set(self.context.closing)
        right(self, event, now_s)
        if isinstance(event, LearnerDisconnected):
            self.context.closing |= kept | {event.session}

    return note


def _not_durable(right: Any) -> Any:
    def record(self: SyncerContext, record: TapeRecord, *, durable: bool) -> None:
        right(self, record, durable=durable and not isinstance(record, RoundClosed))

    return record


def _forgets_units(right: Any) -> Any:
    def send(self: SyncerContext, session: Any, message: Any) -> None:
        right(self, session, replace(message, next_unit=0) if isinstance(message, Welcome) else message)

    return send


def _loses_work(right: Any) -> Any:
    """What an install overwrites is nowhere in the account."""
    return lambda self, fragment_id, reason, amount: (
        None if reason is DiscardReason.OVERLAP else right(self, fragment_id, reason, amount)
    )


def _reverses(right: Any) -> Any:
    def candidates(*args: Any) -> Candidates:
        found: Candidates = right(*args)
        return replace(found, entries=found.entries[::-1])

    return candidates


def _anonymous(right: Any) -> Any:
    """Nobody remembers who asked for a life."""

    def apply(self: SyncerState, record: TapeRecord) -> None:
        right(self, replace(record, life_id="") if isinstance(record, LearnerAdmitted) else record)

    return apply


def _any_number(right: Any) -> Any:
    return lambda known, _: right(known, 99)


def _impatient(right: Any) -> Any:
    """A new life takes steps at once."""

    def welcomed(self: RejoinDesk, welcome: Welcome, now_s: float) -> None:
        right(self, welcome, now_s)
        self.settled = True

    return welcomed


def _pins_again(right: Any) -> Any:
    """A donor takes its newest moments instead of those that it told of."""

    def serve(self: DonorPart, donate: Donate) -> None:
        right(self, donate)
        self.context.effects.append(PinState(number=self._numbers))

    return serve


def _under_its_number(right: Any) -> Any:
    """A life that nobody knows of any more goes on as what it was."""

    def begin(self: SessionDesk, hello: Hello, standing: Incarnation, now_s: float) -> Refused | None:
        before = max(0, hello.incarnation - 1)
        refused: Refused | None = right(self, replace(hello, incarnation=Incarnation(before)), standing, now_s)
        return refused

    return begin


def _merges_the_rest(right: Any) -> Any:
    """A round whose contributions are lost is published with whoever is left."""

    def unreadable(self: RoundConductor, event: ContributionsUnreadable, now_s: float) -> None:
        settings = self.context.settings
        self.context.settings = replace(settings, policy=replace(settings.policy, quorum=1))
        right(self, event, now_s)
        self.context.settings = settings

    return unreadable


def _record_lags(right: Any) -> Any:
    """The merge begins before its close record."""

    def take(self: SyncerContext) -> list[Any]:
        effects = right(self)
        closes = [one for one in effects if isinstance(one, Record) and isinstance(one.record, RoundClosed)]
        return [*(one for one in effects if one not in closes), *closes]

    return take


MUTANTS = (
    Mutant(
        name="the dedupe is dropped",
        patches=(
            (Ledger, "is_repeated", _never),
            (Ledger, "accepts", _always),
            (Ledger, "journalled", _tolerant),
            (Ledger, "named", _unalarmed),
            (Ledger, "settled", _unalarmed),
        ),
        seed=12,
        says="the ledger of fragment",
    ),
    Mutant(
        name="the fence is forgotten",
        patches=((syncer_sessions, "examine", _unfenced),),
        seed=8,
        says="is welcomed, 2 stands",
    ),
    Mutant(
        name="acknowledged before the journal has it",
        patches=((ContributionDesk, "stored", _acknowledged_first),),
        seed=0,
        says="is acknowledged up to",
    ),
    Mutant(
        name="an old base counts as new",
        patches=((syncer_rounds, "candidates", _ageless),),
        seed=2,
        says="is merged 1 versions behind",
    ),
    Mutant(
        name="a difference is added to another base",
        patches=((LearnerMachine, "_arrived", _unfitting), (Downlink, "_chain", _not_leading)),
        seed=1,
        says="adds a difference from",
    ),
    Mutant(
        name="grace is always zero",
        patches=((quorum, "_grace_s", lambda _: lambda *_: 0.0),),
        seed=1,
        says="attempt 1 of round",
    ),
    Mutant(
        name="a round closes empty", patches=((RoundConductor, "_decide", _empty),), seed=0, says="closed with 0 of"
    ),
    Mutant(name="a lease ends a life", patches=((SyncerMachine, "_settle", _lease_kills),), seed=0, says="did not end"),
    Mutant(
        name="replaced after its close record",
        patches=((Ledger, "named", _nothing),),
        seed=30,
        says="journalled and merged already",
    ),
    Mutant(
        name="counters are reset by a repeated install",
        patches=((LearnerMachine, "_welcome", _again),),
        seed=0,
        says="again",
    ),
    Mutant(
        name="held contributions count towards K",
        patches=((syncer_rounds, "candidates", _held_counts),),
        seed=0,
        says="closed with",
    ),
    Mutant(
        name="a round's number is used twice",
        patches=((SyncerState, "apply", _same_numbers),),
        seed=2,
        says="there are two rounds",
    ),
    Mutant(
        name="a session is heard after its end",
        patches=((SessionDesk, "said", _hears_the_dead),),
        seed=23,
        says="is welcomed after its end",
    ),
    Mutant(
        name="a restart forgets closed rounds",
        patches=((RoundConductor, "restart", _forgets_closed),),
        seed=10,
        says="no round closed for",
    ),
    Mutant(
        name="nobody is asked again",
        patches=((OpenRound, "gives_up_s", lambda _: property(lambda _self: float("inf"))),),
        seed=0,
        says="no round closed for",
    ),
    Mutant(
        name="a broken update isn't sent again",
        patches=((Downlink, "broken", _nothing),),
        seed=83,
        says="no round closed for",
    ),
    Mutant(
        name="work dies with its sender",
        patches=((SyncerState, "apply", _drops_the_dead),),
        seed=7,
        says="contributions wait to be merged",
    ),
    Mutant(
        name="ended sessions are kept for ever",
        patches=((SyncerMachine, "_note", _keeps_sessions),),
        seed=3,
        says="sessions that are ending",
    ),
    Mutant(
        name="a close record isn't durable",
        patches=((SyncerContext, "record", _not_durable),),
        seed=0,
        says="without a close record",
    ),
    Mutant(
        name="a merge overtakes its close record",
        patches=((SyncerContext, "take", _record_lags),),
        seed=0,
        says="without a close record",
    ),
    Mutant(
        name="committed data are issued again",
        patches=((SyncerContext, "send", _forgets_units),),
        seed=0,
        says="is told unit",
    ),
    Mutant(
        name="a data lease is ended by a timer",
        patches=((SyncerMachine, "_settle", _timer_takes_data),),
        seed=5,
        says="ends, and nobody needs its data",
    ),
    Mutant(
        name="data are taken from who is there",
        patches=((LeaseDesk, "_silent_s", _nobody_is_live),),
        seed=5,
        says="ends, and it is live",
    ),
    Mutant(
        name="overwritten work isn't accounted for",
        patches=((Ledger, "_discard", _loses_work),),
        seed=0,
        says="the ledger of fragment",
    ),
    Mutant(
        name="who asks twice begins two lives",
        patches=((SyncerState, "apply", _anonymous),),
        seed=9,
        says="asked twice, and gets another",
    ),
    Mutant(
        name="a newborn gives its moments",
        patches=((syncer_donors, "is_proven", _always),),
        seed=3,
        says="is asked to give, and had nothing merged",
    ),
    Mutant(
        name="a donor is asked by everybody",
        patches=((syncer_donors, "choose_donor", _any_number),),
        seed=7,
        says="at once",
    ),
    Mutant(
        name="a donor gives other moments than it said",
        patches=((DonorPart, "_serve", _pins_again),),
        seed=1,
        says="gives other moments",
    ),
    Mutant(
        name="steps are taken before moments are there",
        patches=((RejoinDesk, "welcomed", _impatient),),
        seed=1,
        says="before it has its moments",
    ),
    Mutant(
        name="a forgotten life keeps its number",
        patches=((SessionDesk, "_begin_life", _under_its_number),),
        seed=4,
        says="was given before",
    ),
    Mutant(
        name="a round that lost contributions merges any rest",
        patches=((RoundConductor, "unreadable", _merges_the_rest),),
        seed=8,
        says="is published with",
    ),
    Mutant(
        name="merges are summed in another order",
        patches=((syncer_rounds, "candidates", _reverses),),
        seed=0,
        says="is merged out of order",
    ),
)
