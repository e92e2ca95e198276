"""Every refusal is counted, and said; a flood of them is neither a flood of events nor of lines."""

from __future__ import annotations

from tests.support.protocol import EAST, contribution
from wan_diloco.clock import ManualClock
from wan_diloco.protocol.events import SendToLearner, SessionId, TimerFired, UploadFailed
from wan_diloco.protocol.messages import ContributionRefused, RefusalReason, Refused
from wan_diloco.syncer.refusals import Refusals
from wan_diloco.units import FragmentId, LocalStep


def made() -> tuple[Refusals, ManualClock, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    clock = ManualClock()
    return Refusals(clock, lambda name, detail: told.append((name, detail))), clock, told


def test_a_flood_is_counted_whole_and_said_once_in_a_while() -> None:
    refusals, clock, told = made()
    for number in range(1000):
        refusals.call("1.2.3.4:5", RefusalReason.GARBAGE, f"byte {number}")
    refusals.call("1.2.3.4:6", RefusalReason.NO_HELLO, "no Hello within 30 s")
    assert refusals.take() == [(RefusalReason.GARBAGE, 1000), (RefusalReason.NO_HELLO, 1)]
    assert refusals.take() == []
    assert told == [
        ("call_refused", "1.2.3.4:5: garbage: byte 0"),
        ("call_refused", "1.2.3.4:6: no_hello: no Hello within 30 s"),
    ]
    clock.advance(11.0)
    refusals.call("1.2.3.4:5", RefusalReason.GARBAGE, "byte 1000")
    assert told[2:] == [("call_refused", "1.2.3.4:5: garbage: byte 1000 (and 999 more of its kind before)")]


def test_what_the_machine_refuses_is_said_with_its_reason() -> None:
    refusals, _, told = made()
    late = ContributionRefused(
        fragment_id=FragmentId(0),
        step_lo=LocalStep(0),
        step_hi=LocalStep(4),
        reason=RefusalReason.LATE,
        detail="too late",
    )
    other = Refused(reason=RefusalReason.OTHER_RUN, detail="another run")
    effects = [SendToLearner(session=SessionId(3), message=message) for message in (late, other)]
    refusals.decided(TimerFired(), effects, lambda session: f"number {session}")
    bad = UploadFailed(
        session=SessionId(3), header=contribution(), reason=RefusalReason.NON_FINITE, detail="a scale is nan"
    )
    refusals.decided(bad, effects, lambda session: f"number {session}")
    assert told == [
        ("contribution_rejected", "number 3: late: too late"),
        ("learner_refused", "number 3: other_run: another run"),
        ("contribution_rejected", f"{EAST}: non_finite: a scale is nan"),
    ]
    assert refusals.take() == [], "the machine counts its own"
