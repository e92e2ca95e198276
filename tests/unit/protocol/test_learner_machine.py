"""The learner's machine, event by event."""

from __future__ import annotations

import random

import pytest

from tests.support.protocol import BATCH_TOKENS, EAST, RULES, TERMS, version
from wan_diloco.errors import EXIT_AUTH, EXIT_CONFIG, EXIT_OK
from wan_diloco.protocol.events import (
    AllowSteps,
    ApplyUpdate,
    BoundaryPassed,
    Connect,
    Connected,
    ConnectionLost,
    DropUpload,
    ExitLearner,
    Identity,
    Installed,
    InstallUpdate,
    LearnerEffect,
    LearnerEvent,
    RequestSnapshot,
    SendToSyncer,
    SetPace,
    ShowReason,
    SnapshotTaken,
    StartUpload,
    SyncerSaid,
    TimerFired,
    UpdateApplied,
    UpdateArrived,
    UpdateBroken,
    UploadBroken,
)
from wan_diloco.protocol.learner_machine import FragmentState, LearnerMachine, LearnerSettings
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    ContributionRefused,
    Declined,
    DeclineReason,
    Hello,
    MergedNote,
    Pace,
    Pull,
    RefusalReason,
    Refused,
    Report,
    ResyncRequest,
    SegmentKind,
    Start,
    Stop,
    SyncerMessage,
    UpdateHeader,
    UpdateReceived,
    UpdateSegment,
    Welcome,
)
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Incarnation, LocalStep, RoundId, Term, Version

F0, F1 = FragmentId(0), FragmentId(1)


class Uplink:
    """A machine, its time and its training loop's counters."""

    def __init__(self, *, overlap_steps: int = 2, incarnation: int = 0) -> None:
        self.machine = LearnerMachine(
            LearnerSettings(
                schedule=Schedule(num_fragments=2, period_steps=4),
                overlap_steps=overlap_steps,
                codec="int4",
                sizes=RULES.fragments,
                heartbeat_s=3.0,
                retry=RetryPolicy(initial_s=1.0, jitter=0.0),
            ),
            Identity(
                run=TERMS.run,
                learner_id=EAST,
                incarnation=Incarnation(incarnation),
                layout=TERMS.layout,
                settings=TERMS.settings,
                initial_digests=TERMS.initial_digests,
            ),
            [FragmentState(version=version(0), resync=0, step_lo=LocalStep(0), tokens_lo=0)] * 2,
            local_step=LocalStep(0),
            tokens=0,
            unit=0,
            rng=random.Random(1),
        )
        self.now_s = 0.0
        self.step = 0

    def tell(self, event: LearnerEvent, after_s: float = 0.0) -> list[LearnerEffect]:
        self.now_s += after_s
        return self.machine.handle(event, self.now_s)

    def hears(self, message: SyncerMessage, after_s: float = 0.0) -> list[LearnerEffect]:
        return self.tell(SyncerSaid(message=message), after_s)

    def joins(self, *versions: Version, started: bool = True, global_step: int = 0) -> list[LearnerEffect]:
        self.tell(Connected())
        return self.hears(
            Welcome(
                incarnation=Incarnation(1),
                term=Term(1),
                epoch=Epoch(0),
                global_step=GlobalStep(global_step),
                anchor=self.step - global_step,
                total_steps=GlobalStep(100),
                versions=versions or (version(0), version(0)),
                next_unit=5,
                shards=("", ""),
                started=started,
            )
        )

    def boundary(
        self,
        *snapshots: FragmentId,
        installed: tuple[Installed, ...] = (),
        steps: int = 1,
        after_s: float = 1.0,
        step_time_s: float = 1.0,
    ) -> list[LearnerEffect]:
        self.step += steps
        return self.tell(
            BoundaryPassed(
                local_step=LocalStep(self.step),
                tokens=self.step * BATCH_TOKENS,
                unit=self.step,
                step_time_s=step_time_s,
                loss=None,
                learning_rate=0.1,
                installed=installed,
                snapshots=tuple(SnapshotTaken(fragment_id=fragment) for fragment in snapshots),
            ),
            after_s,
        )

    def uploads(self, fragment_id: FragmentId = F0, attempt: int = 1, round_id: int = 1) -> ContributionHeader:
        """A pull, its snapshot at the next boundary, and its upload under way."""
        self.hears(pull(fragment_id, attempt, round_id))
        started = [effect for effect in self.boundary(fragment_id) if isinstance(effect, StartUpload)]
        assert len(started) == 1
        return started[0].header


