"""What a learner's machine sends when it is asked, and until when it keeps it."""

from __future__ import annotations

import pytest

from tests.support.protocol import version
from tests.support.uplink import F0, F1, Uplink, of, pull, said
from wan_diloco.protocol.events import (
    BoundaryPassed,
    Connected,
    ConnectionLost,
    DropUpload,
    LearnerEffect,
    RequestSnapshot,
    SetRoundTrip,
    ShowReason,
    SnapshotTaken,
    StartUpload,
    TimerFired,
    UploadBroken,
)
from wan_diloco.protocol.learner_slots import StepRatio
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionRefused,
    Declined,
    DeclineReason,
    Pace,
    RefusalReason,
    Report,
    Welcome,
)
from wan_diloco.units import Epoch, GlobalStep, Incarnation, LocalStep, ShardId, Term


def test_a_pull_is_answered_by_a_snapshot_of_the_next_boundary(uplink: Uplink) -> None:
    assert RequestSnapshot(fragment_id=F0) in uplink.hears(pull())
    effects = uplink.boundary(F0)
    upload = of(StartUpload, effects)[0]
    assert isinstance(upload, StartUpload)
    header = upload.header
    assert (header.key.step_lo, header.step_hi, header.tokens, header.unit_hi) == (0, 1, 100, 1)
    assert (header.round_id, header.attempt, header.base, upload.spread_s) == (1, 1, version(0), 1.0)
    effects = uplink.hears(Acknowledged(fragment_id=F0, step_lo=LocalStep(0), step_hi=LocalStep(1)))
    assert DropUpload(header=header) in effects


def test_without_a_step_there_is_nothing_to_send(uplink: Uplink) -> None:
    uplink.hears(pull())
    effects = uplink.boundary(F0, steps=0)
    declined = of(Declined, said(effects))[0]
    assert isinstance(declined, Declined)
    assert declined.reason is DeclineReason.ZERO_STEPS
    assert not of(StartUpload, effects)


def test_steps_without_a_finite_loss_are_declined_and_said_once(uplink: Uplink) -> None:
    text = "no loss or gradient was finite since step 0: its steps count for nothing"
    for attempt in (1, 2):
        uplink.hears(pull(attempt=attempt))
        uplink.step += 1
        effects = uplink.tell(
            BoundaryPassed(
                local_step=LocalStep(uplink.step),
                tokens=0,
                unit=uplink.step,
                step_time_s=1.0,
                loss=None,
                learning_rate=0.1,
                installed=(),
                snapshots=(SnapshotTaken(fragment_id=F0),),
            )
        )
        assert [item.reason for item in of(Declined, said(effects))] == [DeclineReason.NO_TOKENS]  # type: ignore[attr-defined]
        assert of(ShowReason, effects) == ([ShowReason(topic="finite", text=text)] if attempt == 1 else [])
    uplink.hears(pull(attempt=3))
    effects = uplink.boundary(F0)
    assert of(StartUpload, effects)
    assert ShowReason(topic="finite", text="") in effects


def test_a_snapshot_that_nobody_asked_for_is_dropped(uplink: Uplink) -> None:
    assert not of(StartUpload, uplink.boundary(F0))


def test_no_more_is_under_way_than_falls_due_within_tau_steps(uplink: Uplink) -> None:
    uplink.boundary()
    assert of(RequestSnapshot, uplink.hears(pull(F0)))
    assert of(RequestSnapshot, uplink.hears(pull(F1)))
    narrow = Uplink(overlap_steps=1)
    narrow.machine.start()
    narrow.joins()
    narrow.boundary()
    assert of(RequestSnapshot, narrow.hears(pull(F0)))
    assert not of(RequestSnapshot, narrow.hears(pull(F1)))
    effects = narrow.boundary(F0)
    assert not of(RequestSnapshot, effects)
    effects = narrow.hears(Acknowledged(fragment_id=F0, step_lo=LocalStep(0), step_hi=LocalStep(2)), after_s=1.0)
    assert RequestSnapshot(fragment_id=F1) in effects


