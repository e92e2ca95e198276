"""What a new epoch leaves of a state, and what learners of the one before hear."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, answer, messages, only, pulled, records
from tests.support.protocol import EAST, WEST, contribution, hello, syncer_settings, version
from wan_diloco.protocol.epochs import begin_epoch, next_epoch
from wan_diloco.protocol.events import (
    LearnerConnected,
    RefuseUpload,
    SendUpdate,
    SessionId,
    StartMerge,
    SyncerEffect,
    UploadOffered,
)
from wan_diloco.protocol.ledger import Amount, DiscardReason, Ledger
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionRefused,
    FragmentReport,
    Pull,
    RefusalReason,
    Refused,
    Report,
    Welcome,
)
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import LearnerAdmitted, SyncerStarted
from wan_diloco.units import Epoch, FragmentId, Incarnation, LocalStep, Term, Version

LOST = DiscardReason.SYNCER_LOST


def _busy() -> tuple[Desk, Pull]:
    """Fragment 1 is merged once and closed again, and east has contributed to fragment 0, which isn't closed."""
    desk = Desk(syncer_settings(quorum=2))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    desk.stores(W, answer(pull, WEST))
    desk.merges(pull.round_id)
    for session in (E, W):
        desk.says(session, _report(3))
    again = _report(4)
    pulls = [message for session in (E, W) for message in messages(desk.says(session, again), E)]
    other = next(message for message in pulls if isinstance(message, Pull))
    assert other.fragment_id == 0
    desk.stores(E, answer(other, step_hi=4))
    pulls = [message for session in (E, W) for message in messages(desk.says(session, _report(6)), E)]
    second = next(message for message in pulls if isinstance(message, Pull) and message.fragment_id == 1)
    for session, learner in ((E, EAST), (W, WEST)):
        header = contribution(
            learner,
            3,
            6,
            fragment_id=1,
            base=version(1),
            round_id=second.round_id,
            attempt=second.attempt,
        )
        desk.stores(session, header)
    assert list(desk.machine.state.closed) == [1]
    assert len(desk.machine.state.pool[0]) == 1
    return desk, second


