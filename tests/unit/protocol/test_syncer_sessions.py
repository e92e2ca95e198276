"""Who talks to the syncer's machine, as which life, and for how long."""

from __future__ import annotations

import pytest

from tests.support.desk import Desk, E, W, messages, only
from tests.support.protocol import EAST, WEST, contribution, hello, report, version
from wan_diloco.protocol.events import (
    CloseSession,
    LearnerConnected,
    LearnerDisconnected,
    RefuseUpload,
    SessionId,
    ShowReason,
    TimerFired,
    UploadOffered,
)
from wan_diloco.protocol.messages import (
    Declined,
    DeclineReason,
    Goodbye,
    Pace,
    RefusalReason,
    Refused,
    ResyncRequest,
    UpdateReceived,
    Welcome,
)
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.status import status_of
from wan_diloco.units import FragmentId, LearnerId, RoundId


def test_a_refused_learner_is_told_why_and_counted(desk: Desk) -> None:
    effects = desk.says(SessionId(9), hello(LearnerId("south")))
    refused = only(Refused, messages(effects))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.UNKNOWN_LEARNER
    assert only(CloseSession, effects) == CloseSession(session=SessionId(9), reason=f"refused: {refused.detail}")
    assert status_of(desk.machine, 0.0).rejected == {"unknown_learner": 1}


def test_the_higher_incarnation_stands_and_the_lower_is_refused(desk: Desk) -> None:
    twin = SessionId(3)
    effects = desk.joins(twin, EAST)
    assert CloseSession(session=E, reason="a newer session of the same learner") in effects
    desk.tell(LearnerDisconnected(session=E, reason="closed"))
    refused = only(Refused, messages(desk.says(SessionId(4), hello(EAST, incarnation=1))))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.FENCED
    assert desk.machine.context.membership.reachable(EAST, desk.machine.state.incarnations[EAST])


def test_words_without_a_standing_session_close_it(desk: Desk) -> None:
    assert desk.says(SessionId(9), report(1)) == [CloseSession(session=SessionId(9), reason="no standing session")]


def test_a_second_hello_closes_the_session(desk: Desk) -> None:
    assert CloseSession(session=E, reason="a second Hello") in desk.says(E, hello(EAST))


def test_a_hello_that_comes_again_after_its_session_was_ended_begins_no_life(desk: Desk) -> None:
    desk.joins(SessionId(3), EAST)
    lives = dict(desk.machine.state.incarnations)
    assert desk.says(E, hello(EAST)) == []
    assert desk.machine.state.incarnations == lives
    desk.tell(LearnerDisconnected(session=E, reason="closed"))
    assert not desk.machine.context.closing
    assert desk.machine.context.membership.reachable(EAST, lives[EAST])


def test_who_asks_for_a_life_again_gets_the_one_it_was_given(desk: Desk) -> None:
    """The Hello of a connection that was given up may come after that of the next, when both were held up."""
    first = only(Welcome, messages(desk.says(SessionId(3), hello(EAST, life_id="a process"))))
    again = only(Welcome, messages(desk.says(SessionId(4), hello(EAST, life_id="a process"))))
    assert isinstance(first, Welcome)
    assert isinstance(again, Welcome)
    assert first.incarnation == again.incarnation
    known = only(Welcome, messages(desk.says(SessionId(5), hello(EAST, incarnation=first.incarnation))))
    assert isinstance(known, Welcome), "the life that somebody lives isn't fenced out"


@pytest.mark.parametrize("life_id", ["", "another process"])
def test_another_process_gets_another_life(desk: Desk, life_id: str) -> None:
    desk.says(SessionId(3), hello(EAST, life_id="a process"))
    before = desk.machine.state.incarnations[EAST]
    desk.says(SessionId(4), hello(EAST, life_id=life_id))
    desk.says(SessionId(5), hello(EAST, life_id="a process"))
    assert desk.machine.state.incarnations[EAST] == before + 2


