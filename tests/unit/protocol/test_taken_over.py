"""Two syncers of one run: learners know which of them has been taken over, and tell it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, messages, only
from tests.support.protocol import EAST, TERMS, WEST, hello, report, syncer_settings, version
from tests.support.uplink import F0, Uplink, of, pull, said, update
from wan_diloco.protocol.admission import is_of_a_copy, is_taken_over
from wan_diloco.protocol.events import (
    CloseSession,
    Connect,
    Connected,
    ConnectionLost,
    LearnerConnected,
    LearnerDisconnected,
    LearnerEffect,
    RefuseSyncer,
    SendUpdate,
    SessionId,
    SetPace,
    ShowReason,
    TakenOver,
    TimerFired,
    UpdateArrived,
)
from wan_diloco.protocol.messages import Hello, Report, Stop, Welcome
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.units import Epoch, GlobalStep, Incarnation, LearnerId, ShardId, Term


def welcome(term: int, *, epoch: int = 0, incarnation: int = 1, term_id: str = "") -> Welcome:
    return Welcome(
        incarnation=Incarnation(incarnation),
        term=Term(term),
        epoch=Epoch(epoch),
        global_step=GlobalStep(4),
        anchor=0,
        total_steps=GlobalStep(100),
        versions=(version(0, epoch), version(0, epoch)),
        data_shard=ShardId(0),
        next_unit=5,
        shards=("", ""),
        started=True,
        term_id=term_id,
    )


def reconnects(uplink: Uplink) -> Hello:
    uplink.tell(ConnectionLost(reason="cut", refused=False))
    uplink.tell(TimerFired(), after_s=60.0)
    greeting = said(uplink.tell(Connected()))[0]
    assert isinstance(greeting, Hello)
    return greeting


@pytest.fixture
def moved() -> Uplink:
    """A learner that was welcomed in term 1, and then by another syncer in term 5."""
    uplink = Uplink()
    uplink.machine.start()
    uplink.tell(Connected())
    uplink.hears(welcome(1))
    assert reconnects(uplink).term == 1
    uplink.hears(welcome(5, epoch=1))
    return uplink


# ---- a learner -----------------------------------------------------------------------------------


def test_a_syncer_of_a_lower_term_is_refused_with_a_reason_and_nothing_of_it_is_believed(moved: Uplink) -> None:
    assert reconnects(moved).term == 5
    effects: list[LearnerEffect] = moved.hears(welcome(4, incarnation=9))
    refused = only(RefuseSyncer, effects)
    assert isinstance(refused, RefuseSyncer)
    assert refused.reason == "a syncer of term 4 answers, and one of term 5 has taken its run over"
    assert not of(SetPace, effects)
    assert not of(Report, said(effects))
    assert (moved.machine.incarnation, moved.machine.term) == (1, 5)
    for message in (pull(F0), Stop(reason="the run has ended", global_step=GlobalStep(9))):
        assert moved.hears(message) == []
    assert moved.tell(UpdateArrived(header=update(3, resync=7))) == []
    assert not said(moved.boundary()), "it trains on, and tells nobody"


def test_who_was_refused_is_tried_again_with_growing_pauses(moved: Uplink) -> None:
    pauses = []
    for _ in range(3):
        moved.tell(ConnectionLost(reason="it was refused", refused=False))
        deadline_s = moved.machine.deadline_s()
        assert deadline_s is not None
        pauses.append(deadline_s - moved.now_s)
        assert of(Connect, moved.tell(TimerFired(), after_s=pauses[-1]))
        moved.tell(Connected())
        moved.hears(welcome(4))
    assert pauses[0] < pauses[1] < pauses[2]
    moved.tell(ConnectionLost(reason="it was refused", refused=False))
    moved.tell(TimerFired(), after_s=60.0)
    moved.tell(Connected())
    assert of(Report, said(moved.hears(welcome(5, epoch=1)))), "the right one is there again"


def test_a_syncer_that_was_started_again_is_welcome(moved: Uplink) -> None:
    reconnects(moved)
    assert of(Report, said(moved.hears(welcome(6, epoch=1))))
    assert moved.machine.term == 6


def with_the_first(term_id: str) -> Uplink:
    """A learner that was welcomed in term 3 by one of two syncers that have it."""
    uplink = Uplink()
    uplink.machine.start()
    uplink.tell(Connected())
    uplink.hears(welcome(3, term_id=term_id))
    return uplink


def test_of_two_syncers_of_one_term_a_learner_stays_with_the_one_that_it_met_first() -> None:
    uplink = with_the_first("one")
    greeting = reconnects(uplink)
    assert (greeting.term, greeting.term_id) == (3, "one")
    effects = uplink.hears(welcome(3, term_id="another", incarnation=9))
    refused = only(RefuseSyncer, effects)
    assert isinstance(refused, RefuseSyncer)
    assert refused.reason == "another syncer has the same term 3: the state was copied and both were started"
    assert not of(SetPace, effects)
    assert not of(Report, said(effects))
    machine = uplink.machine
    assert (machine.incarnation, machine.term, machine.term_id) == (1, 3, "one")
    for message in (pull(F0), Stop(reason="the run has ended", global_step=GlobalStep(9))):
        assert uplink.hears(message) == []
    uplink.tell(ConnectionLost(reason=refused.reason, refused=False))
    assert machine.deadline_s() is not None, "it is tried again"
    greeting = reconnects(uplink)
    assert (greeting.term, greeting.term_id) == (3, "one")
    assert of(Report, said(uplink.hears(welcome(3, term_id="one")))), "the right one is there again"


def test_a_higher_term_replaces_both_term_and_id_whoever_began_it() -> None:
    for term_id in ("one", "another", ""):
        uplink = with_the_first("one")
        reconnects(uplink)
        assert of(Report, said(uplink.hears(welcome(4, term_id=term_id))))
        assert (uplink.machine.term, uplink.machine.term_id) == (4, term_id)
        assert reconnects(uplink).term_id == term_id
        assert of(RefuseSyncer, uplink.hears(welcome(3, term_id="one"))), "the term comes before the id"


@pytest.mark.parametrize(("heard", "said_now", "kept"), [("", "one", "one"), ("one", "", "one"), ("", "", "")])
def test_an_id_that_is_not_known_is_taken_for_the_same_and_what_is_known_is_kept(
    heard: str, said_now: str, kept: str
) -> None:
    uplink = with_the_first(heard)
    reconnects(uplink)
    assert of(Report, said(uplink.hears(welcome(3, term_id=said_now))))
    assert uplink.machine.term_id == kept


# ---- a syncer ------------------------------------------------------------------------------------


def split() -> tuple[Desk, Desk]:
    """A syncer, and another that has gone on from its copies."""
    old = Desk(syncer_settings())
    old.joins(E, EAST)
    old.joins(W, WEST)
    settings = replace(syncer_settings(), term_min=Term(2), epoch_min=Epoch(1))
    return old, Desk(settings, state_from_json(state_to_json(old.machine.state)))


@pytest.mark.parametrize("incarnation", [0, 1, 7])
def test_who_hears_of_a_later_term_is_taken_over_whatever_life_the_learner_has_by_now(incarnation: int) -> None:
    old, new = split()
    assert new.machine.state.term > old.machine.state.term
    session = E
    old.tell(LearnerConnected(session=session))
    again = hello(EAST, incarnation=incarnation, local_step=3, life_id="east's", term=new.machine.state.term)
    state = state_to_json(old.machine.state)
    old.machine.context.membership.disconnected(E)
    assert old.says(session, again) == [TakenOver(learner_id=EAST, term=new.machine.state.term)]
    assert old.says(W, hello(WEST)) == [], "nothing is decided any more"
    assert old.tell(TimerFired(), after_s=1000.0) == []
    assert old.machine.deadline_s() is None
    assert state_to_json(old.machine.state) == state
    new.tell(LearnerConnected(session=session))
    assert only(Welcome, messages(new.says(session, again)))


@pytest.mark.parametrize(
    "said_by",
    [
        hello(term=3),
        hello(term=9, run="another"),
        hello(term=9, protocol_version=1),
        hello(LearnerId("south"), term=9),
        hello(term=9, layout=("other",)),
        hello(term=9, settings=(("codec", "int8"),)),
        hello(term=9, initial_digests=("x", "y")),
    ],
)
def test_the_same_term_and_strangers_take_nothing_over(said_by: Hello) -> None:
    assert not is_taken_over(TERMS, said_by, Term(3))
    assert is_taken_over(TERMS, hello(term=4), Term(3))


def copies() -> tuple[Desk, Desk]:
    """Two syncers that were started from copies of one state, in which both learners live."""
    before = Desk(syncer_settings())
    before.joins(E, EAST)
    before.joins(W, WEST)
    state = state_to_json(before.machine.state)
    one, another = (
        Desk(replace(syncer_settings(), term_id=term_id), state_from_json(state)) for term_id in ("one", "another")
    )
    assert one.machine.state.term == another.machine.state.term
    return one, another


@pytest.mark.parametrize("incarnation", [0, 1, 7])
def test_who_is_with_another_syncer_of_the_same_term_is_not_taken_in_and_nobody_ends_by_it(incarnation: int) -> None:
    one, _ = copies()
    term = one.machine.state.term
    reason = f"another syncer has the same term {term}: the state was copied and both were started"
    again = hello(EAST, incarnation=incarnation, local_step=3, life_id="east's", term=term, term_id="another")
    before = state_to_json(one.machine.state)
    before.pop("rejected")
    for attempt in (1, 2):
        session = SessionId(10 + attempt)
        one.tell(LearnerConnected(session=session))
        effects = one.says(session, again)
        assert not messages(effects, session), "whoever is told that it is refused ends"
        assert only(CloseSession, effects) == CloseSession(session=session, reason=reason)
        shown = [effect for effect in effects if isinstance(effect, ShowReason)]
        assert shown == [ShowReason(topic="copy:east", text=f"{reason}; east is with it: not taken in")][attempt - 1 :]
        after = state_to_json(one.machine.state)
        assert dict(after.pop("rejected"))["fenced"] == attempt
        assert after == before
    one.tell(LearnerConnected(session=W))
    assert only(Welcome, messages(one.says(W, hello(WEST, incarnation=1)))), "it goes on with the others"


def test_a_learner_that_comes_back_from_the_other_syncer_withdraws_the_reason() -> None:
    one, _ = copies()
    term = one.machine.state.term
    one.tell(LearnerConnected(session=E))
    one.says(E, hello(EAST, incarnation=1, term=term, term_id="another"))
    session = SessionId(11)
    one.tell(LearnerConnected(session=session))
    effects = one.says(session, hello(EAST, incarnation=1, life_id="its next process"))
    assert ShowReason(topic="copy:east", text="") in effects
    assert not one.machine.context.waiting.get("copy:east")


def test_who_was_with_the_other_syncer_in_an_earlier_term_or_with_none_is_taken_in() -> None:
    for term, term_id in ((1, "another"), (0, ""), (2, ""), (2, "one")):
        one, _ = copies()
        assert one.machine.state.term == 2
        one.tell(LearnerConnected(session=E))
        effects = one.says(E, hello(EAST, incarnation=1, term=term, term_id=term_id))
        (welcomed,) = messages(effects, E)
        assert isinstance(welcomed, Welcome)
        assert (welcomed.term, welcomed.term_id) == (2, "one")


def started_again(desk: Desk, term_id: str) -> Desk:
    settings = replace(syncer_settings(), term_id=term_id)
    return Desk(settings, state_from_json(state_to_json(desk.machine.state)))


@pytest.mark.parametrize(("incarnation", "given"), [(1, 2), (4, 5)])
def test_who_was_with_the_other_copy_gets_another_life_of_the_next_term_and_every_fragment_anew(
    incarnation: int, given: int
) -> None:
    one, _ = copies()
    after = started_again(one, "one again")
    stray = hello(EAST, incarnation=incarnation, local_step=30, life_id="east's", term=2, term_id="another")
    for times in (1, 2):  # an answer may be lost
        session = SessionId(10 + times)
        after.tell(LearnerConnected(session=session))
        effects = after.says(session, stray)
        assert only(Welcome, messages(effects, session)).incarnation == given  # type: ignore[attr-defined]
        after.tell(LearnerDisconnected(session=session, reason="cut"))
    session = SessionId(20)
    after.tell(LearnerConnected(session=session))
    after.says(session, replace(stray, incarnation=Incarnation(given), term=Term(3), term_id="one again"))
    effects = after.says(session, report(30))
    assert after.machine.state.incarnations[EAST] == given
    updates = [effect for effect in effects if isinstance(effect, SendUpdate)]
    assert updates
    assert all(effect.header.resync > 0 for effect in updates)


@pytest.mark.parametrize(("term", "term_id"), [(2, "one"), (1, ""), (2, ""), (0, "")])
def test_whose_syncers_were_all_of_this_state_keeps_its_life(term: int, term_id: str) -> None:
    one, _ = copies()
    after = started_again(one, "one again")
    after.tell(LearnerConnected(session=E))
    effects = after.says(E, hello(EAST, incarnation=1, life_id="", term=term, term_id=term_id))
    assert only(Welcome, messages(effects, E)).incarnation == 1  # type: ignore[attr-defined]


def test_of_terms_long_ago_it_is_not_known_who_began_them() -> None:
    desk, _ = copies()
    for number in range(70):
        desk = started_again(desk, f"start {number}")
    assert len(desk.machine.state.term_ids) == 64
    assert desk.machine.state.term_ids[desk.machine.state.term] == "start 69"


def test_a_later_term_takes_over_whatever_its_id() -> None:
    for term_id in ("one", "another", ""):
        one, _ = copies()
        one.tell(LearnerConnected(session=E))
        later = Term(one.machine.state.term + 1)
        effects = one.says(E, hello(EAST, incarnation=1, term=later, term_id=term_id))
        assert effects == [TakenOver(learner_id=EAST, term=later)]


def test_a_syncer_without_an_id_takes_everybody_of_its_term() -> None:
    desk = Desk(syncer_settings())
    desk.tell(LearnerConnected(session=E))
    assert only(Welcome, messages(desk.says(E, hello(EAST, term=1, term_id="another"))))


@pytest.mark.parametrize(
    "said_by",
    [
        hello(term=3, term_id="another", run="another"),
        hello(term=3, term_id="another", protocol_version=1),
        hello(LearnerId("south"), term=3, term_id="another"),
        hello(term=3, term_id="another", layout=("other",)),
        hello(term=3, term_id="another", settings=(("codec", "int8"),)),
        hello(term=2, term_id="another"),
        hello(term=4, term_id="another"),
        hello(term=3, term_id="one"),
        hello(term=3),
    ],
)
def test_only_a_learner_of_this_very_run_and_term_tells_of_a_copy(said_by: Hello) -> None:
    assert not is_of_a_copy(TERMS, said_by, Term(3), "one")
    assert not is_of_a_copy(TERMS, hello(term=3, term_id="another"), Term(3), "")
    assert is_of_a_copy(TERMS, hello(term=3, term_id="another"), Term(3), "one")