def _report(step: int) -> Report:
    """Fragment 0 as it was at the start, version 1 of fragment 1 installed at step 3."""
    return _held(step, (version(0), 0, 0), (version(min(1, step // 3)), 3 * min(1, step // 3), 0))


def _held(step: int, *fragments: tuple[Version, int, int]) -> Report:
    return Report(
        local_step=LocalStep(step),
        tokens=100 * step,
        step_time_s=1.0,
        loss=2.0,
        learning_rate=0.1,
        fragments=tuple(
            FragmentReport(
                fragment_id=FragmentId(index),
                version=held,
                pending=None,
                resync=resync,
                step_lo=LocalStep(step_lo),
                tokens_lo=100 * step_lo,
            )
            for index, (held, step_lo, resync) in enumerate(fragments)
        ),
    )


def _lost(state: SyncerState) -> list[Amount]:
    return [account.get(LOST, Amount(0, 0)) for account in state.ledger.discarded]


def test_counts_stay_and_what_was_under_way_is_lost() -> None:
    desk, _ = _busy()
    state = desk.machine.state
    merged, trained = list(state.ledger.merged), state.ledger.trained
    begin_epoch(state, Epoch(1), LOST)
    assert state.epoch == 1
    assert state.versions == [version(0, 1), version(1, 1)]
    assert (state.closed, state.pool, state.updates) == ({}, [{}, {}], [[], []])
    assert (state.ledger.merged, state.ledger.trained) == (merged, trained)
    # Both have done 6 steps. Of fragment 1 two each are merged, and the third was overwritten.
    assert _lost(state) == [Amount(12, 1200), Amount(6, 600)]
    for index in range(2):
        assert state.ledger.outstanding(FragmentId(index)) == Amount(0, 0)
        assert state.ledger.balance(FragmentId(index)) == Amount(0, 0)


@pytest.mark.parametrize("installed_at", [5, 6])
def test_what_is_done_after_the_value_has_come_anew_is_not_the_syncers_loss(installed_at: int) -> None:
    ledger, first, fragment = Ledger(1), Incarnation(1), FragmentId(0)
    ledger.admit(EAST, first, Amount(0, 0))
    ledger.observe(EAST, first, Amount(5, 500))
    ledger.lose(LOST)
    for step in (installed_at, 9, 12):
        ledger.installed(EAST, first, fragment, Amount(step, 100 * step))
    lost, late = (ledger.discarded[0].get(reason, Amount(0, 0)) for reason in (LOST, DiscardReason.LATE))
    assert (lost.steps, late.steps) == (installed_at, 9 - installed_at)
    assert ledger.balance(fragment) == Amount(0, 0)


def test_it_is_in_snapshots_and_rises() -> None:
    desk, _ = _busy()
    state = desk.machine.state
    begin_epoch(state, Epoch(2), LOST)
    assert state_to_json(state_from_json(state_to_json(state))) == state_to_json(state)
    with pytest.raises(AssertionError):
        begin_epoch(state, Epoch(2), LOST)


def test_a_round_that_was_closed_is_due_still() -> None:
    desk, second = _busy()
    state = desk.machine.state
    begin_epoch(state, Epoch(1), LOST)
    later = Desk(syncer_settings(quorum=2), state)
    assert not any(isinstance(effect, StartMerge) for effect in later.effects)
    assert set(later.machine.conductor.open) == {0, 1}, "as is the one that was open"
    assert later.machine.conductor.open[FragmentId(1)].round_id > second.round_id


def _after() -> Desk:
    """A process of the next epoch, to which east has come back."""
    desk, _ = _busy()
    state = desk.machine.state
    begin_epoch(state, Epoch(1), LOST)
    later = Desk(syncer_settings(), state)
    later.tell(LearnerConnected(session=E))
    later.says(E, hello(EAST, incarnation=1, local_step=8))
    return later


def test_who_comes_back_is_sent_the_value_and_its_steps_until_then_are_lost() -> None:
    desk = _after()
    # It installed another version of fragment 1 meanwhile, of which this epoch knows nothing.
    sent = [
        effect
        for effect in desk.says(E, _held(8, (version(0), 0, 0), (version(2), 7, 0)))
        if isinstance(effect, SendUpdate)
    ]
    assert [effect.header.to_version for effect in sent] == [version(0, 1), version(1, 1)]
    assert all(effect.header.resync and not effect.chain for effect in sent)
    resyncs = [effect.header.resync for effect in sent]
    state = desk.machine.state
    desk.says(E, _held(10, (version(0, 1), 9, resyncs[0]), (version(1, 1), 9, resyncs[1])))
    desk.says(E, _held(12, (version(0, 1), 11, resyncs[0]), (version(1, 1), 11, resyncs[1])))
    # West's six steps, and east's up to step 9; whatever lies behind is another matter.
    assert _lost(state) == [Amount(6 + 9, 1500), Amount(3 + 9 - 3, 900)]
    for index in range(2):
        assert state.ledger.balance(FragmentId(index)) == Amount(0, 0)


def test_a_contribution_to_a_version_of_another_epoch_is_refused() -> None:
    desk = _after()
    desk.says(E, _held(8, (version(0), 0, 0), (version(2), 7, 0)))
    header = contribution(EAST, 7, 8, fragment_id=1, base=version(2))
    effects = desk.tell(UploadOffered(session=E, header=header))
    assert only(RefuseUpload, effects) == RefuseUpload(session=E, header=header)
    refused = only(ContributionRefused, messages(effects, E))
    assert isinstance(refused, ContributionRefused)
    assert refused.reason is RefusalReason.FOREIGN_EPOCH
    assert records(effects) == []


def test_a_life_that_the_state_does_not_know_any_more_begins_anew_and_may_contribute_again() -> None:
    desk, _ = _busy()
    state = desk.machine.state
    begin_epoch(state, Epoch(1), LOST)
    later = Desk(syncer_settings(), state)
    later.tell(LearnerConnected(session=E))
    welcome = only(Welcome, messages(later.says(E, hello(EAST, incarnation=7, local_step=9, life_id="a process"))))
    assert isinstance(welcome, Welcome)
    assert (welcome.incarnation, welcome.next_unit) == (8, 6)
    admitted = only(LearnerAdmitted, records(later.effects))
    assert isinstance(admitted, LearnerAdmitted)
    assert (admitted.incarnation, admitted.local_step, admitted.life_id) == (8, 9, "a process")
    assert all(state.ledger.balance(FragmentId(index)) == Amount(0, 0) for index in range(2))
    # It has read far beyond what anybody knows of any more, and goes on where that ends.
    sent = [effect for effect in later.says(E, _held(9, (version(0), 0, 0), (version(2), 7, 0))) if _is_resync(effect)]
    assert len(sent) == 2
    later.says(E, _held(10, (version(0, 1), 10, 1), (version(1, 1), 10, 1)))
    later.says(E, _held(12, (version(0, 1), 10, 1), (version(1, 1), 10, 1)))
    header = replace(contribution(EAST, 10, 12, incarnation=8, base=version(0, 1)), unit_hi=8)
    assert only(Acknowledged, messages(later.stores(E, header), E))
    # Whoever says the number from now on is that process, or nobody.
    refused = only(Refused, messages(later.says(SessionId(3), hello(EAST, incarnation=7, life_id="another"))))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.FENCED


def _is_resync(effect: SyncerEffect) -> bool:
    return isinstance(effect, SendUpdate) and effect.header.resync > 0


def test_a_process_begins_above_all_that_another_may_have_had_and_so_do_its_rounds() -> None:
    desk, _ = _busy()
    copies = state_to_json(desk.machine.state)
    starts = []
    for epoch in (1, 2, 5):
        # Each from the same copies, since the one before was lost before it had made any of its own.
        settings = replace(syncer_settings(quorum=2), term_min=Term(10 * epoch), epoch_min=Epoch(epoch))
        later = Desk(settings, state_from_json(copies))
        started = only(SyncerStarted, records(later.effects))
        assert isinstance(started, SyncerStarted)
        assert (started.term, started.epoch) == (10 * epoch, epoch)
        assert {held.epoch for held in later.machine.state.versions} == {epoch}
        assert not any(later.machine.state.pool)
        starts.append(started.next_round)
    assert all(later > 100_000 + earlier for earlier, later in itertools.pairwise(starts))


def test_numbers_of_rounds_that_an_earlier_process_opened_do_not_come_again_whatever_its_bound_was() -> None:
    wide = syncer_settings()
    wide = replace(wide, policy=replace(wide.policy, bound_steps=500.0))
    narrow = replace(wide, policy=replace(wide.policy, bound_steps=1.0))
    desk = Desk(wide)
    desk.joins(E, EAST)
    opened = desk.machine.state.next_round + wide.rounds_max
    later = Desk(narrow, state_from_json(state_to_json(desk.machine.state)))
    assert later.machine.state.next_round >= opened


@pytest.mark.parametrize(("durable", "ended", "epoch"), [(True, False, 4), (False, False, 5), (False, True, 4)])
def test_the_next_epoch_is_another_only_where_something_may_be_lost(*, durable: bool, ended: bool, epoch: int) -> None:
    state = Desk().machine.state
    state.epoch, state.durable, state.ended = Epoch(4), durable, ended
    assert next_epoch(state, Epoch(0)) == epoch
    assert next_epoch(state, Epoch(9)) == (4 if ended else 9)
