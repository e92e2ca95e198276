"""The ledger against a dumb model that writes down the fate of every single step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.protocol import contribution
from wan_diloco.protocol.ledger import Amount, DiscardReason, Ledger
from wan_diloco.protocol.messages import ContributionHeader
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.units import FragmentId, Incarnation, LearnerId

LEARNERS = [LearnerId("east"), LearnerId("west")]
FRAGMENTS = [FragmentId(0), FragmentId(1)]
TOKENS = 100
MERGED = "merged"


def amount(steps: int) -> Amount:
    return Amount(steps, steps * TOKENS)


@dataclass
class Piece:
    """The work after an install; `journalled` is a step, `end` the next install's or None, `remainder` a fate."""

    lo: int
    end: int | None = None
    journalled: int | None = None
    named: bool = False
    settled: int | None = None
    remainder: str = DiscardReason.LATE


@dataclass
class DumbLife:
    position: int
    start: int
    open: bool = True
    pieces: list[list[Piece]] = field(default_factory=list)
    fates: list[dict[int, str]] = field(default_factory=list)
    """For each fragment: step -> its fate, when it has one."""


class LedgerAgainstModel(RuleBasedStateMachine):
    """Whatever is told in whatever order, both accounts agree to the step."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(len(FRAGMENTS))
        self.lives: dict[tuple[LearnerId, int], DumbLife] = {}
        self.latest: Counter[LearnerId] = Counter()

    # ---- what happens ----------------------------------------------------------------------------

    @rule(learner=st.sampled_from(LEARNERS), position=st.integers(0, 5))
    def admit(self, learner: LearnerId, position: int) -> None:
        self._close(learner, DiscardReason.CRASHED)
        self.latest[learner] += 1
        number = self.latest[learner]
        self.ledger.admit(learner, Incarnation(number), amount(position))
        self.lives[learner, number] = DumbLife(
            position, position, True, [[Piece(position)] for _ in FRAGMENTS], [{} for _ in FRAGMENTS]
        )

    @rule(learner=st.sampled_from(LEARNERS), more=st.integers(-2, 4))
    def observe(self, learner: LearnerId, more: int) -> None:
        life, number = self._standing(learner)
        if life is not None:
            self.ledger.observe(learner, number, amount(max(0, life.position + more)))
            life.position = max(life.position, life.position + more)

    @rule(learner=st.sampled_from(LEARNERS), fragment=st.sampled_from(FRAGMENTS), more=st.integers(-3, 2))
    def install(self, learner: LearnerId, fragment: FragmentId, more: int) -> None:
        life, number = self._standing(learner)
        if life is not None:
            lo = max(0, life.position + more)
            self.ledger.installed(learner, number, fragment, amount(lo))
            self._install(life, fragment, lo)

    @rule(
        learner=st.sampled_from(LEARNERS),
        fragment=st.sampled_from(FRAGMENTS),
        which=st.integers(0, 3),
        length=st.integers(1, 4),
        lies=st.integers(0, 5),
    )
    def contribute(self, learner: LearnerId, fragment: FragmentId, which: int, length: int, lies: int) -> None:
        life, number = self._standing(learner)
        if life is None:
            return
        starts = [*[piece.lo for piece in life.pieces[fragment]], life.position + 1, life.position]
        lo = starts[which % len(starts)]
        honest = lies > 0
        header = contribution(
            learner,
            lo,
            lo + length,
            incarnation=number,
            fragment_id=fragment,
            tokens_lo=lo * TOKENS if honest else lo * TOKENS + 1,
            tokens_hi=(lo + length) * TOKENS if honest else (lo + length) * TOKENS + 1,
        )
        piece = next((piece for piece in life.pieces[fragment] if piece.lo == lo), None)
        if piece is not None and piece.journalled is not None:
            assert self.ledger.is_repeated(header) == (header.step_hi <= piece.journalled)
        running = life.pieces[fragment][-1]
        unheard = lo > running.lo and lo >= max(running.journalled or 0, running.settled or 0)
        expected = unheard or (
            piece is not None
            and honest
            and not piece.named
            and piece.settled is None
            and (piece.end is None or lo + length <= piece.end)
        )
        assert self.ledger.accepts(header) == expected
        if not expected or not honest or self.ledger.is_repeated(header):
            return
        self.ledger.journalled(header)
        self._install(life, fragment, lo)
        life.position = max(life.position, lo + length)
        piece = next(piece for piece in life.pieces[fragment] if piece.lo == lo)
        piece.journalled = lo + length
        if piece.end is not None:
            self._fate(life, fragment, lo + length, piece.end, DiscardReason.OVERLAP)
            piece.end = lo + length

    @rule(pick=st.integers(0, 20), named=st.booleans(), merged=st.booleans())
    def settle(self, pick: int, named: bool, merged: bool) -> None:
        if not (waiting := self._waiting()):
            return
        learner, number, life, fragment, piece = waiting[pick % len(waiting)]
        assert piece.journalled is not None
        header = self._header(learner, number, fragment, piece)
        assert self.ledger.is_repeated(header)
        self.ledger.named(header)
        piece.named = True
        if named:
            return
        self.ledger.settled(header, None if merged else DiscardReason.STALE_BASE)
        self._fate(life, fragment, piece.lo, piece.journalled, MERGED if merged else DiscardReason.STALE_BASE)
        if piece.end is not None:
            life.pieces[fragment].remove(piece)
        piece.settled, piece.named, piece.journalled = piece.journalled, False, None

    @rule(pick=st.integers(0, 20))
    def rot(self, pick: int) -> None:
        if not (waiting := self._waiting()):
            return
        learner, number, life, fragment, piece = waiting[pick % len(waiting)]
        assert piece.journalled is not None
        self.ledger.unreadable(self._header(learner, number, fragment, piece))
        if piece.end is None:
            # What comes later contains all of it.
            piece.named, piece.journalled, piece.remainder = False, None, DiscardReason.UNREADABLE
        else:
            self._fate(life, fragment, piece.lo, piece.journalled, DiscardReason.UNREADABLE)
            life.pieces[fragment].remove(piece)

    @rule(learner=st.sampled_from(LEARNERS), fragment=st.sampled_from(FRAGMENTS), which=st.integers(0, 3))
    def refuse(self, learner: LearnerId, fragment: FragmentId, which: int) -> None:
        life, number = self._standing(learner)
        if life is not None:
            piece = life.pieces[fragment][which % len(life.pieces[fragment])]
            self.ledger.refused(contribution(learner, piece.lo, piece.lo, incarnation=number, fragment_id=fragment).key)
            if piece.journalled is None and piece.settled is None:
                piece.remainder = DiscardReason.REFUSED

    @rule()
    def lose(self) -> None:
        for learner, number, life, fragment, piece in self._waiting():
            self.ledger.settled(self._header(learner, number, fragment, piece), DiscardReason.SYNCER_LOST)
            assert piece.journalled is not None
            self._fate(life, fragment, piece.lo, piece.journalled, DiscardReason.SYNCER_LOST)
            piece.settled, piece.journalled = piece.journalled, None
        self.ledger.lose(DiscardReason.SYNCER_LOST)
        for life in self.lives.values():
            for fragment in FRAGMENTS:
                for piece in life.pieces[fragment]:
                    piece.end = life.position if piece.end is None else piece.end
                    self._rest(life, fragment, piece, DiscardReason.SYNCER_LOST)
                # Nobody can tell where the next install will be; until then it is all lost.
                life.pieces[fragment] = [Piece(life.position, remainder=DiscardReason.SYNCER_LOST)] if life.open else []

    @rule(learner=st.sampled_from(LEARNERS))
    def end(self, learner: LearnerId) -> None:
        self.ledger.close(learner, DiscardReason.RUN_ENDED)
        self._close(learner, DiscardReason.RUN_ENDED)

    @rule()
    def restart(self) -> None:
        state = SyncerState(parameters=(1, 1), initial_digests=("a", "b"), keep_updates=1)
        state.ledger = self.ledger
        self.ledger = state_from_json(state_to_json(state)).ledger

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    def every_step_has_one_fate_and_both_agree_on_it(self) -> None:
        trained = sum(life.position - life.start for life in self.lives.values())
        assert self.ledger.trained == amount(trained)
        for fragment in FRAGMENTS:
            assert self.ledger.balance(fragment) == Amount(0, 0)
            fates = Counter(fate for life in self.lives.values() for fate in life.fates[fragment].values())
            assert self.ledger.merged[fragment] == amount(fates.pop(MERGED, 0))
            known: dict[Any, Amount] = dict(self.ledger.discarded[fragment])
            assert known == {fate: amount(steps) for fate, steps in fates.items()}
        totals = self.ledger.totals((1, 3))
        assert totals.balance == 0
        assert totals.trained_tokens == trained * TOKENS

    # ---- the model -------------------------------------------------------------------------------

    def _waiting(self) -> list[tuple[LearnerId, int, DumbLife, FragmentId, Piece]]:
        return [
            (learner, number, life, fragment, piece)
            for (learner, number), life in self.lives.items()
            for fragment in FRAGMENTS
            for piece in life.pieces[fragment]
            if piece.journalled is not None
        ]

    def _standing(self, learner: LearnerId) -> tuple[DumbLife | None, Incarnation]:
        life = self.lives.get((learner, self.latest[learner]))
        return (life if life is not None and life.open else None), Incarnation(self.latest[learner])

    def _header(self, learner: LearnerId, number: int, fragment: FragmentId, piece: Piece) -> ContributionHeader:
        assert piece.journalled is not None
        return contribution(learner, piece.lo, piece.journalled, incarnation=number, fragment_id=fragment)

    @staticmethod
    def _fate(life: DumbLife, fragment: FragmentId, lo: int, hi: int, fate: str) -> None:
        for step in range(lo + 1, hi + 1):
            assert step not in life.fates[fragment], "a step has one fate"
            life.fates[fragment][step] = fate

    def _rest(self, life: DumbLife, fragment: FragmentId, piece: Piece, fate: str) -> None:
        """The steps of a piece that are neither journalled nor have a fate get this one."""
        assert piece.end is not None
        for step in range(piece.lo + 1, piece.end + 1):
            if step > (piece.journalled or 0) and step not in life.fates[fragment]:
                life.fates[fragment][step] = fate

    def _install(self, life: DumbLife, fragment: FragmentId, lo: int) -> None:
        pieces = life.pieces[fragment]
        running = pieces[-1]
        if lo <= running.lo or lo < max(running.journalled or 0, running.settled or 0):
            return
        life.position = max(life.position, lo)
        for piece in pieces[:-1]:
            if piece.journalled is None:
                self._rest(life, fragment, piece, piece.remainder)
        running.end = lo
        if running.journalled is not None or running.settled is not None:
            self._rest(life, fragment, running, DiscardReason.OVERLAP)
            running.end = running.journalled
        life.pieces[fragment] = [
            piece for piece in pieces if piece.journalled is not None or (piece is running and running.settled is None)
        ] + [Piece(lo)]

    def _close(self, learner: LearnerId, reason: str) -> None:
        life, _ = self._standing(learner)
        if life is None:
            return
        life.open = False
        for fragment in FRAGMENTS:
            for piece in life.pieces[fragment]:
                piece.end = life.position if piece.end is None else piece.end
                self._rest(life, fragment, piece, reason)
                piece.end = piece.journalled
            life.pieces[fragment] = [piece for piece in life.pieces[fragment] if piece.journalled is not None]


LedgerAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerAgainstModel.TestCase