def test_who_knows_that_it_will_be_late_declines_and_keeps_its_place() -> None:
    uplink = Uplink(overlap_steps=1)
    uplink.machine.start()
    uplink.joins()
    uplink.uploads()
    uplink.hears(Acknowledged(fragment_id=F0, step_lo=LocalStep(0), step_hi=LocalStep(1)), after_s=9.0)
    uplink.uploads(attempt=2)
    declined = of(Declined, said(uplink.hears(pull(F1))))[0]
    assert isinstance(declined, Declined)
    assert declined.reason is DeclineReason.BUSY
    effects = uplink.hears(Acknowledged(fragment_id=F0, step_lo=LocalStep(0), step_hi=LocalStep(2)), after_s=9.0)
    assert RequestSnapshot(fragment_id=F1) in effects


def test_one_slow_upload_is_believed_at_once() -> None:
    # The first deltas of a run are small. Who goes on believing in them is late in each period.
    uplink = Uplink(overlap_steps=1)
    uplink.machine.start()
    uplink.joins()
    for attempt, took_s in ((1, 0.1), (2, 3.0)):
        header = uplink.uploads(attempt=attempt)
        done = Acknowledged(fragment_id=F0, step_lo=header.key.step_lo, step_hi=header.step_hi)
        uplink.hears(done, after_s=took_s)
    uplink.uploads(attempt=3)
    assert [item.reason for item in of(Declined, said(uplink.hears(pull(F1))))] == [DeclineReason.BUSY]  # type: ignore[attr-defined]


def test_what_a_lost_connection_left_goes_on_in_the_next_session(uplink: Uplink) -> None:
    header = uplink.uploads()
    uplink.tell(ConnectionLost(reason="reset", refused=False))
    assert not of(StartUpload, uplink.boundary())
    assert StartUpload(header=header, spread_s=0.0) in uplink.joins()


def test_a_broken_stream_is_taken_up_a_little_later(uplink: Uplink) -> None:
    header = uplink.uploads()
    uplink.tell(UploadBroken(header=header))
    assert StartUpload(header=header, spread_s=0.0) in uplink.tell(TimerFired(), after_s=1.0)


def test_an_upload_that_nothing_is_heard_of_is_offered_again(uplink: Uplink) -> None:
    header = uplink.uploads()
    effects: list[LearnerEffect] = []
    for _ in range(4):
        effects += uplink.tell(TimerFired(), after_s=3.0)
    assert of(StartUpload, effects) == [StartUpload(header=header, spread_s=0.0)]


def busy(uplink: Uplink) -> bool:
    """Whether a fragment that has to wait for a place is expected to be too late, on a link that has one place."""
    uplink.uploads(attempt=2)
    return any(isinstance(message, Declined) for message in said(uplink.hears(pull(F1))))


@pytest.mark.parametrize("how", ["no session", "no acknowledgement", "a broken stream"])
def test_for_how_long_nothing_was_heard_says_nothing_of_how_long_an_upload_takes(how: str) -> None:
    uplink = Uplink(overlap_steps=1)
    uplink.machine.start()
    uplink.joins()
    header = uplink.uploads()
    if how == "no session":
        uplink.tell(ConnectionLost(reason="reset", refused=False))
        uplink.now_s += 100.0
        assert of(StartUpload, uplink.joins())
    else:
        if how == "a broken stream":
            uplink.tell(UploadBroken(header=header))
        assert of(StartUpload, uplink.tell(TimerFired(), after_s=100.0))
    uplink.hears(Acknowledged(fragment_id=F0, step_lo=LocalStep(0), step_hi=LocalStep(1)), after_s=0.1)
    assert not busy(uplink)
    again = uplink.tell(TimerFired(), after_s=11.0)
    assert of(StartUpload, again), "if nothing is heard of it, it is offered again as soon as ever"


