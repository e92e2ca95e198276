"""What a learner lacks is sent, once at a time, until it says that it has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.protocol import EAST, contribution, fresh_state, report, version
from wan_diloco.protocol.downlink import Downlink
from wan_diloco.protocol.events import SendUpdate, SessionId
from wan_diloco.protocol.messages import SegmentKind, UpdateReceived
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import (
    ContributionJournalled,
    FragmentPublished,
    LearnerAdmitted,
    MergeEntry,
    RoundClosed,
)
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LocalStep, RoundId, Version

SESSION = SessionId(1)
FRAGMENT = FragmentId(0)


def published(state: SyncerState, *, codes_bytes: int = 500) -> None:
    """Merge a contribution into fragment 0."""
    before = state.versions[FRAGMENT]
    header = contribution(step_lo=before.count, step_hi=before.count + 1, base=before)
    if not state.incarnations:
        state.apply(LearnerAdmitted(learner_id=EAST, incarnation=Incarnation(1), local_step=LocalStep(0), tokens=0))
    state.apply(ContributionJournalled(header=header, ref="r", payload_bytes=1))
    entry = MergeEntry(header=header, ref="r", payload_bytes=1, staleness=0)
    state.apply(
        RoundClosed(
            round_id=RoundId(before.count),
            attempt=1,
            fragment_id=FRAGMENT,
            from_version=before,
            to_version=before.next(),
            global_step=GlobalStep(1),
            members=(EAST,),
            entries=(entry,),
            missing=(),
            quorum_s=0.0,
            grace_s=0.0,
        )
    )
    state.apply(
        FragmentPublished(
            round_id=RoundId(before.count),
            fragment_id=FRAGMENT,
            version=before.next(),
            digest=f"digest-{before.count + 1}",
            ref=f"ref-{before.count + 1}",
            codes_bytes=codes_bytes,
            scales_bytes=16,
            update_bytes=530,
        )
    )


@pytest.fixture
def state() -> SyncerState:
    state = fresh_state()
    for _ in range(2):
        published(state)
    return state


@pytest.fixture
def downlink() -> Downlink:
    downlink = Downlink(2, "int4", lossless=False)
    downlink.connected(EAST, new_life=True)
    return downlink


def lacking(downlink: Downlink, state: SyncerState) -> SendUpdate | None:
    return downlink.next_update(EAST, SESSION, FRAGMENT, state, 0.7)


def sent(downlink: Downlink, state: SyncerState) -> SendUpdate:
    effect = lacking(downlink, state)
    assert effect is not None
    return effect


def received(downlink: Downlink, installed: Version, resync: int = 0) -> None:
    downlink.received(EAST, UpdateReceived(fragment_id=FRAGMENT, version=installed, resync=resync))


def test_nothing_is_sent_to_whom_nothing_is_known_of(downlink: Downlink, state: SyncerState) -> None:
    assert lacking(downlink, state) is None


def test_who_has_the_newest_lacks_nothing(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3, version(2), version(0)))
    assert lacking(downlink, state) is None


def test_the_oldest_that_a_learner_has_comes_first_and_what_is_on_its_way_is_not_lacking(
    downlink: Downlink, state: SyncerState
) -> None:
    other = FragmentId(1)
    state.versions[other] = version(2)
    assert downlink.lacking(EAST, state) == [], "nothing is known of it"
    downlink.reported(EAST, report(3, version(1), version(0)))
    assert downlink.lacking(EAST, state) == [other, FRAGMENT]
    assert downlink.num_sending(EAST) == 0
    sent(downlink, state)
    assert downlink.lacking(EAST, state) == [other]
    assert downlink.num_sending(EAST) == 1
    received(downlink, version(2))
    assert downlink.lacking(EAST, state) == [other]
    downlink.want_resync(EAST, FRAGMENT)
    assert downlink.lacking(EAST, state) == [FRAGMENT, other], "what must be replaced is lacking at any version"


def test_a_lag_is_made_up_by_a_chain_of_stored_differences(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3))
    effect = sent(downlink, state)
    assert [source.ref for source in effect.chain] == ["ref-1", "ref-2"]
    assert [segment.kind for segment in effect.header.segments] == [SegmentKind.DIFFERENCE] * 2
    assert effect.header.to_version == version(2)
    assert [note.step_lo for segment in effect.header.segments for note in segment.merged] == [0, 1]


def test_a_long_lag_is_made_up_by_the_value(downlink: Downlink, state: SyncerState) -> None:
    for _ in range(4):
        published(state)
    downlink.reported(EAST, report(3))
    effect = sent(downlink, state)
    assert effect.chain == ()
    assert effect.header.segments[0].kind is SegmentKind.VALUE
    assert effect.header.segments[0].codes_bytes == 4000
    assert effect.header.segments[0].merged, "its receiver learns what became of its work all the same"


def test_one_publication_is_spread_and_whoever_lags_by_more_gets_it_at_once(
    downlink: Downlink, state: SyncerState
) -> None:
    downlink.reported(EAST, report(3, version(1), version(0)))
    assert sent(downlink, state).spread_s == 0.7
    received(downlink, version(0))
    assert sent(downlink, state).spread_s == 0.0
    received(downlink, version(1))
    downlink.want_resync(EAST, FRAGMENT)
    assert sent(downlink, state).spread_s == 0.0


def test_a_chain_as_large_as_the_value_is_not_sent(downlink: Downlink) -> None:
    state = fresh_state()
    published(state, codes_bytes=3984)
    downlink.reported(EAST, report(3))
    assert sent(downlink, state).chain == ()


def test_a_lossless_publication_is_its_last_link(state: SyncerState) -> None:
    downlink = Downlink(2, "f32", lossless=True)
    downlink.connected(EAST, new_life=True)
    downlink.reported(EAST, report(3))
    effect = sent(downlink, state)
    assert [source.ref for source in effect.chain] == ["ref-2"]
    assert [segment.kind for segment in effect.header.segments] == [SegmentKind.VALUE]


def test_one_transfer_at_a_time(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3))
    sent(downlink, state)
    downlink.reported(EAST, report(4))
    published(state)
    assert lacking(downlink, state) is None
    received(downlink, version(2))
    assert sent(downlink, state).header.to_version == version(3)


def test_a_broken_transfer_is_sent_again(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3))
    first = sent(downlink, state)
    downlink.broken(EAST, FRAGMENT)
    assert sent(downlink, state) == first


def test_an_acknowledgement_that_still_lacks_it_has_it_sent_again(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3))
    sent(downlink, state)
    received(downlink, version(1))
    assert sent(downlink, state).header.segments[0].from_version == version(1)


def test_a_report_that_has_it_makes_up_for_a_lost_acknowledgement(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3))
    sent(downlink, state)
    downlink.reported(EAST, report(4, version(2), version(0)))
    published(state)
    assert sent(downlink, state).header.to_version == version(3)


def test_what_waits_to_be_installed_counts_as_there(downlink: Downlink, state: SyncerState) -> None:
    said = report(3)
    pending = replace(said.fragments[0], pending=version(2))
    downlink.reported(EAST, replace(said, fragments=(pending, said.fragments[1])))
    assert lacking(downlink, state) is None


def test_a_reconnect_forgets_what_was_under_way(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3))
    first = sent(downlink, state)
    downlink.connected(EAST, new_life=False)
    assert lacking(downlink, state) is None
    downlink.reported(EAST, report(3))
    assert sent(downlink, state) == first


def test_a_resync_sends_the_value_though_the_version_is_there(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3, version(2), version(0)))
    downlink.want_resync(EAST, FRAGMENT)
    effect = sent(downlink, state)
    assert (effect.header.resync, effect.header.segments[0].kind) == (1, SegmentKind.VALUE)
    downlink.reported(EAST, report(4, version(2), version(0)))
    assert lacking(downlink, state) is None, "it is on its way"
    received(downlink, version(2), resync=1)
    assert lacking(downlink, state) is None
    downlink.want_resync(EAST, FRAGMENT)
    assert sent(downlink, state).header.resync == 2


def test_a_need_that_comes_again_before_the_resync_is_there_is_met_by_it(
    downlink: Downlink, state: SyncerState
) -> None:
    downlink.reported(EAST, report(3, version(2), version(0)))
    for _ in range(2):
        downlink.want_resync(EAST, FRAGMENT)
        assert sent(downlink, state).header.resync == 1
    received(downlink, version(2), resync=1)
    assert lacking(downlink, state) is None


@pytest.mark.parametrize("wanted_first", [False, True])
def test_a_restarted_syncer_resyncs_above_what_an_earlier_one_sent(
    downlink: Downlink, state: SyncerState, wanted_first: bool
) -> None:
    said = report(3, version(2), version(0), resync=7)
    steps: list[Callable[[], None]] = [
        lambda: downlink.reported(EAST, said),
        lambda: downlink.want_resync(EAST, FRAGMENT),
    ]
    for step in reversed(steps) if wanted_first else steps:
        step()
    assert sent(downlink, state).header.resync == 8


@pytest.mark.parametrize("held", [version(2, epoch=1), version(3)])
def test_a_version_that_does_not_exist_is_replaced(downlink: Downlink, state: SyncerState, held: Version) -> None:
    downlink.reported(EAST, report(3, held, version(0)))
    assert sent(downlink, state).header.resync == 1


def test_a_new_life_has_nothing_of_the_old_one(downlink: Downlink, state: SyncerState) -> None:
    downlink.reported(EAST, report(3, version(2), version(0), resync=5))
    downlink.want_resync(EAST, FRAGMENT)
    downlink.connected(EAST, new_life=True)
    downlink.reported(EAST, report(0))
    assert sent(downlink, state).header.resync == 0
