"""The learner's machine, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.protocol import version
from tests.support.uplink import F0, F1, Uplink, applied, installed, of, pull, said, update
from wan_diloco.errors import EXIT_AUTH, EXIT_CONFIG, EXIT_OK
from wan_diloco.protocol.events import (
    AllowSteps,
    BoundaryPassed,
    Connect,
    Connected,
    ConnectionLost,
    ExitLearner,
    RequestSnapshot,
    SetPace,
    ShowReason,
    StartUpload,
    TimerFired,
    UpdateArrived,
)
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionRefused,
    Declined,
    Hello,
    Pace,
    Pull,
    RefusalReason,
    Refused,
    Report,
    Start,
    Stop,
)
from wan_diloco.protocol.rejoin_messages import NoDonor
from wan_diloco.units import FragmentId, GlobalStep, LocalStep, ShardId

# ---- connecting ----------------------------------------------------------------------------------


def test_it_knocks_says_hello_and_reports() -> None:
    uplink = Uplink()
    assert uplink.machine.start() == [Connect()]
    hello = of(Hello, said(uplink.tell(Connected())))[0]
    assert isinstance(hello, Hello)
    assert hello.incarnation == 0
    effects = uplink.joins(started=False)
    assert of(Report, said(effects))
    assert SetPace(anchor=0, total_steps=GlobalStep(100), lease=Lease(shard=ShardId(0), first_unit=5)) in effects
    assert not of(AllowSteps, effects), "no step before the start"
    (why,) = of(ShowReason, effects)[1:]
    assert why.topic == "step"
    assert why.text == "no step yet: the run starts when all regions are there, or run.start_timeout is over"
    assert uplink.hears(Start(global_step=GlobalStep(0), anchor=0)) == [
        AllowSteps(until_step=LocalStep(100)),
        ShowReason(topic="step", text=""),
    ]


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
    assert ShowReason(topic="step", text="no step yet: takes the published values") in effects
    assert not of(AllowSteps, uplink.hears(NoDonor(reason="the test has none")))
    uplink.tell(UpdateArrived(header=update(3)))
    uplink.tell(applied(3))
    effects = uplink.boundary(installed=(installed(3, 0),), steps=0)
    assert AllowSteps(until_step=LocalStep(88)) in effects, "up to the last step of the run"


def test_an_uplink_that_was_started_again_tells_its_training_loop_the_pace_whatever_it_is() -> None:
    # The loop may go by an anchor that the uplink before was told; the new one can't know that.
    uplink = Uplink(incarnation=1)
    uplink.machine.start()
    assert of(SetPace, uplink.joins()) == [SetPace(anchor=0, total_steps=GlobalStep(100), lease=None)]


def test_the_pace_follows_the_step_last_heard(uplink: Uplink) -> None:
    uplink.boundary(steps=7)
    effects = uplink.hears(Pace(global_step=GlobalStep(5), anchor=1))
    assert of(SetPace, effects) == [SetPace(anchor=2, total_steps=GlobalStep(100), lease=None)]
    assert not uplink.hears(Pace(global_step=GlobalStep(5), anchor=1))


HOLDS = ShowReason(topic="step", text="holds: the run's 100 steps are done, waits for the last rounds")


def test_at_the_last_step_it_holds_and_says_so_until_its_estimate_is_corrected(uplink: Uplink) -> None:
    assert HOLDS not in uplink.boundary(steps=99)
    effects = uplink.boundary(steps=1)
    assert HOLDS in effects
    assert not of(AllowSteps, effects), "no step beyond was ever allowed"
    effects = uplink.hears(Pace(global_step=GlobalStep(90), anchor=0))
    assert AllowSteps(until_step=LocalStep(110)) in effects
    assert ShowReason(topic="step", text="") in effects
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


def test_in_lockstep_whose_losses_were_not_finite_goes_on_until_one_is() -> None:
    """It would else hold for ever without work, well again or not, and the others with it."""
    uplink = Uplink(overlap_steps=0)
    uplink.machine.start()
    uplink.joins()
    effects = uplink.tell(barren_boundary(2))
    assert AllowSteps(until_step=LocalStep(3)) in effects
    assert AllowSteps(until_step=LocalStep(4)) in uplink.tell(barren_boundary(3))
    uplink.step = 3
    assert not of(AllowSteps, uplink.boundary(steps=1)), "it has work, and holds"


def barren_boundary(step: int) -> BoundaryPassed:
    return BoundaryPassed(
        local_step=LocalStep(step),
        tokens=0,
        unit=step,
        step_time_s=1.0,
        loss=None,
        learning_rate=0.1,
        installed=(),
        snapshots=(),
    )


@pytest.mark.parametrize(
    "message",
    [
        replace(pull(), fragment_id=FragmentId(2)),
        Acknowledged(fragment_id=FragmentId(2), step_lo=LocalStep(0), step_hi=LocalStep(1)),
        ContributionRefused(
            fragment_id=FragmentId(2),
            step_lo=LocalStep(0),
            step_hi=LocalStep(1),
            reason=RefusalReason.GARBAGE,
            detail="there is no fragment 2",
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_words_about_a_fragment_that_it_has_not_change_nothing(
    uplink: Uplink, message: Pull | Acknowledged | ContributionRefused
) -> None:
    assert uplink.hears(message) == []