def test_an_upload_that_was_begun_again_and_took_long_since_is_believed() -> None:
    uplink = Uplink(overlap_steps=1)
    uplink.machine.start()
    uplink.joins()
    header = uplink.uploads()
    assert of(StartUpload, uplink.tell(TimerFired(), after_s=10.0))
    uplink.hears(Acknowledged(fragment_id=F0, step_lo=header.key.step_lo, step_hi=header.step_hi), after_s=9.0)
    assert busy(uplink)


def test_a_refused_contribution_is_forgotten_and_shown(uplink: Uplink) -> None:
    header = uplink.uploads()
    effects = uplink.hears(
        ContributionRefused(
            fragment_id=F0,
            step_lo=header.key.step_lo,
            step_hi=header.step_hi,
            reason=RefusalReason.LATE,
            detail="too late",
        )
    )
    assert DropUpload(header=header) in effects
    assert ShowReason(topic="fragment:0", text="a contribution was refused (late): too late") in effects


@pytest.mark.parametrize(("step_lo", "step_hi"), [(1, 1), (0, 0)])
def test_an_answer_to_another_contribution_ends_nothing(uplink: Uplink, step_lo: int, step_hi: int) -> None:
    uplink.uploads()
    other = Acknowledged(fragment_id=F0, step_lo=LocalStep(step_lo), step_hi=LocalStep(step_hi))
    assert not of(DropUpload, uplink.hears(other))


def test_a_long_round_trip_is_no_narrow_link() -> None:
    uplink = Uplink(overlap_steps=1)
    uplink.machine.start()
    uplink.tell(Connected())
    uplink.now_s += 2.0
    uplink.machine.context.link.hello_s = 0.0
    uplink.hears(
        Welcome(
            incarnation=Incarnation(1),
            term=Term(1),
            epoch=Epoch(0),
            global_step=GlobalStep(0),
            anchor=0,
            total_steps=GlobalStep(100),
            versions=(version(0), version(0)),
            data_shard=ShardId(0),
            next_unit=0,
            shards=("", ""),
            started=True,
        )
    )
    uplink.boundary()
    assert of(RequestSnapshot, uplink.hears(pull(F0)))
    assert of(RequestSnapshot, uplink.hears(pull(F1)))


def test_how_slow_a_learner_is_follows_from_the_runs_steps_and_its_own() -> None:
    ratio = StepRatio()
    heard = [(100, 0), (103, 1), (106, 2), (112, 4)]
    for global_step, local_step in heard:
        ratio.heard(global_step, local_step, stretch_steps=12)
    assert ratio.value == 3.0
    ratio.heard(124, 16, stretch_steps=12)
    assert ratio.value == 1.0
    ratio.heard(148, 17, stretch_steps=12)
    assert ratio.value == 24.0, "it was stopped"
    ratio.heard(160, 41, stretch_steps=12)
    assert ratio.value == 1.0, "who is faster answers at each of its steps"
    ratio.heard(200, 41, stretch_steps=12)
    assert ratio.value == 1.0, "it was held"
    ratio.heard(150, 41, stretch_steps=12)
    ratio.heard(162, 47, stretch_steps=12)
    assert ratio.value == 2.0, "another process began lower"


def test_a_hello_that_waited_is_no_long_round_trip(uplink: Uplink) -> None:
    """A syncer that waits for disk space answers late; a number that it says back tells how far away it is."""
    round_trip = uplink.machine.context.link.round_trip
    round_trip.lost()
    round_trip.took(3600.0)
    (report,) = of(Report, said(uplink.tell(TimerFired(), 30_000.0)))
    assert isinstance(report, Report)
    assert (report.echo > 0, report.rtt_s) == (True, 3600.0)
    effects = uplink.hears(Pace(global_step=GlobalStep(0), anchor=0, echo=report.echo), 0.25)
    assert SetRoundTrip(rtt_s=0.25) in effects
    assert round_trip.rtt_s == 0.25