def pull(fragment_id: FragmentId = F0, attempt: int = 1, round_id: int = 1, count: int = 0) -> Pull:
    return Pull(
        round_id=RoundId(round_id),
        attempt=attempt,
        fragment_id=fragment_id,
        version=version(count),
        window_s=4.0,
        upload_s=1.0,
    )


def update(
    to_count: int,
    *,
    from_count: int | None = None,
    fragment_id: FragmentId = F0,
    resync: int = 0,
    merged: tuple[MergedNote, ...] = (),
) -> UpdateHeader:
    segment = UpdateSegment(
        kind=SegmentKind.VALUE if from_count is None else SegmentKind.DIFFERENCE,
        from_version=version(to_count if from_count is None else from_count),
        to_version=version(to_count),
        digest="d",
        codec="int4",
        codes_bytes=500,
        scales_bytes=16,
        merged=merged,
    )
    return UpdateHeader(fragment_id=fragment_id, resync=resync, segments=(segment,))


def installed(to_count: int, step: int, *, fragment_id: FragmentId = F0, resync: int = 0) -> Installed:
    return Installed(
        fragment_id=fragment_id,
        version=version(to_count),
        resync=resync,
        step_lo=LocalStep(step),
        tokens_lo=step * BATCH_TOKENS,
    )


def applied(to_count: int, *, fragment_id: FragmentId = F0, resync: int = 0) -> UpdateApplied:
    return UpdateApplied(fragment_id=fragment_id, version=version(to_count), resync=resync)


def said(effects: list[LearnerEffect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendToSyncer)]


def of(kind: type, things: list[object] | list[LearnerEffect]) -> list[object]:
    return [thing for thing in things if isinstance(thing, kind)]


@pytest.fixture
def uplink() -> Uplink:
    """Joined, started, at its first step."""
    uplink = Uplink()
    uplink.machine.start()
    uplink.joins()
    return uplink


# ---- connecting ----------------------------------------------------------------------------------


def test_it_knocks_says_hello_and_reports() -> None:
    uplink = Uplink()
    assert uplink.machine.start() == [Connect()]
    hello = of(Hello, said(uplink.tell(Connected())))[0]
    assert isinstance(hello, Hello)
    assert hello.incarnation == 0
    effects = uplink.joins(started=False)
    assert of(Report, said(effects))
    assert SetPace(anchor=0, total_steps=GlobalStep(100), next_unit=5) in effects
    assert not of(AllowSteps, effects), "no step before the start"
    assert uplink.hears(Start(global_step=GlobalStep(0), anchor=0)) == [AllowSteps(until_step=LocalStep(100))]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (RefusalReason.FENCED, EXIT_AUTH),
        (RefusalReason.UNKNOWN_LEARNER, EXIT_AUTH),
        (RefusalReason.OTHER_LAYOUT, EXIT_CONFIG),
        (RefusalReason.PROTOCOL_VERSION, EXIT_CONFIG),
    ],
)
def test_who_is_refused_exits_and_does_not_knock_again(reason: RefusalReason, code: int) -> None:
    uplink = Uplink()
    uplink.machine.start()
    effects = uplink.hears(Refused(reason=reason, detail="no"))
    assert effects == [ExitLearner(reason=f"refused ({reason}): no", exit_code=code)]
    assert uplink.machine.deadline_s() is None


def test_whose_certificate_is_refused_exits() -> None:
    effects = Uplink().tell(ConnectionLost(reason="certificate", refused=True))
    assert effects == [ExitLearner(reason="certificate", exit_code=EXIT_AUTH)]


def test_at_the_end_it_exits_in_peace(uplink: Uplink) -> None:
    effects = uplink.hears(Stop(reason="the last step is reached", global_step=GlobalStep(9)))
    assert effects == [ExitLearner(reason="the last step is reached", exit_code=EXIT_OK)]
    assert not uplink.tell(TimerFired(), after_s=99.0)


def test_it_knocks_again_later_and_later_and_shows_why(uplink: Uplink) -> None:
    effects = uplink.tell(ConnectionLost(reason="reset", refused=False))
    assert ShowReason(topic="syncer", text="the syncer can't be reached: reset") in effects
    assert uplink.machine.deadline_s() == 1.0
    assert uplink.tell(TimerFired(), after_s=1.0) == [Connect()]
    uplink.tell(ConnectionLost(reason="refused", refused=False))
    assert uplink.machine.deadline_s() == 3.0
    uplink.tell(TimerFired(), after_s=2.0)
    assert ShowReason(topic="syncer", text="") in uplink.joins()


def test_a_reconnect_presents_its_incarnation_and_keeps_its_data_position(uplink: Uplink) -> None:
    uplink.tell(ConnectionLost(reason="reset", refused=False))
    hello = of(Hello, said(uplink.tell(Connected())))[0]
    assert isinstance(hello, Hello)
    assert hello.incarnation == uplink.machine.incarnation == 1
    assert not of(SetPace, uplink.joins())


