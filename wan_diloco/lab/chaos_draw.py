"""Faults drawn from a seed: at least one of each sort that a machine can do, spread over a time.

Sizes are such that a run should come through each: a stop or a cut is shorter than anybody's patience with a process,
a full disk is shorter than what a run may stand still for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.config import FaultKind, FaultSchedule, FaultSettings
from wan_diloco.config.quantities import duration_text, rate_text
from wan_diloco.errors import UsageError
from wan_diloco.units import format_duration

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

__all__ = ["SORTS", "draw_schedule"]

# Before the first fault the run is whole, and after the last it has time to become so again.
_LEAD_SHARE: Final = 0.04
_TAIL_SHARE: Final = 0.1
# A late joiner joins in this part of the time.
_JOIN_SHARES: Final = (0.08, 0.2)
# A process that is killed again and again before it has lived for half a minute is given up by its supervisor.
_KILLED_AGAIN_S: Final = 35.0
_KILLS: Final = frozenset({FaultKind.KILL, FaultKind.SKEW})

# More often than this nothing that befalls a run has an effect of its own, and nobody looks through so many.
_PITCH_MIN_S: Final = 0.1
_FAULTS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sort:
    """A kind of fault on a kind of thing.

    Attributes:
        weight: How often it is drawn beyond the one of each.
        lasts_s: From the shortest to the longest; zeros for what is over at once.
    """

    kind: FaultKind
    hits: str
    weight: int
    lasts_s: tuple[float, float] = (0.0, 0.0)


_ALL: Final = (
    _Sort(kind=FaultKind.KILL, hits="syncer", weight=2),
    _Sort(kind=FaultKind.KILL, hits="learner", weight=3),
    _Sort(kind=FaultKind.KILL, hits="uplink", weight=2),
    _Sort(kind=FaultKind.STOP, hits="syncer", weight=1, lasts_s=(1.0, 4.0)),
    _Sort(kind=FaultKind.STOP, hits="learner", weight=2, lasts_s=(2.0, 15.0)),
    _Sort(kind=FaultKind.STOP, hits="uplink", weight=1, lasts_s=(2.0, 15.0)),
    _Sort(kind=FaultKind.CUT, hits="link", weight=3, lasts_s=(2.0, 15.0)),
    _Sort(kind=FaultKind.HALF_OPEN, hits="link", weight=2, lasts_s=(5.0, 20.0)),
    _Sort(kind=FaultKind.THROTTLE, hits="link", weight=1, lasts_s=(5.0, 20.0)),
    _Sort(kind=FaultKind.DELAY, hits="link", weight=1, lasts_s=(5.0, 20.0)),
    _Sort(kind=FaultKind.CORRUPT, hits="link", weight=1, lasts_s=(3.0, 10.0)),
    _Sort(kind=FaultKind.FULL_DISK, hits="disk", weight=1, lasts_s=(2.0, 5.0)),
    _Sort(kind=FaultKind.SKEW, hits="learner", weight=0),
    _Sort(kind=FaultKind.SKEW, hits="syncer", weight=0),
    _Sort(kind=FaultKind.JOIN, hits="learner", weight=0),
)

SORTS: Final = len(_ALL)
"""How many sorts of faults there are."""


def draw_schedule(
    rng: random.Random,
    *,
    seed: int,
    regions: Sequence[str],
    quorum: int,
    duration_s: float,
    num_faults: int,
    without: Collection[FaultKind] = (),
) -> FaultSchedule:
    """Draw a schedule.

    Args:
        rng: Seeded with `seed`.
        seed: Kept in the schedule.
        regions: Of the run.
        quorum: Of the run; so many are there from the start.
        duration_s: Over which the faults are spread.
        num_faults: How many.
        without: What this machine can't do.

    Raises:
        UsageError: So few faults can't be one of each sort, or so many don't fit into the time.
    """
    late = rng.choice(list(regions)) if len(regions) > quorum and FaultKind.JOIN not in without else ""
    sorts = [sort for sort in _ALL if sort.kind not in without and (late or sort.kind is not FaultKind.JOIN)]
    if num_faults < len(sorts):
        raise UsageError(f"{num_faults} faults can't be one of each of {len(sorts)} sorts: give --faults {len(sorts)}")
    lead_s, tail_s = _LEAD_SHARE * duration_s, _TAIL_SHARE * duration_s
    span_s = duration_s - lead_s - tail_s
    fit = min(_FAULTS_MAX, int(span_s / _PITCH_MIN_S))
    if num_faults > fit:
        raise UsageError(f"{num_faults} faults don't fit into {format_duration(duration_s)}: {fit} do")
    drawn = [sort for sort in sorts if sort.kind is not FaultKind.JOIN]
    joins = len(sorts) - len(drawn)
    drawn += rng.choices(drawn, [sort.weight for sort in drawn], k=num_faults - joins - len(drawn))
    rng.shuffle(drawn)
    pitch_s = span_s / max(1, len(drawn))
    times = [lead_s + (index + rng.random()) * pitch_s for index in range(len(drawn))]
    joins_s = rng.uniform(*_JOIN_SHARES) * duration_s
    killed: dict[str, float] = {}
    faults = [
        _fault(rng, sort, at_s, [name for name in regions if name != late or at_s > joins_s], killed, duration_s)
        for sort, at_s in zip(_apart(drawn), times, strict=True)
    ]
    if late:
        faults.append(_settings(at_s=joins_s, kind=FaultKind.JOIN, target=f"learner:{late}"))
    return FaultSchedule(seed=seed, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _apart(drawn: list[_Sort]) -> list[_Sort]:
    """The same sorts, with the syncer's kills as far apart as they can be: it is one process, learners are many."""

    def killing(sort: _Sort) -> bool:
        return sort.kind in _KILLS and sort.hits == "syncer"

    kills = [sort for sort in drawn if killing(sort)]
    others, next_kill = iter([sort for sort in drawn if not killing(sort)]), iter(kills)
    places = {int((index + 0.5) * len(drawn) / len(kills)) for index in range(len(kills))}
    return [next(next_kill) if place in places else next(others) for place in range(len(drawn))]


