"""The syncer's part in handing moments on: who is asked, who is told what, who may call."""

from __future__ import annotations

import pytest

from tests.support.desk import Desk, E, W, answer, messages, only, pulled
from tests.support.protocol import EAST, WEST, report, version
from wan_diloco.protocol.events import LearnerDisconnected, SessionId, SyncerEffect, TimerFired
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
)
from wan_diloco.protocol.status import status_of
from wan_diloco.units import GlobalStep, LearnerId, TransferId

BACK = SessionId(3)
WANTED = StateWanted(failed=TransferId(0), digest="")


def manifest(digest: str = "abc") -> StateManifest:
    return StateManifest(
        global_step=GlobalStep(2), versions=(version(0), version(1)), layout="l", size_bytes=8000, digest=digest
    )


@pytest.fixture
def desk() -> Desk:
    """West is proven; east was killed and is back."""
    desk = Desk()
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    desk.stores(W, answer(pull, WEST))
    desk.merges(pull.round_id)
    desk.says(W, report(2, version(0), version(1)))
    desk.tell(LearnerDisconnected(session=E, reason="killed"))
    desk.joins(BACK, EAST)
    return desk


def asked(effects: list[SyncerEffect], session: SessionId = W) -> Donate:
    donate = only(Donate, messages(effects, session))
    assert isinstance(donate, Donate)
    return donate


def test_a_joiner_is_offered_what_a_proven_peer_has_pinned(desk: Desk) -> None:
    donate = asked(desk.says(BACK, WANTED))
    assert donate.joiner == EAST
    assert donate.clock.global_step == desk.machine.context.membership.global_step
    assert not desk.machine.donors.allows(BACK, donate.transfer, giving=False), "nothing is pinned yet"
    effects = desk.says(W, StateReady(transfer=donate.transfer, manifest=manifest()))
    offer = StateOffered(transfer=donate.transfer, donor=WEST, manifest=manifest())
    assert offer in messages(effects, BACK)
    allows = desk.machine.donors.allows
    assert allows(BACK, donate.transfer, giving=False)
    assert allows(W, donate.transfer, giving=True)
    assert not allows(W, donate.transfer, giving=False), "nobody takes what was meant for another"
    assert not allows(BACK, donate.transfer, giving=True)
    settled = StateSettled(source=MomentsSource.PEER, donor=WEST, global_step=GlobalStep(2))
    assert DonationOver(transfer=donate.transfer) in messages(desk.says(BACK, settled), W)
    assert not allows(BACK, donate.transfer, giving=False)
    moments = {learner.learner_id: learner.moments for learner in status_of(desk.machine, desk.now_s).learners}
    assert moments == {EAST: "peer of west", WEST: ""}


def test_who_fails_is_told_to_stop_and_tried_again_only_so_often(desk: Desk) -> None:
    effects = desk.says(BACK, WANTED)
    tries = 0
    while donations := [message for message in messages(effects, W) if isinstance(message, Donate)]:
        tries += 1
        desk.says(W, StateReady(transfer=donations[0].transfer, manifest=manifest()))
        effects = desk.says(BACK, StateWanted(failed=donations[0].transfer, digest="abc"))
        assert DonationOver(transfer=donations[0].transfer) in messages(effects, W)
    assert tries == 4
    assert only(NoDonor, messages(effects, BACK)) == NoDonor(reason="4 transfers failed")


@pytest.mark.parametrize("end", ["dies", "declines"])
def test_a_donor_that_goes_leaves_the_joiner_with_what_there_is(desk: Desk, end: str) -> None:
    donate = asked(desk.says(BACK, WANTED))
    if end == "dies":
        effects = desk.tell(LearnerDisconnected(session=W, reason="killed"))
    else:
        effects = desk.says(W, StateDeclined(transfer=donate.transfer, reason=StateRefusal.NON_FINITE))
        assert asked(effects).transfer != donate.transfer, "there is nobody else"
        return
    assert isinstance(only(NoDonor, messages(effects, BACK)), NoDonor)


def test_a_donor_that_lives_and_does_not_pin_is_not_waited_for(desk: Desk) -> None:
    donate = asked(desk.says(BACK, WANTED))
    for _ in range(2):
        for session in (W, BACK):
            effects = desk.says(session, report(2, version(0), version(1)), after_s=2.0 if session == W else 0.0)
            assert not any(isinstance(message, Donate | NoDonor) for message in messages(effects))
    effects = desk.tell(TimerFired(), after_s=6.0)
    assert DonationOver(transfer=donate.transfer) in messages(effects, W)
    assert asked(effects).transfer > donate.transfer, "there is nobody else"


def test_nobody_unproven_behind_or_fetching_gives(desk: Desk) -> None:
    # West itself comes back, in another life: nothing of that has been merged.
    desk.tell(LearnerDisconnected(session=W, reason="killed"))
    desk.joins(SessionId(4), WEST)
    assert only(NoDonor, messages(desk.says(BACK, WANTED), BACK))


def test_a_peer_with_old_bases_gives_nothing(desk: Desk) -> None:
    versions = desk.machine.state.versions
    versions[0] = version(2)  # two merges that west hasn't heard of
    assert only(NoDonor, messages(desk.says(BACK, WANTED), BACK))


def test_a_reconnected_joiner_goes_on_with_the_donor_that_holds_its_part(desk: Desk) -> None:
    donate = asked(desk.says(BACK, WANTED))
    desk.says(W, StateReady(transfer=donate.transfer, manifest=manifest()))
    effects = desk.tell(LearnerDisconnected(session=BACK, reason="cut"))
    assert DonationOver(transfer=donate.transfer) in messages(effects, W)
    again = SessionId(5)
    desk.joins(again, EAST, incarnation=2)
    next_donate = asked(desk.says(again, StateWanted(failed=TransferId(0), digest="abc")))
    assert next_donate.transfer > donate.transfer
    # A late word about the transfer before has no meaning.
    assert not messages(desk.says(W, StateReady(transfer=donate.transfer, manifest=manifest())), again)


def test_a_joiner_that_loses_its_connection_has_not_been_failed(desk: Desk) -> None:
    donate = asked(desk.says(BACK, WANTED))
    session = BACK
    for number in range(5, 12):
        desk.says(W, StateReady(transfer=donate.transfer, manifest=manifest()))
        desk.tell(LearnerDisconnected(session=session, reason="cut"))
        session = SessionId(number)
        desk.joins(session, EAST, incarnation=2)
        donate = asked(desk.says(session, StateWanted(failed=TransferId(0), digest="abc")))


def test_words_of_a_stranger_to_a_transfer_change_nothing(desk: Desk) -> None:
    donate = asked(desk.says(BACK, WANTED))
    desk.says(BACK, StateDeclined(transfer=donate.transfer, reason=StateRefusal.BUSY))
    desk.says(BACK, StateReady(transfer=donate.transfer, manifest=manifest()))
    assert not desk.machine.donors.allows(BACK, donate.transfer, giving=False)
    settled = StateSettled(source=MomentsSource.OWN, donor=LearnerId(""), global_step=GlobalStep(1))
    desk.says(W, settled)
    assert desk.says(W, StateReady(transfer=donate.transfer, manifest=manifest()))
