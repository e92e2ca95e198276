"""Faults planted in the real machines, each a mistake that somebody could make, and that must be found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulation.mutants import mistakes
from wan_diloco.protocol import quorum, syncer_donors, syncer_rounds, syncer_sessions
from wan_diloco.protocol.downlink import Downlink
from wan_diloco.protocol.learner_donor import DonorPart
from wan_diloco.protocol.learner_machine import LearnerMachine
from wan_diloco.protocol.learner_rejoin import RejoinDesk
from wan_diloco.protocol.ledger import Ledger
from wan_diloco.protocol.rounds import OpenRound
from wan_diloco.protocol.syncer_context import SyncerContext
from wan_diloco.protocol.syncer_contributions import ContributionDesk
from wan_diloco.protocol.syncer_leases import LeaseDesk
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.syncer_rounds import RoundConductor
from wan_diloco.protocol.syncer_sessions import SessionDesk
from wan_diloco.protocol.syncer_state import SyncerState

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


MUTANTS = (
    Mutant(
        name="the dedupe is dropped",
        patches=(
            (Ledger, "is_repeated", mistakes.never),
            (Ledger, "accepts", mistakes.always),
            (Ledger, "journalled", mistakes.tolerant),
            (Ledger, "named", mistakes.unalarmed),
            (Ledger, "settled", mistakes.unalarmed),
        ),
        seed=12,
        says="the ledger of fragment",
    ),
    Mutant(
        name="the fence is forgotten",
        patches=((syncer_sessions, "examine", mistakes.unfenced),),
        seed=8,
        says="is welcomed, 2 stands",
    ),
    Mutant(
        name="acknowledged before the journal has it",
        patches=((ContributionDesk, "stored", mistakes.acknowledged_first),),
        seed=0,
        says="is acknowledged up to",
    ),
    Mutant(
        name="an old base counts as new",
        patches=((syncer_rounds, "candidates", mistakes.ageless),),
        seed=2,
        says="is merged 1 versions behind",
    ),
    Mutant(
        name="a difference is added to another base",
        patches=((LearnerMachine, "_arrived", mistakes.unfitting), (Downlink, "_chain", mistakes.not_leading)),
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
        name="a round closes empty",
        patches=((RoundConductor, "_decide", mistakes.empty),),
        seed=0,
        says="closed with 0 of",
    ),
    Mutant(
        name="a lease ends a life",
        patches=((SyncerMachine, "_settle", mistakes.lease_kills),),
        seed=0,
        says="did not end",
    ),
    Mutant(
        name="replaced after its close record",
        patches=((Ledger, "named", mistakes.nothing),),
        seed=30,
        says="journalled and merged already",
    ),
    Mutant(
        name="counters are reset by a repeated install",
        patches=((LearnerMachine, "_welcome", mistakes.again),),
        seed=0,
        says="again",
    ),
    Mutant(
        name="held contributions count towards K",
        patches=((syncer_rounds, "candidates", mistakes.held_counts),),
        seed=0,
        says="closed with",
    ),
    Mutant(
        name="a round's number is used twice",
        patches=((SyncerState, "apply", mistakes.same_numbers),),
        seed=2,
        says="there are two rounds",
    ),
    Mutant(
        name="a session is heard after its end",
        patches=((SessionDesk, "said", mistakes.hears_the_dead),),
        seed=23,
        says="is welcomed after its end",
    ),
    Mutant(
        name="a restart forgets closed rounds",
        patches=((RoundConductor, "restart", mistakes.forgets_closed),),
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
        patches=((Downlink, "broken", mistakes.nothing),),
        seed=83,
        says="no round closed for",
    ),
    Mutant(
        name="work dies with its sender",
        patches=((SyncerState, "apply", mistakes.drops_the_dead),),
        seed=7,
        says="contributions wait to be merged",
    ),
    Mutant(
        name="ended sessions are kept for ever",
        patches=((SyncerMachine, "_note", mistakes.keeps_sessions),),
        seed=3,
        says="sessions that are ending",
    ),
    Mutant(
        name="a close record isn't durable",
        patches=((SyncerContext, "record", mistakes.not_durable),),
        seed=0,
        says="without a close record",
    ),
    Mutant(
        name="a merge overtakes its close record",
        patches=((SyncerContext, "take", mistakes.record_lags),),
        seed=0,
        says="without a close record",
    ),
    Mutant(
        name="committed data are issued again",
        patches=((SyncerContext, "send", mistakes.forgets_units),),
        seed=0,
        says="is told unit",
    ),
    Mutant(
        name="a data lease is ended by a timer",
        patches=((SyncerMachine, "_settle", mistakes.timer_takes_data),),
        seed=5,
        says="ends, and nobody needs its data",
    ),
    Mutant(
        name="data are taken from who is there",
        patches=((LeaseDesk, "_silent_s", mistakes.nobody_is_live),),
        seed=5,
        says="ends, and it is live",
    ),
    Mutant(
        name="overwritten work isn't accounted for",
        patches=((Ledger, "_discard", mistakes.loses_work),),
        seed=0,
        says="the ledger of fragment",
    ),
    Mutant(
        name="who asks twice begins two lives",
        patches=((SyncerState, "apply", mistakes.anonymous),),
        seed=9,
        says="asked twice, and gets another",
    ),
    Mutant(
        name="a newborn gives its moments",
        patches=((syncer_donors, "is_proven", mistakes.always),),
        seed=3,
        says="is asked to give, and had nothing merged",
    ),
    Mutant(
        name="a donor is asked by everybody",
        patches=((syncer_donors, "choose_donor", mistakes.any_number),),
        seed=7,
        says="at once",
    ),
    Mutant(
        name="a donor gives other moments than it said",
        patches=((DonorPart, "_serve", mistakes.pins_again),),
        seed=1,
        says="gives other moments",
    ),
    Mutant(
        name="steps are taken before moments are there",
        patches=((RejoinDesk, "welcomed", mistakes.impatient),),
        seed=1,
        says="before it has its moments",
    ),
    Mutant(
        name="a forgotten life keeps its number",
        patches=((SessionDesk, "_begin_life", mistakes.under_its_number),),
        seed=4,
        says="was given before",
    ),
    Mutant(
        name="a round that lost contributions merges any rest",
        patches=((RoundConductor, "unreadable", mistakes.merges_the_rest),),
        seed=8,
        says="is published with",
    ),
    Mutant(
        name="merges are summed in another order",
        patches=((syncer_rounds, "candidates", mistakes.reverses),),
        seed=0,
        says="is merged out of order",
    ),
)
