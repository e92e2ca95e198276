"""When a round closes: against a dumb model, and laws that hold whatever was measured."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.protocol.quorum import Estimates, GracePolicy, Response, ResponseTimes, RoundView, Verdict, decide
from wan_diloco.units import LearnerId

NAMES = [LearnerId(name) for name in "abcd"]
SECONDS = st.floats(0, 100)
MAYBE = st.none() | st.floats(0.01, 10)


@st.composite
def cases(draw: st.DrawFn) -> tuple[GracePolicy, Estimates, RoundView, float]:
    policy = GracePolicy(
        quorum=draw(st.integers(1, 4)),
        overlap_steps=draw(st.integers(0, 3)),
        safety=draw(st.sampled_from([0.0, 0.5, 0.9])),
        bound_steps=draw(st.floats(0.5, 6)),
    )
    known = draw(st.sets(st.sampled_from(NAMES)))
    responses = {}
    for name in sorted(known):
        mean_s = draw(SECONDS)
        responses[name] = Response(mean_s=mean_s, usual_s=mean_s + draw(SECONDS))
    fresh = draw(st.sets(st.sampled_from(NAMES)))
    awaited = draw(st.sets(st.sampled_from(NAMES))) - fresh
    opened_s = draw(SECONDS)
    quorate_s = opened_s + draw(SECONDS) if len(fresh) >= policy.quorum else None
    extra_s = {name: draw(SECONDS) for name in sorted(awaited) if draw(st.booleans())}
    view = RoundView(
        opened_s=opened_s,
        quorate_s=quorate_s,
        fresh=frozenset(fresh),
        awaited=frozenset(awaited),
        extra_s=extra_s,
    )
    now_s = (opened_s if quorate_s is None else quorate_s) + draw(SECONDS)
    return policy, Estimates(step_s=draw(MAYBE), sync_s=draw(SECONDS), responses=responses), view, now_s


def dumb_close_s(policy: GracePolicy, estimates: Estimates, view: RoundView) -> float | None:
    """The time at which a quorate round closes by itself, worked out with a list of all limits."""
    if view.quorate_s is None:
        return None
    if not view.awaited or policy.safety == 0:
        return view.quorate_s
    if estimates.step_s is None:
        return inf
    wait = view.quorate_s - view.opened_s
    later = {name: view.extra_s.get(name, 0.0) for name in view.awaited}
    bound = max(0.0, policy.bound_steps * estimates.step_s + max(later.values()) - wait)
    if not all(name in estimates.responses for name in view.awaited):
        return view.quorate_s + bound
    graces = [0.0]
    graces.append(
        min(estimates.step_s, policy.safety * (policy.overlap_steps * estimates.step_s - wait - estimates.sync_s))
    )
    graces += [
        estimates.responses[name].usual_s + later[name] - wait
        for name in view.awaited
        if estimates.responses[name].mean_s + later[name] - wait <= bound
    ]
    return view.quorate_s + min(bound, max(graces))


@given(cases())
def test_it_decides_as_the_dumb_model(case: tuple[GracePolicy, Estimates, RoundView, float]) -> None:
    policy, estimates, view, now_s = case
    close_s = dumb_close_s(policy, estimates, view)
    verdict = decide(policy, estimates, view, now_s)
    assert verdict.close == (close_s is not None and now_s >= close_s)
    if not verdict.close:
        assert verdict.close_s == close_s
    assert verdict.reason


@given(cases())
def test_it_never_closes_below_the_quorum(case: tuple[GracePolicy, Estimates, RoundView, float]) -> None:
    policy, estimates, view, now_s = case
    for count in range(policy.quorum):
        few = replace(view, fresh=frozenset(sorted(view.fresh)[:count]))
        verdict = decide(policy, estimates, few, now_s)
        assert (verdict.close, verdict.close_s) == (False, None)
        assert f"{len(few.fresh)} of {policy.quorum}" in verdict.reason


@given(cases())
def test_once_quorate_it_never_waits_beyond_the_bound(case: tuple[GracePolicy, Estimates, RoundView, float]) -> None:
    policy, estimates, view, _ = case
    if view.quorate_s is None or estimates.step_s is None:
        return
    # What the syncer's own cap adds to an answer isn't the learner's, and makes the bound later.
    granted_s = max((view.extra_s.get(learner, 0.0) for learner in view.awaited), default=0.0)
    latest_s = max(view.quorate_s, view.opened_s + policy.bound_steps * estimates.step_s + granted_s)
    assert decide(policy, estimates, view, latest_s + 1e-6).close


@given(cases())
def test_it_closes_at_once_when_all_are_in_or_no_grace_is_wanted(
    case: tuple[GracePolicy, Estimates, RoundView, float],
) -> None:
    policy, estimates, view, _ = case
    if view.quorate_s is None:
        return
    assert decide(policy, estimates, replace(view, awaited=frozenset()), view.quorate_s).close
    assert decide(replace(policy, safety=0.0), estimates, view, view.quorate_s).close


def closes(case: tuple[GracePolicy, Estimates, RoundView, float], view: RoundView, now_s: float) -> Verdict:
    policy, estimates, _, _ = case
    return decide(policy, estimates, view, now_s)


@given(cases(), SECONDS)
def test_what_closes_now_also_closes_later_and_with_more_in(
    case: tuple[GracePolicy, Estimates, RoundView, float], later_s: float
) -> None:
    _, _, view, now_s = case
    if not closes(case, view, now_s).close:
        return
    assert closes(case, view, now_s + later_s).close
    for name in view.awaited:
        more = replace(view, fresh=view.fresh | {name}, awaited=view.awaited - {name})
        assert closes(case, more, now_s).close
        assert closes(case, replace(view, awaited=view.awaited - {name}), now_s).close


@given(st.lists(SECONDS, min_size=1, max_size=30))
def test_usual_responses_lie_within_what_was_seen(seen: list[float]) -> None:
    times = ResponseTimes()
    for response_s in seen:
        times.observe(NAMES[0], response_s)
    estimate = times.estimates()[NAMES[0]]
    assert min(seen) - 1e-9 <= estimate.mean_s <= max(seen) + 1e-9
    assert estimate.mean_s <= estimate.usual_s <= estimate.mean_s + 2 * (max(seen) + 1e-9)
    times.forget(NAMES[0])
    assert times.estimates() == {}