def test_a_syncer_that_was_restarted_knows_who_lives_which_life(desk: Desk) -> None:
    desk.says(SessionId(3), hello(EAST, life_id="a process"))
    state = state_from_json(state_to_json(desk.machine.state))
    assert state.life_ids[EAST] == "a process"


def test_goodbye_ends_membership_at_once(desk: Desk) -> None:
    assert CloseSession(session=E, reason="goodbye") in desk.says(E, Goodbye(reason="enough"))
    assert [member.learner_id for member in desk.machine.context.membership.live()] == [WEST]


def test_what_is_offered_after_goodbye_does_not_bring_a_learner_back(desk: Desk) -> None:
    desk.says(E, Goodbye(reason="enough"))
    header = contribution(EAST)
    assert desk.tell(UploadOffered(session=E, header=header)) == [RefuseUpload(session=E, header=header)]
    assert [member.learner_id for member in desk.machine.context.membership.live()] == [WEST]
    desk.tell(LearnerDisconnected(session=E, reason="closed"))
    assert not desk.machine.context.closing


def test_silence_is_shown_and_forgiven(desk: Desk) -> None:
    desk.says(W, report(0), after_s=9.0)
    gone = ShowReason(topic="member:east", text="nothing was heard of east for a whole lease: rounds go on without it")
    assert gone in desk.tell(TimerFired(), after_s=1.0)
    assert ShowReason(topic="member:east", text="") in desk.says(E, report(0), after_s=1.0)


def test_news_from_before_a_reconnect_is_no_news(desk: Desk) -> None:
    desk.says(E, report(3))
    desk.says(E, report(1))
    assert desk.machine.context.membership.members[EAST].local_step == 3


def test_the_pace_is_told_when_it_changes(desk: Desk) -> None:
    assert [message for message in messages(desk.says(E, report(1))) if isinstance(message, Pace)]
    assert not [message for message in messages(desk.says(W, report(1))) if isinstance(message, Pace)]


def test_fragments_that_do_not_exist_are_ignored(desk: Desk) -> None:
    nowhere = FragmentId(7)
    desk.says(E, UpdateReceived(fragment_id=nowhere, version=version(0), resync=0))
    desk.says(E, ResyncRequest(fragment_id=nowhere, reason=RefusalReason.DIGEST))
    desk.says(E, Declined(round_id=RoundId(0), attempt=1, fragment_id=nowhere, reason=DeclineReason.BUSY))
    strange = report(1, version(0), version(0), version(0))
    desk.says(E, strange)
    assert desk.machine.state.ledger.balance(FragmentId(0)).steps == 0
    assert status_of(desk.machine, 0.0).rejected == {}


def restarted(desk: Desk) -> Desk:
    return Desk(desk.machine.context.settings, state_from_json(state_to_json(desk.machine.state)))


def test_after_everybody_left_a_new_process_has_no_members_and_asks_nobody(desk: Desk) -> None:
    desk.says(W, Goodbye(reason="it stops"))
    desk.tell(LearnerDisconnected(session=E, reason="killed"))
    lease_s = 100.0
    desk.tell(TimerFired(), after_s=lease_s)
    assert not list(desk.machine.context.membership.live())
    after = restarted(desk)
    assert not list(after.machine.context.membership.live())
    assert not after.machine.conductor.open
    after.tell(TimerFired(), after_s=1000.0)
    assert not messages(after.effects)


def test_who_was_cut_off_by_the_syncers_own_death_is_a_member_for_one_lease_and_then_gone(desk: Desk) -> None:
    after = restarted(desk)
    assert {member.learner_id for member in after.machine.context.membership.live()} == {EAST, WEST}
    after.tell(LearnerConnected(session=E))
    after.says(E, hello(EAST, incarnation=1))
    after.says(E, report(0), after_s=9.0)
    after.tell(TimerFired(), after_s=2.0)
    assert {member.learner_id for member in after.machine.context.membership.live()} == {EAST}
