"""What a person is shown of a run: values picked out of the syncer's status, and one line of text of them.

Pure, and forgiving about what a status lacks: a display must not end a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from wan_diloco.cli.history import History
from wan_diloco.units import format_count, format_duration, format_size

__all__ = ["RegionView", "RunView", "facts", "lagging", "progress_line", "region_cells", "view_of"]

# Whoever is in fewer of the rounds is named: its link or its machine doesn't keep up.
_SHARE_MIN: Final = 0.5
# A trainer that takes no step for so long, and for so many of its usual steps, while others do, hangs.
_STANDING_MIN_S: Final = 20.0
_STANDING_STEPS: Final = 10
# What the first may take, before anything is known.
_FIRST_STEP_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionView:
    """One region as it is shown.

    Attributes:
        state: "live", "not connected", "away" (connected, and silent for its lease), "done" after the run's end, or how
            its process is, where that says more.
        since_s: How long it has been in that state.
        loss: Of its newest step, nats a token.
        merged_share: In how many of the rounds of the last minute it was, 0 to 1.
        uplink_bytes, downlink_bytes: Cumulative over the run.
        restarts: How often its process was started again.
        standing_s: For how long it has taken no step, where that is longer than it should be; 0 elsewhere.
    """

    name: str
    state: str
    since_s: float
    local_step: int | None = None
    tokens: int | None = None
    loss: float | None = None
    step_time_s: float | None = None
    merged_share: float | None = None
    uplink_bytes: int | None = None
    downlink_bytes: int | None = None
    restarts: int = 0
    standing_s: float = 0.0

    @property
    def live(self) -> bool:
        """Whether the syncer counts it among the live."""
        return self.state == "live"

    @property
    def lags(self) -> bool:
        """Whether it is there, and yet seldom merged."""
        return self.live and self.merged_share is not None and self.merged_share < _SHARE_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it is shown.

    Attributes:
        published_loss: Of the published model at its last evaluation, nats a byte.
        published_step: The global step of that model.
        participation: 0 to 1.
        waiting: For whom or what is waited and why, one sentence each.
        ending: Whether the processes were told to end, so that no region trains on.
        ended: Whether the run came to its end, and only its result is still made.
    """

    global_step: int | None = None
    total_steps: int | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    published_loss: float | None = None
    published_step: int | None = None
    rounds: int | None = None
    participation: float | None = None
    regions: tuple[RegionView, ...] = ()
    waiting: tuple[str, ...] = ()
    ending: bool = False
    ended: bool = False


def view_of(
    status: Mapping[str, Any] | None,
    *,
    answering: bool,
    processes: Mapping[str, tuple[str, int]],
    history: History,
    now_s: float,
    ending: bool = False,
) -> RunView:
    """Pick out what is shown.

    Args:
        status: The syncer's last answer; None before the first.
        answering: Whether that is how things are now; if not, what was true of regions may have changed.
        processes: For the syncer and each region, in the order to show: the condition of its process, and restarts.
        history: Remembers from view to view.
        now_s: The watcher's clock.
        ending: Whether all processes were told to end.
    """
    told: Mapping[str, Any] = status or {}
    learners = {str(learner.get("learner_id")): learner for learner in told.get("learners") or ()}
    traffic: Mapping[str, Any] = told.get("traffic") or {}
    standing = _standing(learners, told, history, now_s)
    # Who joined under a name that nobody listed was started elsewhere: of its process only the syncer can tell.
    joined = {name: ("running", 0) for name in sorted(learners) if answering and name not in processes}
    regions = []
    for name, (condition, restarts) in {**processes, **joined}.items():
        if name != "syncer":
            learner = learners.get(name)
            state = _state(condition, learner, answering=answering and not ending, ended=bool(told.get("ended")))
            since_s = history.lasting_s(name, state, now_s)
            share = _share(name, learner or {}, told, history, now_s)
            region = _region(name, state, since_s, restarts, share, learner or {}, traffic.get(name) or {})
            regions.append(replace(region, standing_s=standing.get(name, 0.0) if region.live else 0.0))
    evaluation: Mapping[str, Any] = told.get("evaluation") or {}
    return RunView(
        global_step=told.get("global_step"),
        total_steps=told.get("total_steps"),
        # As in the summary: also what a life trained on that a killed process took with it.
        tokens=round(told.get("trained_tokens") or 0),
        tokens_per_s=told.get("tokens_per_s"),
        published_loss=evaluation.get("nats_per_byte"),
        published_step=evaluation.get("global_step"),
        rounds=told.get("rounds"),
        participation=told.get("participation"),
        regions=tuple(regions),
        waiting=tuple(_ending(processes) if ending else _waiting(told, processes, answering=answering)),
        ending=ending,
        ended=bool(told.get("ended")),
    )


def _standing(
    learners: Mapping[str, Mapping[str, Any]], told: Mapping[str, Any], history: History, now_s: float
) -> dict[str, float]:
    """Who takes no steps though it should, and for how long.

    Its uplink, which is a process of its own, says that it is there, and goes on to say so. Where all stand, they wait
    for something, and that is shown as a reason.
    """
    lasting_s = {
        name: history.lasting_s(f"{name}'s step", str(learner.get("local_step")), now_s)
        for name, learner in learners.items()
    }
    last = told.get("total_steps")
    over = told.get("ended") or (last is not None and (told.get("global_step") or 0) >= last)
    if over or not told.get("started"):
        return {}
    newest_s = min(lasting_s.values(), default=0.0)

    def is_long(name: str) -> bool:
        if learners[name].get("moments") == "":
            return False  # it waits for a peer's, and takes no step before
        usual_s = float(learners[name].get("step_time_s") or 0.0)
        long_s = max(_STANDING_MIN_S, _STANDING_STEPS * usual_s) if usual_s else _FIRST_STEP_S
        return lasting_s[name] > newest_s + long_s

    return {name: lasting_s[name] for name in lasting_s if is_long(name)}