def test_a_silent_learner_repeats_its_report(uplink: Uplink) -> None:
    assert uplink.machine.deadline_s() == 3.0
    assert of(Report, said(uplink.tell(TimerFired(), after_s=3.0)))
    assert uplink.machine.deadline_s() == 6.0


def test_without_a_session_nothing_is_said() -> None:
    uplink = Uplink()
    uplink.machine.start()
    assert not said(uplink.boundary())


# ---- steps ---------------------------------------------------------------------------------------


def test_a_joiner_takes_no_step_before_it_has_what_was_there_at_its_welcome() -> None:
    uplink = Uplink()
    uplink.machine.start()
    effects = uplink.joins(version(3), version(0), global_step=12)
    assert not of(AllowSteps, effects)
    uplink.tell(UpdateArrived(header=update(3)))
    uplink.tell(applied(3))
    effects = uplink.boundary(installed=(installed(3, 0),), steps=0)
    assert AllowSteps(until_step=LocalStep(88)) in effects, "up to the last step of the run"


def test_an_uplink_that_was_started_again_tells_its_training_loop_the_pace_whatever_it_is() -> None:
    # The loop may go by an anchor that the uplink before was told; the new one can't know that.
    uplink = Uplink(incarnation=1)
    uplink.machine.start()
    assert of(SetPace, uplink.joins()) == [SetPace(anchor=0, total_steps=GlobalStep(100), next_unit=None)]


def test_the_pace_follows_the_step_last_heard(uplink: Uplink) -> None:
    uplink.boundary(steps=7)
    effects = uplink.hears(Pace(global_step=GlobalStep(5), anchor=1))
    assert of(SetPace, effects) == [SetPace(anchor=2, total_steps=GlobalStep(100), next_unit=None)]
    assert not uplink.hears(Pace(global_step=GlobalStep(5), anchor=1))


HOLDS = ShowReason(topic="end", text="holds: the run's 100 steps are done, waits for the last rounds")


def test_at_the_last_step_it_holds_and_says_so_until_its_estimate_is_corrected(uplink: Uplink) -> None:
    assert HOLDS not in uplink.boundary(steps=99)
    effects = uplink.boundary(steps=1)
    assert HOLDS in effects
    assert not of(AllowSteps, effects), "no step beyond was ever allowed"
    effects = uplink.hears(Pace(global_step=GlobalStep(90), anchor=0))
    assert AllowSteps(until_step=LocalStep(110)) in effects
    assert ShowReason(topic="end", text="") in effects
    assert HOLDS in uplink.hears(Pace(global_step=GlobalStep(100), anchor=0))


def test_a_held_learner_goes_on_reporting_and_answering(uplink: Uplink) -> None:
    uplink.boundary(steps=100)
    assert of(Report, said(uplink.tell(TimerFired(), after_s=3.0)))
    assert RequestSnapshot(fragment_id=F0) in uplink.hears(pull(F0))
    effects = uplink.boundary(F0, steps=0)
    assert of(StartUpload, effects)
    assert not of(AllowSteps, effects), "it has work to give"


def test_a_held_learner_that_has_nothing_to_give_takes_one_step_for_it(uplink: Uplink) -> None:
    uplink.boundary(steps=100)
    uplink.tell(UpdateArrived(header=update(1)))
    uplink.tell(applied(1))
    uplink.boundary(installed=(installed(1, 100),), steps=0)
    uplink.hears(pull(count=1))
    effects = uplink.boundary(F0, steps=0)
    assert of(Declined, said(effects))
    assert AllowSteps(until_step=LocalStep(101)) in effects
    uplink.boundary(steps=1)
    uplink.hears(pull(count=1, attempt=2))
    effects = uplink.boundary(F0, steps=0)
    assert of(StartUpload, effects)
    assert not of(AllowSteps, effects), "one, and not another"


def test_in_lockstep_it_holds_until_what_is_due_is_there() -> None:
    uplink = Uplink(overlap_steps=0)
    uplink.machine.start()
    assert AllowSteps(until_step=LocalStep(2)) in uplink.joins()
    assert not of(AllowSteps, uplink.boundary(steps=2)), "fragment 1 is due at 2"
    uplink.tell(UpdateArrived(header=update(1, fragment_id=F1)))
    uplink.tell(applied(1, fragment_id=F1))
    effects = uplink.boundary(installed=(installed(1, 2, fragment_id=F1),), steps=0)
    assert AllowSteps(until_step=LocalStep(4)) in effects


