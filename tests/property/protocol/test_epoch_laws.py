"""Epochs begin at any moment, also from an older state: no step is merged twice, and every step has a fate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.desk import Desk, messages
from tests.support.protocol import BATCH_TOKENS, EAST, WEST, contribution, hello, syncer_settings
from wan_diloco.protocol.epochs import begin_epoch
from wan_diloco.protocol.events import LearnerConnected, SendUpdate, SessionId, StartMerge, SyncerEffect, TimerFired
from wan_diloco.protocol.ledger import Amount, DiscardReason
from wan_diloco.protocol.messages import FragmentReport, Pull, Report, UpdateHeader, UpdateReceived
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.units import Epoch, FragmentId, LearnerId, LocalStep, Version

FRAGMENTS = (FragmentId(0), FragmentId(1))
NAMES = (EAST, WEST)
Step = tuple[LearnerId, FragmentId, int]


@dataclass
class Held:
    """A fragment at a learner."""

    version: Version = field(default_factory=lambda: Version(Epoch(0), 0))
    resync: int = 0
    step_lo: int = 0


@dataclass
class Honest:
    """A learner that does as it is told."""

    name: LearnerId
    step: int = 0
    session: SessionId = field(default_factory=lambda: SessionId(0))
    held: list[Held] = field(default_factory=lambda: [Held() for _ in FRAGMENTS])
    pulls: dict[FragmentId, Pull] = field(default_factory=dict)
    updates: list[UpdateHeader] = field(default_factory=list)

    def report(self) -> Report:
        return Report(
            local_step=LocalStep(self.step),
            tokens=self.step * BATCH_TOKENS,
            step_time_s=1.0,
            loss=2.0,
            learning_rate=0.1,
            fragments=tuple(
                FragmentReport(
                    fragment_id=fragment,
                    version=held.version,
                    pending=None,
                    resync=held.resync,
                    step_lo=LocalStep(held.step_lo),
                    tokens_lo=held.step_lo * BATCH_TOKENS,
                )
                for fragment, held in zip(FRAGMENTS, self.held, strict=True)
            ),
        )


class Epochs(RuleBasedStateMachine):
    """A real machine, honest learners, and a book of what was merged into the values that stand."""

    def __init__(self) -> None:
        super().__init__()
        self.learners = {name: Honest(name) for name in NAMES}
        self.sessions = 0
        self.merges: list[StartMerge] = []
        self.merged: Counter[Step] = Counter()
        self._begin(Desk(syncer_settings(total_steps=10_000)))
        self.saved: tuple[dict[str, Any], Counter[Step]] = self._save()

    # ---- what happens ----------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), steps=st.integers(0, 4))
    def train(self, name: LearnerId, steps: int) -> None:
        learner = self.learners[name]
        learner.step += steps
        self._took(self.desk.says(learner.session, learner.report()))

    @rule(name=st.sampled_from(NAMES), fragment=st.sampled_from(FRAGMENTS))
    def answer(self, name: LearnerId, fragment: FragmentId) -> None:
        learner = self.learners[name]
        pull, held = learner.pulls.pop(fragment, None), learner.held[fragment]
        if pull is None or learner.step == held.step_lo:
            return
        header = contribution(
            name,
            held.step_lo,
            learner.step,
            fragment_id=fragment,
            base=held.version,
            round_id=pull.round_id,
            attempt=pull.attempt,
        )
        self._took(self.desk.stores(learner.session, header))

    @rule(name=st.sampled_from(NAMES))
    def install(self, name: LearnerId) -> None:
        learner = self.learners[name]
        if not learner.updates:
            return
        header = learner.updates.pop(0)
        held = learner.held[header.fragment_id]
        if header.resync > held.resync or header.to_version > held.version:
            held.version, held.resync = header.to_version, max(held.resync, header.resync)
            held.step_lo = learner.step
        received = UpdateReceived(fragment_id=header.fragment_id, version=held.version, resync=held.resync)
        self._took(self.desk.says(learner.session, received))
        self._took(self.desk.says(learner.session, learner.report()))

    @rule()
    def merge(self) -> None:
        if not self.merges:
            return
        merge = self.merges.pop(0)
        for entry in merge.entries:
            assert entry.header.base.epoch == self.desk.machine.state.epoch
            key = entry.header.key
            for step in range(key.step_lo, entry.header.step_hi):
                self.merged[key.learner_id, merge.fragment_id, step] += 1
        self._took(self.desk.merges(merge.round_id))

    @rule(seconds=st.sampled_from([0.5, 5.0]))
    def wait(self, seconds: float) -> None:
        self._took(self.desk.tell(TimerFired(), seconds))

    @rule()
    def snapshot(self) -> None:
        self.saved = self._save()

    @rule(back=st.booleans(), higher=st.integers(1, 2))
    def restart(self, back: bool, higher: int) -> None:
        epoch = Epoch(self.desk.machine.state.epoch + higher)
        data, merged = self.saved if back else self._save()
        state, self.merged = state_from_json(data), Counter(merged)
        before = state.ledger.trained
        begin_epoch(state, epoch, DiscardReason.SYNCER_LOST)
        assert state.ledger.trained == before
        assert all(state.ledger.outstanding(fragment) == Amount(0, 0) for fragment in FRAGMENTS)
        assert {version.epoch for version in state.versions} == {epoch}
        self._begin(Desk(syncer_settings(total_steps=10_000), state))

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    def nothing_is_merged_twice_and_nothing_is_without_a_fate(self) -> None:
        ledger = self.desk.machine.state.ledger
        assert all(times == 1 for times in self.merged.values())
        for fragment in FRAGMENTS:
            assert ledger.balance(fragment) == Amount(0, 0)
            steps = sum(1 for _, where, _ in self.merged if where == fragment)
            under_way = sum(
                entry.header.steps
                for closed in self.desk.machine.state.closed.values()
                if closed.fragment_id == fragment
                for entry in closed.entries
            )
            assert ledger.merged[fragment].steps in {steps, steps - under_way}
        known = sum(learner.step for learner in self.learners.values())
        assert ledger.trained.steps <= known

    # ---- inside ----------------------------------------------------------------------------------

    def _save(self) -> tuple[dict[str, Any], Counter[Step]]:
        return state_to_json(self.desk.machine.state), Counter(self.merged)

    def _begin(self, desk: Desk) -> None:
        self.desk, self.merges = desk, []
        self._took(desk.effects)
        for learner in self.learners.values():
            self.sessions += 1
            learner.session = SessionId(self.sessions)
            learner.pulls.clear()
            # What was on its way arrives all the same, from a process that is no more.
            self._took(desk.tell(LearnerConnected(session=learner.session)))
            standing = desk.machine.state.incarnations.get(learner.name, 0)
            greeting = hello(learner.name, incarnation=standing, local_step=learner.step)
            self._took(desk.says(learner.session, greeting))
            self._took(desk.says(learner.session, learner.report()))

    def _took(self, effects: list[SyncerEffect]) -> None:
        by_session = {learner.session: learner for learner in self.learners.values()}
        for effect in effects:
            if isinstance(effect, StartMerge):
                self.merges.append(effect)
            elif isinstance(effect, SendUpdate):
                by_session[effect.session].updates.append(effect.header)
        for session, learner in by_session.items():
            for message in messages(effects, session):
                if isinstance(message, Pull):
                    learner.pulls[message.fragment_id] = message


Epochs.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestEpochs = Epochs.TestCase
