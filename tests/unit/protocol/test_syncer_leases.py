"""Learners that nobody listed: they join, read data on loan, lose them to others when away, and come back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, messages, only, records
from tests.support.protocol import (
    EAST,
    TERMS,
    WEST,
    contribution,
    fresh_state,
    hello,
    report,
    syncer_settings,
    version,
)
from wan_diloco.protocol.events import (
    CloseSession,
    LearnerConnected,
    LearnerDisconnected,
    SendUpdate,
    SessionId,
    SyncerEffect,
    TimerFired,
)
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionRefused,
    Goodbye,
    RefusalReason,
    Refused,
    Report,
    Welcome,
)
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.syncer_machine import SyncerSettings
from wan_diloco.protocol.tape import LearnerAdmitted, LeaseEnded, RunStarted
from wan_diloco.units import Epoch, Incarnation, LearnerId, ShardId, Term

A, B, C = LearnerId("a"), LearnerId("b"), LearnerId("c")
SA, SB, SC, AGAIN, ONCE_MORE = (SessionId(number) for number in range(11, 16))
LEASE_S = 10.0


def settings(*, unlisted_max: int = 3, num_spare_shards: int = 1) -> SyncerSettings:
    terms = replace(TERMS, unlisted_max=unlisted_max)
    return replace(
        syncer_settings(), terms=terms, spare_shards=tuple(ShardId(2 + number) for number in range(num_spare_shards))
    )


@pytest.fixture
def desk() -> Desk:
    """Two listed learners, started, and one spare shard."""
    return begun(settings())


def begun(of: SyncerSettings) -> Desk:
    desk = Desk(of)
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    return desk


def greets(desk: Desk, session: SessionId, learner_id: LearnerId, step: int = 0, **more: object) -> list[SyncerEffect]:
    desk.tell(LearnerConnected(session=session))
    return desk.says(session, hello(learner_id, local_step=step, **more))  # type: ignore[arg-type] # by name


def welcomed(effects: list[SyncerEffect], session: SessionId) -> Welcome:
    welcome = only(Welcome, messages(effects, session))
    assert isinstance(welcome, Welcome)
    return welcome


def refused(effects: list[SyncerEffect]) -> Refused:
    message = only(Refused, messages(effects))
    assert isinstance(message, Refused)
    return message


def falls_silent(desk: Desk, step: int = 3) -> None:
    """Nothing is heard of anybody but the listed ones for longer than a lease."""
    for _ in range(3):
        for session in (E, W):
            desk.says(session, report(step), after_s=LEASE_S / 4)
    desk.tell(TimerFired())


def stored(desk: Desk, session: SessionId, step_lo: int, step_hi: int, unit_hi: int, **more: object) -> object:
    header = contribution(A, step_lo, step_hi, **more)  # type: ignore[arg-type] # by name
    effects = desk.stores(session, replace(header, unit_hi=unit_hi))
    return next(one for one in messages(effects, session) if isinstance(one, Acknowledged | ContributionRefused))


def test_a_name_that_nobody_listed_joins_reads_a_spare_shard_and_is_shown(desk: Desk) -> None:
    effects = greets(desk, SA, A)
    assert (welcomed(effects, SA).data_shard, welcomed(effects, SA).next_unit) == (2, 0)
    admitted = only(LearnerAdmitted, records(effects))
    assert isinstance(admitted, LearnerAdmitted)
    assert admitted.shard == 2
    desk.says(SA, report(0))
    shown = {one.learner_id: one.shard for one in status_of(desk.machine, desk.now_s).learners}
    assert shown == {A: 2, EAST: 0, WEST: 1}


def test_without_leave_of_the_operator_no_other_name_joins() -> None:
    desk = begun(settings(unlisted_max=0))
    assert refused(greets(desk, SA, A)).reason is RefusalReason.UNKNOWN_LEARNER
    assert A not in desk.machine.state.incarnations


@pytest.mark.parametrize("name", ["Upper", "a b", "x" * 64, "../a"])
def test_what_no_region_may_be_called_no_learner_is(desk: Desk, name: str) -> None:
    assert refused(greets(desk, SA, LearnerId(name))).reason is RefusalReason.UNKNOWN_LEARNER


def test_only_so_many_names_ever_take_part_and_those_may_come_back() -> None:
    desk = begun(settings(unlisted_max=2, num_spare_shards=3))
    greets(desk, SA, A)
    greets(desk, SB, B)
    effects = greets(desk, SC, C)
    assert refused(effects).reason is RefusalReason.TOO_MANY_LEARNERS
    assert "2 names" in refused(effects).detail
    assert welcomed(greets(desk, AGAIN, A), AGAIN).incarnation == 2
    assert set(desk.machine.state.incarnations) == {EAST, WEST, A, B}


def test_regions_that_are_taken_out_of_a_run_take_no_joiners_place() -> None:
    desk = begun(settings(unlisted_max=1, num_spare_shards=3))
    without = settings(unlisted_max=1, num_spare_shards=3)
    without = replace(
        without, terms=replace(without.terms, learners=(EAST,)), data_shards=((EAST, without.data_shards[0][1]),)
    )
    desk = Desk(without, state_from_json(state_to_json(desk.machine.state)))
    assert welcomed(greets(desk, SA, A), SA).incarnation == 1
    assert refused(greets(desk, SB, B)).reason is RefusalReason.TOO_MANY_LEARNERS
    assert welcomed(greets(desk, AGAIN, WEST), AGAIN).incarnation == 2, "nor does one that comes back as a joiner"


def test_while_all_holders_are_live_a_joiner_is_told_so(desk: Desk) -> None:
    greets(desk, SA, A)
    effects = greets(desk, SB, B)
    assert refused(effects).reason is RefusalReason.NO_SHARD
    assert refused(effects).detail == "all 1 spare shards are read by live learners: a"
    assert not records(effects)
    assert status_of(desk.machine, desk.now_s).rejected == {"no_shard": 1}


def test_silence_alone_ends_no_loan(desk: Desk) -> None:
    greets(desk, SA, A)
    falls_silent(desk)
    for _ in range(5):
        desk.now_s += 3600.0
        falls_silent(desk)
    assert not [record for record in records(desk.effects) if isinstance(record, LeaseEnded)]
    assert welcomed(greets(desk, AGAIN, A, incarnation=1, step=7), AGAIN).incarnation == 1, "the same life"


def test_a_joiner_takes_over_where_the_committed_units_of_a_silent_holder_end(desk: Desk) -> None:
    greets(desk, SA, A)
    desk.says(SA, report(3))
    assert isinstance(stored(desk, SA, 0, 2, 2), Acknowledged)
    falls_silent(desk)
    effects = greets(desk, SB, B)
    decided = [record for record in records(effects) if isinstance(record, LeaseEnded | LearnerAdmitted)]
    assert decided[0] == LeaseEnded(learner_id=A, incarnation=Incarnation(1), shard=ShardId(2))
    assert len(decided) == 2
    assert welcomed(effects, SB).next_unit == 2, "unit 2 was read by nobody whose work counts"
    closed = only(CloseSession, effects)
    assert isinstance(closed, CloseSession)
    assert (closed.session, closed.reason) == (SA, "its data lease has ended")
    status = status_of(desk.machine, desk.now_s)
    assert status.balance == status.repeated_units == 0
    assert status.discarded_tokens["lease_ended"] > 0, "what it had not brought"
    assert sum(map(len, desk.machine.state.pool)) == 1, "what it had brought still counts"


def test_who_says_goodbye_keeps_its_data_until_somebody_needs_them(desk: Desk) -> None:
    greets(desk, SA, A)
    effects = desk.says(SA, Goodbye(reason="enough"))
    assert not [record for record in records(effects) if isinstance(record, LeaseEnded)]
    assert only(LeaseEnded, records(greets(desk, SB, B)))


def test_who_wakes_without_its_data_gets_a_new_life_and_everything_anew() -> None:
    desk = begun(settings(num_spare_shards=2))
    greets(desk, SA, A)
    greets(desk, SB, B)
    desk.says(SA, report(3))
    falls_silent(desk)
    desk.says(SB, report(3))
    greets(desk, SC, C)
    desk.says(SB, Goodbye(reason="enough"))
    effects = greets(desk, AGAIN, A, incarnation=1, step=5)
    welcome = welcomed(effects, AGAIN)
    assert (welcome.incarnation, welcome.data_shard) == (2, 3)
    effects = desk.says(AGAIN, report(5))
    assert [effect.header.resync for effect in effects if isinstance(effect, SendUpdate)] == [1, 1]
    assert status_of(desk.machine, desk.now_s).balance == 0


def test_what_a_former_life_read_is_refused_until_its_fragment_has_come_anew() -> None:
    desk = begun(settings(num_spare_shards=2))
    greets(desk, SA, A, life_id="one")
    desk.says(SA, report(3))
    falls_silent(desk)
    greets(desk, SB, B)
    greets(desk, SC, C)
    desk.says(SB, Goodbye(reason="enough"))
    welcome = welcomed(greets(desk, AGAIN, A, incarnation=1, step=5, life_id="one"), AGAIN)
    first = welcome.next_unit
    desk.says(AGAIN, report(7))
    answer = stored(desk, AGAIN, 0, 7, first + 2, incarnation=2)
    assert isinstance(answer, ContributionRefused)
    assert answer.reason is RefusalReason.OTHER_DATA
    desk.says(AGAIN, report(8, resync=1, step_lo=7))
    assert isinstance(stored(desk, AGAIN, 7, 8, first + 3, incarnation=2), Acknowledged)
    assert status_of(desk.machine, desk.now_s).repeated_units == 0


def test_a_new_life_whose_welcome_was_lost_is_given_again_to_the_process_that_lives_it(desk: Desk) -> None:
    greets(desk, SA, A, life_id="one")
    falls_silent(desk)
    greets(desk, SB, B)
    desk.says(SB, Goodbye(reason="enough"))
    assert welcomed(greets(desk, AGAIN, A, incarnation=1, step=5, life_id="one"), AGAIN).incarnation == 2
    effects = greets(desk, ONCE_MORE, A, incarnation=1, step=6, life_id="one")
    assert welcomed(effects, ONCE_MORE).incarnation == 2
    updates = [effect for effect in desk.says(ONCE_MORE, report(6)) if isinstance(effect, SendUpdate)]
    assert [update.header.resync for update in updates] == [1, 1], "also what the first one was promised"
    stranger = greets(desk, SC, A, incarnation=1, life_id="another")
    assert refused(stranger).reason is RefusalReason.FENCED


def test_who_wakes_while_all_data_are_lent_is_told_to_come_again(desk: Desk) -> None:
    greets(desk, SA, A)
    falls_silent(desk)
    greets(desk, SB, B)
    assert refused(greets(desk, AGAIN, A, incarnation=1, step=5)).reason is RefusalReason.NO_SHARD


def test_a_restart_forgets_neither_loans_nor_who_has_lost_them(desk: Desk) -> None:
    greets(desk, SA, A)
    desk.says(SA, report(3))
    stored(desk, SA, 0, 2, 2)
    falls_silent(desk)
    greets(desk, SB, B)
    state = state_from_json(json.loads(json.dumps(state_to_json(desk.machine.state))))
    assert state == desk.machine.state
    again = Desk(settings(), state)
    assert refused(greets(again, SC, C)).reason is RefusalReason.NO_SHARD, "b may still come back"
    assert welcomed(greets(again, SB, B, incarnation=1, step=1), SB).next_unit == 2
    again.says(SB, Goodbye(reason="enough"))
    assert welcomed(greets(again, AGAIN, A, incarnation=1, step=5), AGAIN).incarnation == 2


def test_before_a_run_starts_nobody_is_taken_for_gone_because_the_syncer_was_started_again() -> None:
    before = Desk(settings())
    before.joins(E, EAST)
    greets(before, SA, A)
    desk = Desk(settings(), state_from_json(json.loads(json.dumps(state_to_json(before.machine.state)))))
    assert refused(greets(desk, SB, B)).reason is RefusalReason.NO_SHARD, "a may still come back"
    desk.tell(TimerFired(), after_s=LEASE_S)
    assert welcomed(greets(desk, SC, B), SC).data_shard == 2


def test_who_starts_a_run_and_who_is_lacking_is_said_of_everybody() -> None:
    desk = Desk(settings())
    greets(desk, SA, A)
    desk.says(SA, report(0))
    greets(desk, E, EAST)
    while not desk.machine.state.started:
        for session in (SA, E):
            desk.says(session, report(0), after_s=LEASE_S / 4)
    started = only(RunStarted, records(desk.effects))
    assert isinstance(started, RunStarted)
    assert (started.present, started.absent) == ((EAST,), (WEST,))
    for session in (SA, E):
        desk.says(session, report(2))
    for _ in range(8):
        for session in (SA, E):
            desk.says(session, report(3), after_s=LEASE_S / 4)
    assert desk.machine.context.waiting["fragment:1"].endswith(f"0 of 1 learners, lacking {EAST}, {WEST}, {A}")


def test_the_first_units_of_a_life_are_where_the_committed_ones_ended(desk: Desk) -> None:
    """Also a listed learner's: what its former life had committed is no part of what it brings."""
    header = contribution(EAST, 0, 3)
    desk.stores(E, header)
    welcome = welcomed(greets(desk, AGAIN, EAST), AGAIN)
    assert (welcome.incarnation, welcome.data_shard, welcome.next_unit) == (2, 0, 3)
    desk.says(AGAIN, report(2, version(0), version(0)))
    effects = desk.stores(AGAIN, replace(contribution(EAST, 0, 2, incarnation=2), unit_hi=2))
    assert isinstance(only(ContributionRefused, messages(effects, AGAIN)), ContributionRefused)
    effects = desk.stores(AGAIN, replace(contribution(EAST, 0, 2, incarnation=2), unit_hi=5))
    assert only(Acknowledged, messages(effects, AGAIN))
    assert desk.machine.state.unit_book.repeated == 0