def _fault(
    rng: random.Random, sort: _Sort, at_s: float, regions: list[str], killed: dict[str, float], duration_s: float
) -> FaultSettings:
    target = sort.hits
    if sort.hits in {"learner", "uplink", "link"}:
        candidates = [f"{sort.hits}:{name}" for name in regions]
        if sort.kind in _KILLS:
            # Whoever was killed longest ago, or never.
            oldest_s = min(killed.get(name, -_KILLED_AGAIN_S) for name in candidates)
            rested = [name for name in candidates if at_s - killed.get(name, -_KILLED_AGAIN_S) >= _KILLED_AGAIN_S]
            candidates = rested or [name for name in candidates if killed.get(name) == oldest_s]
        target = rng.choice(candidates)
    if sort.kind in _KILLS:
        killed[target] = at_s
    more: dict[str, Any] = {}
    if sort.lasts_s[1]:
        more["for"] = min(rng.uniform(*sort.lasts_s), duration_s / 4)
    match sort.kind:
        case FaultKind.CUT:
            more["way"] = rng.choice(["both", "up", "down"])
        case FaultKind.THROTTLE:
            more["rate"] = rate_text(float(round(10 ** rng.uniform(4.0, 5.3))))
        case FaultKind.DELAY:
            more["delay"] = duration_text(round(rng.uniform(0.05, 0.5), 3))
        case FaultKind.SKEW:
            more["offset"] = duration_text(float(round(10 ** rng.uniform(2.0, 6.5))))
        case FaultKind.CORRUPT:
            more["flips_per_byte"] = round(10 ** rng.uniform(-5.0, -4.0), 7)
        case _:
            pass
    return _settings(at_s=at_s, kind=sort.kind, target=target, **more)


def _settings(*, at_s: float, **more: Any) -> FaultSettings:
    if "for" in more:
        more["for"] = duration_text(round(more["for"], 2))
    return FaultSettings.model_validate({"at": duration_text(round(at_s, 2)), **more})
