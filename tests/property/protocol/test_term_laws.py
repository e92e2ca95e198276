"""Syncers of one run that live beside each other: whoever was welcomed in a later term never goes back to an earlier.

Any of them may be taken over from what it has, or from what was saved of another, and live on without knowing it; a
state may be copied and both copies be started, so that two have the same term; some are deaf to what learners have
heard, some are too old to have an id, and some have just begun and know of nobody. Learners come to any of them, in any
order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.desk import Desk, messages
from tests.support.protocol import EAST, WEST, syncer_settings
from tests.support.uplink import Uplink, of, said
from wan_diloco.errors import EXIT_AUTH
from wan_diloco.protocol.events import (
    Connected,
    ConnectionLost,
    ExitLearner,
    LearnerConnected,
    LearnerDisconnected,
    RefuseSyncer,
    SessionId,
    StateMissing,
    TakenOver,
)
from wan_diloco.protocol.messages import Hello, Refused, Welcome
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_machine import SyncerSettings
from wan_diloco.units import Epoch, LearnerId, Term

NAMES = (EAST, WEST)
picks = st.integers(0, 9)


class Terms(RuleBasedStateMachine):
    """Real machines on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.term_max, self.epoch_max, self.sessions, self.processes = 1, 0, 0, 0
        self.syncers = [self._begins(syncer_settings())]
        self.saved: dict[str, Any] = state_to_json(self.syncers[0].machine.state)
        self.learners = {name: self._starts(name) for name in NAMES}
        # The term, and of which process; the second is empty where no syncer of that term has said it.
        self.heard = dict.fromkeys(NAMES, (0, ""))

    @rule(pick=picks)
    def save(self, pick: int) -> None:
        self.saved = state_to_json(self._syncer(pick).machine.state)

    @rule(pick=picks, lives_on=st.booleans(), is_copy=st.booleans())
    def take_over(self, pick: int, *, lives_on: bool, is_copy: bool) -> None:
        before = self._syncer(pick)
        data = self.saved if is_copy else state_to_json(before.machine.state)
        # What the lock of the store has named.
        given = replace(syncer_settings(), term_min=Term(self.term_max + 1))
        if is_copy:
            given = replace(given, epoch_min=Epoch(self.epoch_max + 1))
        after = self._begins(given, data)
        assert after.machine.state.term > self.term_max
        self.term_max = int(after.machine.state.term)
        self.epoch_max = max(self.epoch_max, int(after.machine.state.epoch))
        self.syncers.append(after)
        if not lives_on:
            self.syncers.remove(before)

    @rule(pick=picks, lives_on=st.booleans(), is_old=st.booleans())
    def copy(self, pick: int, *, lives_on: bool, is_old: bool) -> None:
        before = self._syncer(pick)
        data = state_to_json(before.machine.state)
        given = replace(syncer_settings(), term_min=Term(self.term_max + 1))
        one, another = self._begins(given, data, is_old=is_old), self._begins(given, data)
        self.term_max += 1
        assert one.machine.state.term == another.machine.state.term == self.term_max
        self.syncers += [one, another]
        if not lives_on:
            self.syncers.remove(before)

    @rule(name=st.sampled_from(NAMES), pick=picks, is_deaf=st.booleans())
    def come(self, name: LearnerId, pick: int, *, is_deaf: bool) -> None:
        desk, learner, (heard, heard_id) = self._syncer(pick), self.learners[name], self.heard[name]
        self.sessions += 1
        session, term = SessionId(self.sessions), desk.machine.state.term
        term_id = desk.machine.context.settings.term_id
        is_other = heard == term and bool(heard_id) and bool(term_id) and heard_id != term_id
        desk.tell(LearnerConnected(session=session))
        (hello,) = of(Hello, said(learner.tell(Connected())))
        assert isinstance(hello, Hello)
        assert (hello.term, hello.term_id) == (heard, heard_id)
        before = state_to_json(desk.machine.state)
        effects = desk.says(session, replace(hello, term=Term(0), term_id="") if is_deaf else hello)
        is_missing = effects == [StateMissing(learner_id=name, local_step=hello.local_step)]
        if is_missing:
            state = desk.machine.state
            assert hello.incarnation > 0
            assert (state.incarnations.get(name), state.started, state.epoch) == (None, False, 0)
        if is_missing or (heard > term and not is_deaf):
            assert is_missing or effects == [TakenOver(learner_id=name, term=Term(heard))]
            assert state_to_json(desk.machine.state) == before
            self.syncers.remove(desk)
            if not self.syncers:
                self.syncers.append(self._begins(replace(syncer_settings(), term_min=Term(self.term_max + 1))))
                self.term_max += 1
        elif is_other and not is_deaf:
            # Neither is the learner taken in, nor does anybody end.
            assert messages(effects) == []
            assert session in desk.machine.context.closing
            after = state_to_json(desk.machine.state)
            assert {**after, "rejected": ()} == {**before, "rejected": ()}
        elif heard == term and term_id == heard_id and not is_deaf:
            assert any(isinstance(message, Welcome) for message in messages(effects, session)), "its own is never deaf"
        for message in messages(effects, session):
            if isinstance(message, Welcome | Refused):
                answer = learner.hears(message)
                is_refused = isinstance(message, Welcome) and (term < heard or is_other)
                assert bool(of(RefuseSyncer, answer)) == is_refused
                if of(ExitLearner, answer):
                    # Another syncer gave its number to another process; it begins anew, and knows of nothing.
                    assert of(ExitLearner, answer)[0].exit_code == EXIT_AUTH  # type: ignore[attr-defined]
                    self.learners[name] = self._starts(name)
                    self.heard[name] = (0, "")
                    return
                began = desk.machine.state.term_ids.get(hello.term, "")
                if isinstance(message, Welcome) and not is_deaf and hello.incarnation and began and heard_id:
                    # Who was with a copy has its bits, and begins anew; all others go on.
                    assert began == heard_id or message.incarnation > hello.incarnation
                if not is_refused:
                    self.heard[name] = (int(term), term_id or (heard_id if term == heard else ""))
        desk.tell(LearnerDisconnected(session=session, reason="cut"))
        learner.tell(ConnectionLost(reason="cut", refused=False))

    @invariant()
    def terms_never_fall_and_nobody_goes_from_one_to_another_of_the_same(self) -> None:
        for name, learner in self.learners.items():
            assert (learner.machine.term, learner.machine.term_id) == self.heard[name]

    def _begins(self, given: SyncerSettings, data: dict[str, Any] | None = None, *, is_old: bool = False) -> Desk:
        self.processes += 1
        settings_ = given if is_old else replace(given, term_id=f"process {self.processes}")
        return Desk(settings_, None if data is None else state_from_json(data))

    def _syncer(self, pick: int) -> Desk:
        return self.syncers[pick % len(self.syncers)]

    def _starts(self, name: LearnerId) -> Uplink:
        self.sessions += 1
        learner = Uplink()
        context = learner.machine.context
        context.identity = replace(context.identity, learner_id=name, life_id=f"life {self.sessions}")
        learner.machine.start()
        return learner


Terms.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTerms = Terms.TestCase
