"""What faults cost a run: pure arithmetic over what was seen of it.

Standing still is the time between two published rounds. It counts while enough learners for a quorum were able to
contribute: trained, had an uplink that ran, and a link that carried something both ways.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.config import FaultSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wan_diloco.lab.chaos_storm import Befallen
    from wan_diloco.lab.chaos_watch import Observations

__all__ = ["Standstill", "fault_costs", "longest_standstill", "presence"]

_BUCKET_S: Final = 5.0
# Own figures of the syncer come once a second; who looks for one looks this far.
_STATUS_WITHIN_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A stretch in which nothing was published.

    Attributes:
        from_s, to_s: When, on the clock of what was seen.
    """

    from_s: float
    to_s: float

    @property
    def duration_s(self) -> float:
        """How long."""
        return self.to_s - self.from_s


def longest_standstill(seen: Observations, quorum: int, *, always: bool = False) -> Standstill | None:
    """The longest stretch without a publication, from the run's start to its end.

    Args:
        seen: Of the run.
        quorum: Only while so many learners were able to contribute.
        always: Count all other time too.

    Returns:
        None when the run never started.
    """
    stretches = [
        Standstill(from_s=max(from_s, able_from_s), to_s=min(to_s, able_to_s))
        for from_s, to_s in _gaps(seen)
        for able_from_s, able_to_s in ([(from_s, to_s)] if always else _able(seen, quorum))
        if max(from_s, able_from_s) < min(to_s, able_to_s)
    ]
    return max(stretches, key=lambda stretch: stretch.duration_s, default=None)


def fault_costs(befallen: Sequence[Befallen], seen: Observations) -> list[dict[str, Any]]:
    """What each fault cost; several at once share what they cost together.

    Returns:
        For each fault, as JSON: what it was, `began_s` and `ended_s` since the start, `cut_short` (undone at the run's
        end, before its time), `well_after_s` (from its end to when all was well again; null if never), `standstill_s`
        (the longest from its begin until then), `rounds_missed` by its region meanwhile, and `tokens_discarded` by
        reason meanwhile.
    """
    return [_cost(item, seen) for item in befallen]


def presence(seen: Observations, regions: int) -> list[dict[str, float]]:
    """How many regions were alive, trained, and were averaged, over time.

    Args:
        seen: Of the run.
        regions: How many there are.

    Returns:
        Of each stretch of some seconds, the mean numbers that were alive and trained, and how many were in any round.
    """
    if seen.started_s is None:
        return []
    buckets: dict[int, list[tuple[int, int]]] = {}
    averaged: dict[int, set[str]] = {}
    for sample in seen.samples:
        if sample.seen_s >= seen.started_s and (seen.ended_s is None or sample.seen_s <= seen.ended_s):
            place = int((sample.seen_s - seen.started_s) / _BUCKET_S)
            buckets.setdefault(place, []).append((len(sample.alive), len(sample.training)))
    for round_ in seen.merged:
        averaged.setdefault(int((round_.seen_s - seen.started_s) / _BUCKET_S), set()).update(round_.fresh)
    return [
        {
            "from_s": place * _BUCKET_S,
            "regions": regions,
            "alive": round(sum(alive for alive, _ in found) / len(found), 2),
            "training": round(sum(training for _, training in found) / len(found), 2),
            "averaged": len(averaged.get(place, ())),
        }
        for place, found in sorted(buckets.items())
    ]


def _gaps(seen: Observations) -> list[tuple[float, float]]:
    if seen.started_s is None:
        return []
    times = [seen.started_s, *(round_.seen_s for round_ in seen.merged)]
    if seen.ended_s is not None:
        times.append(seen.ended_s)
    elif seen.samples:
        times.append(max(times[-1], seen.samples[-1].seen_s))
    return list(pairwise(times))


def _able(seen: Observations, quorum: int) -> list[tuple[float, float]]:
    """Stretches in which so many were able, as far as samples tell: from the first that says so to the last."""
    stretches: list[tuple[float, float]] = []
    from_s: float | None = None
    for sample in seen.samples:
        if len(sample.able) >= quorum:
            from_s = sample.seen_s if from_s is None else from_s
        elif from_s is not None:
            stretches.append((from_s, sample.seen_s))
            from_s = None
    if from_s is not None:
        stretches.append((from_s, max(seen.samples[-1].seen_s, seen.ended_s or 0.0)))
    return stretches


def _cost(item: Befallen, seen: Observations) -> dict[str, Any]:
    fault = item.fault
    told: dict[str, Any] = {
        "kind": fault.kind.value,
        "target": fault.target,
        "at_s": fault.at_s,
        "settings": fault.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "problem": item.problem,
    }
    if item.began_s is None or seen.started_s is None:
        return told | {"problem": item.problem or "the run was over before"}
    ended_s = item.began_s if item.ended_s is None else item.ended_s
    well_s = None if item.cut_short else _well_s(fault, ended_s, seen)
    until_s = well_s if well_s is not None else max([ended_s, *(round_.seen_s for round_ in seen.merged[-1:])])
    stood = [to_s - from_s for from_s, to_s in _gaps(seen) if from_s < until_s and to_s > item.began_s]
    return told | {
        "began_s": round(item.began_s - seen.started_s, 2),
        "ended_s": round(ended_s - seen.started_s, 2),
        "cut_short": item.cut_short,
        "well_after_s": None if well_s is None else round(well_s - ended_s, 2),
        "standstill_s": round(max(stood, default=0.0), 2),
        "rounds_missed": _missed(fault.region, item.began_s, until_s, seen),
        "tokens_discarded": _discarded(item.began_s, until_s, seen),
    }


def _well_s(fault: FaultSettings, ended_s: float, seen: Observations) -> float | None:
    """When all was well again: work that came after the fault was averaged, of its region, or of all that it hit.

    A syncer or a disk hits everybody who was able to contribute at the fault's end.
    """
    if fault.region:
        waited = {fault.region}
    else:
        before = [sample for sample in seen.samples if sample.seen_s <= ended_s]
        waited = set(before[-1].able) if before else set()
    for round_ in seen.merged:
        if round_.seen_s > ended_s:
            waited -= {region for region, came_s in round_.fresh.items() if came_s > ended_s}
            if not waited:
                return round_.seen_s
    return None


def _missed(region: str, from_s: float, to_s: float, seen: Observations) -> int | None:
    if not region:
        return None
    return sum(region not in round_.fresh for round_ in seen.merged if from_s < round_.seen_s < to_s)


def _discarded(from_s: float, to_s: float, seen: Observations) -> dict[str, int] | None:
    """Tokens by reason, between what the syncer said before and after; None where it said nothing near."""
    before = [found for time_s, found in seen.discards if from_s - _STATUS_WITHIN_S <= time_s <= from_s]
    after = [found for time_s, found in seen.discards if time_s >= to_s]
    if not before or not after:
        return None
    grown = Counter(after[0])
    grown.subtract(before[-1])
    return {reason: round(tokens) for reason, tokens in sorted(grown.items()) if round(tokens) > 0}