def _share(
    name: str, learner: Mapping[str, Any], told: Mapping[str, Any], history: History, now_s: float
) -> float | None:
    merged, rounds = learner.get("merged_fresh"), told.get("rounds")
    return None if merged is None or rounds is None else history.merged_share(name, merged, rounds, now_s)


def _state(condition: str, learner: Mapping[str, Any] | None, *, answering: bool, ended: bool) -> str:
    """What the process or the syncer knows, whichever says more."""
    if condition != "running":
        return condition
    if learner is None or not learner.get("incarnation"):
        return "starting"
    if not answering:
        return condition
    if not learner.get("connected", True):
        # A process that was started again, or a link that is cut: for the syncer it may be live for a while yet.
        return "done" if ended else "not connected"
    return "live" if learner.get("live") else "away"


def _region(
    name: str,
    state: str,
    since_s: float,
    restarts: int,
    merged_share: float | None,
    learner: Mapping[str, Any],
    traffic: Mapping[str, Any],
) -> RegionView:
    return RegionView(
        name=name,
        state=state,
        since_s=since_s,
        local_step=learner.get("local_step"),
        tokens=learner.get("tokens"),
        loss=learner.get("loss"),
        step_time_s=learner.get("step_time_s"),
        merged_share=merged_share,
        uplink_bytes=traffic.get("uplink_bytes"),
        downlink_bytes=traffic.get("downlink_bytes"),
        restarts=restarts,
    )


def _ending(processes: Mapping[str, tuple[str, int]]) -> list[str]:
    """Who still writes its state."""
    left = [name for name, (condition, _) in processes.items() if condition == "running"]
    return [f"ending, {', '.join(left)} still to go" if left else "ending"]


def _waiting(told: Mapping[str, Any], processes: Mapping[str, tuple[str, int]], *, answering: bool) -> list[str]:
    if not answering and not told:
        return ["the syncer is starting; the first time on a machine that takes a minute"]
    if not answering:
        conditions = {name: condition for name, (condition, _) in processes.items()}
        silent = f"the syncer doesn't answer (it is {conditions.pop('syncer')})"
        return [f"{silent}; regions train on" if "running" in conditions.values() else silent]
    if told.get("ended"):
        share = told.get("evaluated_share")
        done = "" if share is None else f": {share:.0%}"
        return [f"the run has ended; the published model is being evaluated{done}"]
    reasons = {**(told.get("reasons") or {}), **(told.get("waiting") or {})}
    return [text for _, text in sorted(reasons.items()) if text]


def facts(view: RunView) -> list[str]:
    """What there is to say about the run as a whole, in the order of interest."""
    rate = f" ({format_count(view.tokens_per_s)}/s)" if view.tokens_per_s else ""
    said = [
        f"step {_or_dash(view.global_step)}/{_or_dash(view.total_steps)}",
        f"{format_count(view.tokens)} tokens{rate}",
    ]
    if view.published_loss is not None:
        said.append(f"published loss {view.published_loss:.3f} at step {_or_dash(view.published_step)}")
    if view.rounds is not None:
        said.append(f"{view.rounds} rounds")
    if view.participation is not None:
        said.append(f"participation {view.participation:.0%}")
    return said


def progress_line(view: RunView) -> str:
    """A run's progress as one line of plain text; a short one when it ends, since nothing moves then."""
    if view.ending or view.ended:
        return ", ".join([facts(view)[0], *view.waiting])
    said = [*facts(view), f"{sum(region.live for region in view.regions)}/{len(view.regions)} regions"]
    said += [f"{region.name} {region.state} {_lasting(region.since_s)}" for region in view.regions if not region.live]
    said += lagging(view)
    line = ", ".join(said)
    return f"{line} ({'; '.join(view.waiting)})" if view.waiting else line


def lagging(view: RunView) -> list[str]:
    """Of each region that is there and doesn't train or is seldom merged, a few words.

    One that stands hangs in a step, or its machine does; the link or the machine of the other doesn't keep up.
    """
    standing = [
        f"{region.name} has taken no step for {_lasting(region.standing_s)}: its trainer hangs, or is held up"
        for region in view.regions
        if region.standing_s
    ]
    seldom = [
        f"{region.name} in {region.merged_share:.0%} of the last rounds" for region in view.regions if region.lags
    ]
    return standing + seldom


def region_cells(region: RegionView) -> tuple[str, ...]:
    """A region's figures as text, in the order of the table's columns."""
    state = region.state if region.live else f"{region.state} {_lasting(region.since_s)}"
    return (
        region.name,
        f"{state} (restarted {region.restarts}x)" if region.restarts else state,
        _or_dash(region.local_step),
        _or_dash(region.tokens, format_count),
        _or_dash(region.loss, "{:.3f}".format),
        _or_dash(region.step_time_s, format_duration),
        _or_dash(region.merged_share, "{:.0%}".format),
        _or_dash(region.uplink_bytes, format_size),
        _or_dash(region.downlink_bytes, format_size),
    )


def _lasting(duration_s: float) -> str:
    return f"{duration_s:.0f}s" if duration_s < 60 else format_duration(duration_s)


def _or_dash(value: Any, form: Any = str) -> str:
    return "-" if value is None else str(form(value))
