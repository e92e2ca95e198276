"""Bytes that rot on the syncer's disk: the round is merged without them, or opened anew, and a restart knows it."""

from __future__ import annotations

import pytest

from tests.support.desk import Desk, E, W, answer, messages, only, pulled, records
from tests.support.protocol import EAST, WEST, contribution, fresh_state, report, syncer_settings, version
from wan_diloco.errors import LocalProtocolError
from wan_diloco.protocol.events import (
    ContributionsUnreadable,
    SendUpdate,
    SessionId,
    StartMerge,
    TimerFired,
    TransferBroken,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.ledger import DiscardReason
from wan_diloco.protocol.messages import Acknowledged, Pull
from wan_diloco.protocol.serial import dumps, loads
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.tape import ContributionsLost, RoundClosed, TapeRecord


def _closed(quorum: int = 1) -> tuple[Desk, Pull, StartMerge]:
    """Both have contributed, and the round is being merged."""
    desk = Desk(syncer_settings(quorum=quorum))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    merge = only(StartMerge, desk.stores(W, answer(pull, WEST)))
    assert isinstance(merge, StartMerge)
    return desk, pull, merge


def _lose(desk: Desk, merge: StartMerge, *learners: str) -> list:
    keys = tuple(entry.header.key for entry in merge.entries if entry.header.key.learner_id in learners)
    return desk.tell(ContributionsUnreadable(round_id=merge.round_id, keys=keys))


def _discarded(desk: Desk) -> dict[DiscardReason, float]:
    totals = desk.machine.state.ledger.totals(desk.machine.state.parameters)
    assert totals.balance == 0
    return totals.discarded_tokens


def test_the_rest_is_merged_and_what_is_lost_has_a_reason_of_its_own() -> None:
    desk, pull, merge = _closed()
    effects = _lose(desk, merge, EAST)
    lost = only(ContributionsLost, records(effects))
    again = only(StartMerge, effects)
    assert again.round_id == merge.round_id
    assert again.entries == merge.entries[1:]
    assert effects.index(again) > 0, "the record comes first"
    desk.merges(merge.round_id)
    state = desk.machine.state
    assert state.versions[pull.fragment_id] == version(1)
    assert [note.learner_id for note in state.updates[pull.fragment_id][0].merged] == [WEST]
    assert _discarded(desk) == {}, "as long as it has not installed the version it may send its work again"
    # Two installs later that is over.
    for step in (3, 5):
        desk.says(E, report(step, version(1), version(1), step_lo=step))
    assert _discarded(desk)[DiscardReason.UNREADABLE] > 0
    assert loads(TapeRecord, dumps(lost)) == lost


def test_what_is_lost_is_late_and_not_lost_when_its_sender_comes_with_more() -> None:
    desk, pull, merge = _closed()
    _lose(desk, merge, EAST)
    desk.merges(merge.round_id)
    desk.says(E, report(3))
    header = answer(pull, step_hi=3)
    assert isinstance(only(Acknowledged, messages(desk.stores(E, header), E)), Acknowledged)
    assert [item.header for item in desk.machine.state.pool[pull.fragment_id].values()] == [header]
    assert _discarded(desk) == {}


def test_a_contribution_of_a_life_that_is_over_is_discarded_at_once() -> None:
    desk, _, merge = _closed()
    desk.joins(SessionId(3), EAST)
    discarded = _discarded(desk)
    _lose(desk, merge, EAST)
    assert _discarded(desk) == {**discarded, DiscardReason.UNREADABLE: 100.0}
    desk.merges(merge.round_id)
    assert _discarded(desk)[DiscardReason.UNREADABLE] == 100.0


def test_with_no_rest_the_round_is_opened_anew_and_merges_what_comes_then() -> None:
    desk, pull, merge = _closed(quorum=2)
    effects = _lose(desk, merge, EAST, WEST)
    assert not any(isinstance(effect, StartMerge) for effect in effects)
    again = only(Pull, messages(effects, E))
    assert isinstance(again, Pull)
    assert (again.fragment_id, again.version) == (pull.fragment_id, pull.version)
    assert again.round_id > pull.round_id
    for session in (E, W):
        desk.says(session, report(3))
    desk.stores(E, answer(again, step_hi=3))
    closed = only(StartMerge, desk.stores(W, answer(again, WEST)))
    assert isinstance(closed, StartMerge)
    assert [entry.header.step_hi for entry in closed.entries] == [3, 2]
    desk.merges(again.round_id)
    assert desk.machine.state.versions[pull.fragment_id] == version(1)
    assert _discarded(desk) == {}


def test_with_less_than_a_quorum_left_the_rest_waits_for_a_round_that_is_opened_anew() -> None:
    desk, pull, merge = _closed(quorum=2)
    effects = _lose(desk, merge, EAST)
    assert only(ContributionsLost, records(effects)).opened_anew
    assert not any(isinstance(effect, StartMerge) for effect in effects)
    state = desk.machine.state
    assert [key.learner_id for key in state.pool[pull.fragment_id]] == [WEST]
    assert "1 fresh ones are left, and it is opened anew" in desk.machine.context.waiting["storage"]
    again = only(Pull, messages(effects, W))
    assert isinstance(again, Pull)
    for session in (E, W):
        desk.says(session, report(3))
    desk.stores(E, answer(again, step_hi=3))
    # What is left may be replaced by more.
    closed = only(StartMerge, desk.stores(W, answer(again, WEST, step_hi=3)))
    assert isinstance(closed, StartMerge)
    assert [(entry.header.key.learner_id, entry.header.step_hi) for entry in closed.entries] == [(EAST, 3), (WEST, 3)]
    desk.merges(again.round_id)
    assert state.versions[pull.fragment_id] == version(1)
    assert _discarded(desk) == {}
    replayed = fresh_state()
    for record in records(desk.effects):
        replayed.apply(record)
    assert replayed.versions == state.versions
    assert replayed.pool == state.pool


def test_what_rides_along_counts_towards_no_quorum_also_when_others_are_lost() -> None:
    desk = Desk(syncer_settings(quorum=1))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    desk.tell(UploadOffered(session=W, header=answer(pull, WEST)))
    desk.stores(E, answer(pull))
    desk.tell(TimerFired(), after_s=9.0)
    desk.merges(pull.round_id)
    desk.tell(UploadStored(session=W, header=answer(pull, WEST), ref="r", payload_bytes=516))
    for session in (E, W):
        desk.says(session, report(6, version(0), version(1), step_lo=5))
    second = next(m for m in reversed(messages(desk.effects, E)) if isinstance(m, Pull) and m.fragment_id == 1)
    header = contribution(EAST, 5, 6, fragment_id=1, base=version(1), round_id=second.round_id, attempt=second.attempt)
    desk.stores(E, header)
    desk.tell(TimerFired(), after_s=9.0)
    merge = [effect for effect in desk.effects if isinstance(effect, StartMerge)][-1]
    assert [(entry.header.key.learner_id, entry.staleness) for entry in merge.entries] == [(EAST, 0), (WEST, 1)]
    assert only(ContributionsLost, records(_lose(desk, merge, EAST))).opened_anew
    assert [key.learner_id for key in desk.machine.state.pool[1]] == [WEST]
    assert _discarded(desk).get(DiscardReason.UNREADABLE, 0.0) == 0.0


def test_a_restart_knows_what_was_lost_and_what_is_due_still() -> None:
    desk, pull, merge = _closed()
    _lose(desk, merge, EAST, WEST)
    tape = records(desk.effects)
    state = fresh_state()
    for record in tape:
        state.apply(record)
    assert state_to_json(state)["closed"] == []
    saved = state_from_json(state_to_json(state))
    machine = SyncerMachine(syncer_settings(quorum=2), saved)
    effects = machine.start(0.0)
    assert not any(isinstance(effect, StartMerge) for effect in effects)
    assert list(machine.conductor.open) == [pull.fragment_id]
    assert machine.conductor.open[pull.fragment_id].round_id > merge.round_id


def test_a_restart_before_the_merge_merges_the_rest() -> None:
    desk, _, merge = _closed()
    _lose(desk, merge, EAST)
    state = fresh_state()
    for record in records(desk.effects):
        state.apply(record)
    effects = SyncerMachine(syncer_settings(quorum=2), state).start(0.0)
    assert only(StartMerge, effects).entries == merge.entries[1:]
    assert sum(isinstance(record, RoundClosed) for record in records(desk.effects)) == 1


def test_what_no_merge_was_given_can_not_be_lost() -> None:
    desk, _, merge = _closed()
    for keys in ((), (contribution(EAST, 7, 9).key,)):
        with pytest.raises(LocalProtocolError):
            desk.tell(ContributionsUnreadable(round_id=merge.round_id, keys=keys))
    with pytest.raises(LocalProtocolError):
        desk.tell(ContributionsUnreadable(round_id=99, keys=(merge.entries[0].header.key,)))


@pytest.mark.parametrize("lossless", [False, True])
def test_who_lacks_a_publication_that_is_unreadable_gets_the_value(lossless: bool) -> None:
    desk = Desk(syncer_settings(quorum=1, lossless=lossless))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    desk.stores(W, answer(pull, WEST))
    sent = [effect for effect in desk.merges(pull.round_id) if isinstance(effect, SendUpdate) and effect.session == E]
    assert len(sent[0].chain) == 1
    broken = TransferBroken(session=E, fragment_id=pull.fragment_id, unreadable=True)
    again = only(SendUpdate, desk.tell(broken))
    assert (again.session, again.chain) == (E, ())
    assert again.header.to_version == version(1)
