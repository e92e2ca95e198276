"""A learner's machine as a joiner and as a donor of inner moments."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from tests.support.protocol import BATCH_TOKENS, WEST, version
from tests.support.uplink import Uplink, of, said
from wan_diloco.protocol.events import (
    AllowSteps,
    BoundaryPassed,
    Connected,
    ConnectionLost,
    DescribeState,
    EndGiving,
    FetchState,
    GiveState,
    InstallMoments,
    LearnerEffect,
    PinState,
    ReleaseState,
    StateBroken,
    StateDescribed,
    StateFetched,
    StateProgress,
    TimerFired,
)
from wan_diloco.protocol.messages import Pace
from wan_diloco.protocol.rejoin_messages import (
    Donate,
    DonationOver,
    MomentsSource,
    NoDonor,
    StateDeclined,
    StateManifest,
    StateOffered,
    StateReady,
    StateRefusal,
    StateSettled,
    StateWanted,
    SyncerClock,
)
from wan_diloco.units import Epoch, GlobalStep, LearnerId, LocalStep, Term, TransferId

T = TypeVar("T")
T0, T1, T2 = TransferId(0), TransferId(1), TransferId(2)


def manifest(*, step: int = 38, digest: str = "abc", layout: str = "") -> StateManifest:
    return StateManifest(
        global_step=GlobalStep(step),
        versions=(version(0), version(0)),
        layout=layout,
        size_bytes=8000,
        digest=digest,
    )


def offer(transfer: TransferId = T1, *, layout: str = "") -> StateOffered:
    return StateOffered(transfer=transfer, donor=WEST, manifest=manifest(layout=layout))


def donate(transfer: TransferId = T1, *, step: int = 40, term: int = 1) -> Donate:
    clock = SyncerClock(term=Term(term), epoch=Epoch(0), global_step=GlobalStep(step))
    return Donate(transfer=transfer, joiner=WEST, clock=clock)


def said_one(kind: type[T], effects: list[LearnerEffect]) -> T:
    found = of(kind, said(effects))
    assert len(found) == 1
    assert isinstance(found[0], kind)
    return found[0]


def passed(uplink: Uplink, *, pinned: int = 0, moments_of: TransferId = T0) -> list[LearnerEffect]:
    return uplink.tell(
        BoundaryPassed(
            local_step=LocalStep(uplink.step),
            tokens=uplink.step * BATCH_TOKENS,
            unit=uplink.step,
            step_time_s=1.0,
            loss=None,
            learning_rate=0.1,
            installed=(),
            snapshots=(),
            pinned=pinned,
            moments_of=moments_of,
        )
    )


def joiner() -> tuple[Uplink, list[LearnerEffect]]:
    """A new life with the bases of now, and no moments."""
    uplink = Uplink()
    uplink.machine.start()
    return uplink, uplink.joins(global_step=40)


def free(effects: list[LearnerEffect]) -> bool:
    return AllowSteps(until_step=LocalStep(60)) in effects


# ---- a joiner ------------------------------------------------------------------------------------


def test_it_steps_when_the_moments_of_a_peer_are_in_the_training_loop_and_not_before() -> None:
    uplink, effects = joiner()
    assert said_one(StateWanted, effects) == StateWanted(failed=TransferId(0), digest="")
    assert uplink.hears(offer())[-1] == FetchState(offer=offer())
    install = InstallMoments(transfer=T1, donor=WEST, global_step=GlobalStep(38))
    effects = uplink.tell(StateFetched(transfer=T1))
    assert effects == [install]
    effects = passed(uplink, moments_of=T1)
    expected = StateSettled(source=MomentsSource.PEER, donor=WEST, global_step=GlobalStep(38))
    assert said_one(StateSettled, effects) == expected
    assert ReleaseState() in effects
    assert free(effects)


@pytest.mark.parametrize(("own_step", "asks"), [(38, False), (36, False), (35, True), (None, True)])
def test_its_own_moments_do_when_they_are_of_this_period(own_step: int | None, asks: bool) -> None:
    uplink = Uplink(moments_step=own_step)
    uplink.machine.start()
    effects = uplink.joins(global_step=40)
    assert bool(of(StateWanted, said(effects))) is asks
    assert free(effects) is not asks
    if asks:
        effects = uplink.hears(NoDonor(reason="none"))
    settled = said_one(StateSettled, effects)
    source = MomentsSource.NONE if own_step is None else MomentsSource.OWN
    assert settled == StateSettled(source=source, donor=LearnerId(""), global_step=GlobalStep(own_step or 0))
    assert free(effects)


def test_what_breaks_is_asked_for_again_with_the_part_that_is_here() -> None:
    uplink, _ = joiner()
    uplink.hears(offer())
    effects = uplink.tell(StateBroken(transfer=T1, reason="the donor died"))
    assert said_one(StateWanted, effects) == StateWanted(failed=T1, digest="abc")
    assert uplink.hears(offer(T2))[-1] == FetchState(offer=offer(T2))
    assert not uplink.tell(StateFetched(transfer=T1)), "an older transfer's end is of no meaning"
    assert not uplink.tell(StateBroken(transfer=T1, reason="late news"))
    assert of(InstallMoments, uplink.tell(StateFetched(transfer=T2)))


@pytest.mark.parametrize(
    "foreign",
    [
        offer(layout="another"),
        replace(offer(), manifest=replace(manifest(), versions=(version(0, epoch=1), version(0)))),
    ],
)
def test_a_state_of_another_layout_or_epoch_is_not_fetched(foreign: StateOffered) -> None:
    uplink, _ = joiner()
    effects = uplink.hears(foreign)
    assert not of(FetchState, effects)
    assert said_one(StateWanted, effects).failed == T1


def test_it_does_not_wait_for_ever_but_for_as_long_as_something_comes() -> None:
    uplink, _ = joiner()
    uplink.hears(offer(), after_s=50.0)
    assert not free(uplink.tell(StateProgress(transfer=T1), after_s=50.0))
    assert not free(uplink.tell(TimerFired(), after_s=59.0))
    effects = uplink.tell(TimerFired(), after_s=1.0)
    assert free(effects)
    assert said_one(StateSettled, effects).source is MomentsSource.NONE
    assert not uplink.tell(StateFetched(transfer=T1)), "steps were taken on other moments"


def test_reconnects_alone_prolong_no_waiting() -> None:
    uplink, _ = joiner()
    for _ in range(2):
        uplink.tell(ConnectionLost(reason="reset", refused=False), after_s=25.0)
        effects = uplink.joins(global_step=40)
        assert said_one(StateWanted, effects)
        assert not free(effects)
    effects = uplink.tell(TimerFired(), after_s=10.0)
    assert free(effects)
    assert said_one(StateSettled, effects).source is MomentsSource.NONE


def test_after_a_reconnect_it_asks_again_and_says_again_what_it_has() -> None:
    uplink, _ = joiner()
    uplink.hears(offer())
    uplink.tell(StateBroken(transfer=T1, reason="the connection broke"))
    uplink.tell(ConnectionLost(reason="reset", refused=False))
    assert said_one(StateWanted, uplink.joins(global_step=41)) == StateWanted(failed=TransferId(0), digest="abc")
    uplink.hears(NoDonor(reason="none"))
    uplink.tell(ConnectionLost(reason="reset", refused=False))
    effects = uplink.joins(global_step=42)
    assert said_one(StateSettled, effects).source is MomentsSource.NONE
    assert not of(StateWanted, said(effects))


def test_a_restarted_uplink_of_a_life_that_never_stepped_still_waits() -> None:
    uplink = Uplink(incarnation=1, joined=False)
    uplink.machine.start()
    effects = uplink.joins(version(3), version(0), global_step=40)
    assert of(StateWanted, said(effects))
    assert not free(uplink.hears(NoDonor(reason="none"))), "its bases aren't here either"


# ---- a donor -------------------------------------------------------------------------------------


def donor() -> Uplink:
    uplink = Uplink(incarnation=1)
    uplink.machine.start()
    uplink.joins(global_step=40)
    return uplink


def pinned(uplink: Uplink, number: int = 1, *, finite: bool = True) -> list[LearnerEffect]:
    assert DescribeState(number=number) in passed(uplink, pinned=number)
    return uplink.tell(StateDescribed(number=number, size_bytes=8000, digest="abc", finite=finite))


def test_it_pins_at_a_boundary_and_gives_until_told_that_it_is_over() -> None:
    uplink = donor()
    assert uplink.hears(donate()) == [PinState(number=1)]
    effects = pinned(uplink)
    assert said_one(StateReady, effects) == StateReady(transfer=T1, manifest=manifest(step=40))
    assert effects[-1] == GiveState(transfer=T1)
    assert uplink.hears(DonationOver(transfer=T1)) == [EndGiving(transfer=T1)]
    assert not of(ReleaseState, uplink.tell(TimerFired(), after_s=29.0)), "a joiner may come back"
    assert of(ReleaseState, uplink.tell(TimerFired(), after_s=1.0))


def test_a_second_joiner_gets_the_same_row_and_one_that_is_too_late_does_not() -> None:
    uplink = donor()
    uplink.hears(donate())
    pinned(uplink)
    uplink.hears(Pace(global_step=GlobalStep(44), anchor=0))
    effects = uplink.hears(donate(T2, step=44))
    assert said_one(StateReady, effects).manifest.digest == "abc"
    uplink.hears(Pace(global_step=GlobalStep(45), anchor=0))
    late = donate(TransferId(3), step=45)
    assert said_one(StateDeclined, uplink.hears(late)).reason is StateRefusal.BUSY
    for transfer in (T1, T2):
        uplink.hears(DonationOver(transfer=transfer))
    assert uplink.hears(late) == [PinState(number=2)], "nobody takes the old one any more"


def test_it_answers_only_when_it_has_seen_that_clock() -> None:
    uplink = donor()
    assert not uplink.hears(donate(step=41))
    assert PinState(number=1) in uplink.hears(Pace(global_step=GlobalStep(41), anchor=-1))
    other = uplink.hears(donate(T2, term=2))
    assert said_one(StateDeclined, other) == StateDeclined(transfer=T2, reason=StateRefusal.OTHER_CLOCK)


def test_who_has_no_moments_yet_gives_none() -> None:
    uplink, _ = joiner()
    assert said_one(StateDeclined, uplink.hears(donate())).reason is StateRefusal.NO_MOMENTS


def test_moments_that_are_not_finite_stay_where_they_are() -> None:
    uplink = donor()
    uplink.hears(donate())
    effects = pinned(uplink, finite=False)
    assert said_one(StateDeclined, effects).reason is StateRefusal.NON_FINITE
    assert not of(GiveState, effects)
    assert of(ReleaseState, effects)


def test_a_lost_connection_ends_all_giving_and_keeps_what_is_pinned_for_a_while() -> None:
    uplink = donor()
    uplink.hears(donate())
    pinned(uplink)
    uplink.tell(ConnectionLost(reason="reset", refused=False))
    uplink.tell(Connected())
    uplink.joins(global_step=41)
    effects = uplink.hears(donate(T2, step=41))
    assert not of(PinState, effects)
    assert said_one(StateReady, effects).manifest.digest == "abc"


def test_a_pin_that_comes_too_late_is_let_go_of() -> None:
    uplink = donor()
    uplink.hears(donate())
    uplink.tell(ConnectionLost(reason="reset", refused=False))
    uplink.tell(TimerFired(), after_s=30.0)
    assert of(ReleaseState, passed(uplink, pinned=1))