def test_reports_of_a_life_that_lost_its_data_are_heard_no_more(desk: Desk) -> None:
    greets(desk, SA, A)
    falls_silent(desk)
    greets(desk, SB, B)
    message: Report = report(9)
    assert desk.says(SA, message) == []
    assert not desk.machine.context.membership.members[A].live


def went_back(of: SyncerSettings) -> Desk:
    """A syncer that knows of no learner any more, in another epoch than the one that gave them their lives."""
    desk = Desk(replace(of, term_min=Term(3), epoch_min=Epoch(2)), fresh_state())
    assert desk.machine.state.epoch == 2
    desk.joins(W, WEST)
    return desk


def test_a_forgotten_life_gets_another_number_and_data_that_are_lent_anew() -> None:
    desk = went_back(settings(num_spare_shards=2))
    effects = greets(desk, E, EAST, step=9, incarnation=4, life_id="east's")
    assert (welcomed(effects, E).incarnation, welcomed(effects, E).data_shard) == (5, 0), "a listed one has its own"
    shards = []
    for session, name, incarnation in ((SB, B, 2), (SA, A, 3)):
        effects = greets(desk, session, name, step=9, incarnation=incarnation, life_id=f"{name}'s")
        admitted = only(LearnerAdmitted, records(effects))
        assert isinstance(admitted, LearnerAdmitted)
        assert admitted.incarnation == welcomed(effects, session).incarnation == incarnation + 1
        shards.append(admitted.shard)
    assert shards == [2, 3], "whatever is free, whichever they had"
    assert {name: lease.shard for name, lease in desk.machine.state.leases.items()} == {WEST: 1, EAST: 0, B: 2, A: 3}
    # A Welcome may be lost: the process that lives it is known by more than the number.
    for incarnation in (3, 4):
        again = greets(desk, AGAIN, A, step=9, incarnation=incarnation, life_id="a's")
        assert welcomed(again, AGAIN).incarnation == 4
        assert not [record for record in records(again) if isinstance(record, LearnerAdmitted)]
        desk.tell(LearnerDisconnected(session=AGAIN, reason="cut"))
    assert refused(greets(desk, ONCE_MORE, A, incarnation=3, life_id="another")).reason is RefusalReason.FENCED
    assert status_of(desk.machine, desk.now_s).balance == 0


def test_a_forgotten_life_finds_no_data_while_all_are_read() -> None:
    desk = went_back(settings())
    greets(desk, SB, B)
    effects = greets(desk, SA, A, step=9, incarnation=1, life_id="a's")
    assert refused(effects).reason is RefusalReason.NO_SHARD
    assert A not in desk.machine.state.incarnations
