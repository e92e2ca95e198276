"""When a round closes. The one place that decides it.

Decoupled DiLoCo (arXiv 2604.21428, eq. 3): an update is only due tau steps after its round opens, so what
isn't spent on reaching the quorum and on moving bytes may be spent waiting for more learners, at no cost:
    slack = tau * step - (quorum wait + sync),     grace <= gamma * slack,  gamma < 1, at most one step.
To that the design adds a floor, the usual spread of arrivals, because with K = 1 and no real grace a fast
learner would merge alone round after round; and a bound on the work that overwriting may cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from wan_diloco.units import LearnerId

__all__ = ["Estimates", "GracePolicy", "Response", "ResponseTimes", "RoundView", "Verdict", "decide", "smooth"]

# Weight of a new observation in all smoothed durations, as TCP smooths round trips (RFC 6298).
_SMOOTHING = 0.125
_DEVIATION_SMOOTHING = 0.25
# TCP adds four. Here each round would be held open for as long, so that all that follow are later: with learners of a
# third of the others' speed, twice as many of their answers were late.
_DEVIATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GracePolicy:
    """The operator's settings.

    Attributes:
        quorum: K.
        overlap_steps: tau.
        safety: gamma, 0..1; 0 means no grace whatever.
        bound_steps: A round that has its quorum is held open for at most this many steps in all: the
            stated share of work that installing may overwrite.
    """

    quorum: int
    overlap_steps: int
    safety: float
    bound_steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A learner's time from a pull to its contribution in the journal.

    Attributes:
        mean_s: On average.
        usual_s: Nearly always within this.
    """

    mean_s: float
    usual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What has been measured so far.

    Attributes:
        step_s: Duration of a global step; None before the first estimate.
        sync_s: Merge and downlink: from a round's close to the installed update.
        responses: For each learner, how long after a pull its contribution is in the journal, late ones
            counted.
    """

    step_s: float | None
    sync_s: float
    responses: Mapping[LearnerId, Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """An open round, as far as closing it is concerned.

    Attributes:
        opened_s: When its current attempt began.
        quorate_s: When it had K fresh contributions; None before.
        fresh: Learners whose fresh contribution is in the journal.
        awaited: Live learners that were asked and have neither contributed nor declined.
        extra_s: By how much the grant of each that was asked makes its answer later; not in its response time.
    """

    opened_s: float
    quorate_s: float | None
    fresh: AbstractSet[LearnerId]
    awaited: AbstractSet[LearnerId]
    extra_s: Mapping[LearnerId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to close now; if not, until when to wait at the most, and why.

    Attributes:
        close_s: When the round will close if nothing happens before; None while only arrivals can.
        grace_s: The wait after quorum that was granted.
        reason: For the operator.
    """

    close: bool
    close_s: float | None
    grace_s: float
    reason: str


def decide(policy: GracePolicy, estimates: Estimates, view: RoundView, now_s: float) -> Verdict:
    """Close, wait for arrivals, or wait until a time."""
    if len(view.fresh) < policy.quorum or view.quorate_s is None:
        names = ", ".join(sorted(view.awaited)) or "nobody"
        text = f"{len(view.fresh)} of {policy.quorum} learners, waiting for {names}"
        return Verdict(close=False, close_s=None, grace_s=0.0, reason=text)
    if not view.awaited:
        return Verdict(close=True, close_s=now_s, grace_s=0.0, reason="everybody is in")
    grace_s = _grace_s(policy, estimates, view)
    close_s = view.quorate_s + grace_s
    if now_s >= close_s:
        return Verdict(close=True, close_s=close_s, grace_s=grace_s, reason="the grace is over")
    names = ", ".join(sorted(view.awaited))
    return Verdict(close=False, close_s=close_s, grace_s=grace_s, reason=f"in grace, waiting for {names}")


def _grace_s(policy: GracePolicy, estimates: Estimates, view: RoundView) -> float:
    assert view.quorate_s is not None
    if policy.safety == 0:
        return 0.0
    waited_s = view.quorate_s - view.opened_s
    if estimates.step_s is None:
        # Nothing is known yet, so there is no bound in seconds either: everybody is waited for. The
        # first report of any learner that has taken a step ends this state.
        return float("inf")
    extra_s = {learner: view.extra_s.get(learner, 0.0) for learner in view.awaited}
    # Where the syncer's own cap makes answers late, the bound is later too: closing without them would only mean that
    # whoever was first merges alone, in each round another.
    bound_s = max(0.0, policy.bound_steps * estimates.step_s + max(extra_s.values()) - waited_s)
    if any(learner not in estimates.responses for learner in view.awaited):
        return bound_s
    slack_s = policy.overlap_steps * estimates.step_s - waited_s - estimates.sync_s
    free_s = min(estimates.step_s, policy.safety * slack_s)
    # A learner that on average needs longer than the bound is not worth waiting for: it can't make it,
    # and the wait would cost everybody in every round. Its late contributions ride along in the next one.
    responses = [(estimates.responses[learner], extra_s[learner] - waited_s) for learner in view.awaited]
    floor_s = [response.usual_s + late_s for response, late_s in responses if response.mean_s + late_s <= bound_s]
    return min(bound_s, max(0.0, free_s, *floor_s))


class ResponseTimes:
    """How long each learner's contributions usually take; mean plus deviations, as RFC 6298 does it.

    Owner: the syncer's machine.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._mean_s: dict[LearnerId, float] = {}
        self._deviation_s: dict[LearnerId, float] = {}

    def observe(self, learner_id: LearnerId, response_s: float) -> None:
        """A contribution came in that long after its pull, in time or late."""
        mean_s = self._mean_s.get(learner_id)
        if mean_s is None:
            self._mean_s[learner_id] = response_s
            self._deviation_s[learner_id] = response_s / 2
            return
        error_s = response_s - mean_s
        self._mean_s[learner_id] = mean_s + _SMOOTHING * error_s
        self._deviation_s[learner_id] += _DEVIATION_SMOOTHING * (abs(error_s) - self._deviation_s[learner_id])

    def forget(self, learner_id: LearnerId) -> None:
        """A new life may run somewhere else."""
        self._mean_s.pop(learner_id, None)
        self._deviation_s.pop(learner_id, None)

    def estimates(self) -> dict[LearnerId, Response]:
        """What is known of each learner."""
        return {
            learner: Response(mean_s=mean_s, usual_s=mean_s + _DEVIATIONS * self._deviation_s[learner])
            for learner, mean_s in self._mean_s.items()
        }


def smooth(old: float | None, new: float) -> float:
    """Exponential moving average with the coefficient of this module."""
    return new if old is None else old + _SMOOTHING * (new - old)
