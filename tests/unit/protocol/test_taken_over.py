"""Two syncers of one run: learners know which of them has been taken over, and tell it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, messages, only
from tests.support.protocol import EAST, TERMS, WEST, hello, syncer_settings, version
from tests.support.uplink import F0, Uplink, of, pull, said, update
from wan_diloco.protocol.admission import is_taken_over
from wan_diloco.protocol.events import (
    Connect,
    Connected,
    ConnectionLost,
    LearnerConnected,
    LearnerEffect,
    RefuseSyncer,
    SetPace,
    TakenOver,
    TimerFired,
    UpdateArrived,
)
from wan_diloco.protocol.messages import Hello, Report, Stop, Welcome
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.units import Epoch, GlobalStep, Incarnation, LearnerId, ShardId, Term


def welcome(term: int, *, epoch: int = 0, incarnation: int = 1) -> Welcome:
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