def test_in_lockstep_who_has_nothing_to_contribute_takes_a_step_more() -> None:
    uplink = Uplink(overlap_steps=0)
    uplink.machine.start()
    uplink.joins()
    uplink.boundary(steps=2)
    uplink.tell(UpdateArrived(header=update(0, fragment_id=F1, resync=1)))
    uplink.tell(applied(0, fragment_id=F1, resync=1))
    effects = uplink.boundary(installed=(installed(0, 2, fragment_id=F1, resync=1),), steps=0)
    assert AllowSteps(until_step=LocalStep(3)) in effects


# ---- uploads -------------------------------------------------------------------------------------


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
            next_unit=0,
            shards=("", ""),
            started=True,
        )
    )
    uplink.boundary()
    assert of(RequestSnapshot, uplink.hears(pull(F0)))
    assert of(RequestSnapshot, uplink.hears(pull(F1)))


def test_a_hello_that_waited_is_no_long_round_trip(uplink: Uplink) -> None:
    """A syncer that waits for disk space answers late; what it acknowledges quickly is no further away than that."""
    link = uplink.machine.context.link
    link.rtt_s = 3600.0
    uplink.boundary()
    header = uplink.uploads()
    uplink.now_s += 0.25
    uplink.hears(Acknowledged(fragment_id=F0, step_lo=header.key.step_lo, step_hi=header.step_hi))
    assert link.rtt_s == 0.25


# ---- updates -------------------------------------------------------------------------------------


def test_an_update_is_applied_acknowledged_and_installed(uplink: Uplink) -> None:
    header = update(1, from_count=0)
    assert uplink.tell(UpdateArrived(header=header)) == [ApplyUpdate(header=header)]
    effects = uplink.tell(applied(1))
    assert UpdateReceived(fragment_id=F0, version=version(1), resync=0) in said(effects)
    assert InstallUpdate(fragment_id=F0, version=version(1), resync=0, merged_hi=None) in effects
    report = of(Report, said(uplink.boundary()))[0]
    assert isinstance(report, Report)
    assert (report.fragments[0].version, report.fragments[0].pending) == (version(0), version(1))
    report = of(Report, said(uplink.boundary(installed=(installed(1, 2),))))[0]
    assert isinstance(report, Report)
    assert (report.fragments[0].version, report.fragments[0].pending) == (version(1), None)
    assert report.fragments[0].step_lo == 2


def test_an_update_tells_what_became_of_ones_own_work(uplink: Uplink) -> None:
    uplink.uploads()
    mine = MergedNote(learner_id=EAST, incarnation=Incarnation(1), step_lo=LocalStep(0), step_hi=LocalStep(1))
    uplink.tell(UpdateArrived(header=update(1, from_count=0, merged=(mine,))))
    install = of(InstallUpdate, uplink.tell(applied(1)))[0]
    assert isinstance(install, InstallUpdate)
    assert install.merged_hi == 1


@pytest.mark.parametrize(
    "header",
    [update(0), update(1, from_count=0), update(2, from_count=0), update(1, resync=0)],
    ids=["old", "known", "from elsewhere", "known value"],
)
def test_what_is_known_or_does_not_fit_is_only_acknowledged(uplink: Uplink, header: UpdateHeader) -> None:
    uplink.tell(UpdateArrived(header=update(1, from_count=0)))
    uplink.tell(applied(1))
    effects = uplink.tell(UpdateArrived(header=header))
    assert effects == [SendToSyncer(message=UpdateReceived(fragment_id=F0, version=version(1), resync=0))]


def test_a_second_update_waits_for_the_first_to_be_told(uplink: Uplink) -> None:
    uplink.tell(UpdateArrived(header=update(1, from_count=0)))
    assert not uplink.tell(UpdateArrived(header=update(2)))


def test_an_update_that_does_not_decode_is_asked_for_as_the_value(uplink: Uplink) -> None:
    uplink.tell(UpdateArrived(header=update(1, from_count=0)))
    effects = uplink.tell(UpdateBroken(fragment_id=F0, version=version(1), reason=RefusalReason.DIGEST))
    assert said(effects) == [ResyncRequest(fragment_id=F0, reason=RefusalReason.DIGEST)]
    assert of(ApplyUpdate, uplink.tell(UpdateArrived(header=update(1, resync=1))))


def test_a_resync_is_installed_though_the_version_is_there(uplink: Uplink) -> None:
    uplink.tell(UpdateArrived(header=update(0, resync=1)))
    effects = uplink.tell(applied(0, resync=1))
    assert InstallUpdate(fragment_id=F0, version=version(0), resync=1, merged_hi=None) in effects
    uplink.boundary(installed=(installed(0, 1, resync=1),))
    header = uplink.uploads()
    assert header.key.step_lo == 1
