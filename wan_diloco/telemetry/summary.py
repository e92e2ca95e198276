"""What a run came to: pure arithmetic over the records, the ledger's totals and what else the syncer's state knows.

Metrics may lose lines, the state loses nothing: what both say, the state says. What only metrics have told is given as
far as it is left, and the summary says so.
Losses are means, never sums over learners. Totals are Python integers and never wrap; a source that
starts again at zero is added to what it had, as Prometheus does it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.telemetry.records import EvaluationRecord, LearnerRecord, RoundRecord, TrafficRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wan_diloco.protocol.ledger import LedgerTotals
    from wan_diloco.protocol.syncer_state import Totals
    from wan_diloco.telemetry.records import Line

__all__ = [
    "SUMMARY_FILE",
    "Known",
    "cumulative",
    "distinct_rounds",
    "downlink_bits_per_parameter",
    "fresh_learners",
    "incomplete",
    "mean_loss",
    "participation",
    "summarise",
    "tokens_per_s",
    "uplink_bits_per_parameter",
]

SUMMARY_FILE: Final = "summary.json"

# A syncer that is killed may not have told its last rounds: so small a share changes no figure that people look at.
_UNTOLD_SHARE_MAX: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a syncer's state says of its run, whatever became of the metrics.

    Attributes:
        totals: Of all rounds.
        merges_min: Of the fragment that was merged least.
        merged_fresh: For each learner, in how many rounds it was merged fresh.
        tokens: For each learner, how far it has come.
    """

    totals: Totals
    merges_min: int
    merged_fresh: Mapping[str, int]
    tokens: Mapping[str, int]


def cumulative(values: Iterable[int]) -> list[int]:
    """Totals that never fall, from a counter that may have started again at zero.

    Args:
        values: Readings of the counter, in order.

    Returns:
        For each reading, what was counted until then, over all starts.
    """
    totals = []
    before = 0
    last = 0
    for value in values:
        if value < last:
            before += last
        last = value
        totals.append(before + value)
    return totals


def distinct_rounds(lines: Iterable[Line]) -> list[RoundRecord]:
    """Every merge once, in the order of publication; the newest record of a round that was told twice counts.

    A restarted syncer that replays its journal may tell its last rounds again.
    """
    rounds = {
        (line.record.fragment, line.record.round_id): line.record
        for line in lines
        if isinstance(line.record, RoundRecord)
    }
    return sorted(rounds.values(), key=lambda item: (item.published_s, item.round_id))


def fresh_learners(record: RoundRecord) -> set[str]:
    """The distinct learners that a round merged at staleness 0."""
    return {item.learner for item in record.merged if item.staleness == 0}


def participation(rounds: Sequence[RoundRecord]) -> float | None:
    """Distinct learners merged fresh over (rounds x live members), 0 to 1; None without rounds."""
    members = sum(len(item.members) for item in rounds)
    return sum(len(fresh_learners(item)) for item in rounds) / members if members else None


def uplink_bits_per_parameter(rounds: Sequence[RoundRecord]) -> float | None:
    """Payload bits of merged contributions for each parameter merged; None without any."""
    parameters = sum(item.parameters * len(item.merged) for item in rounds)
    return 8 * sum(sum(item.upload_bytes.values()) for item in rounds) / parameters if parameters else None


def downlink_bits_per_parameter(rounds: Sequence[RoundRecord]) -> float | None:
    """Bits of the encoded updates for each parameter published; None without any."""
    parameters = sum(item.parameters for item in rounds)
    return 8 * sum(item.update_bytes for item in rounds) / parameters if parameters else None


def mean_loss(records: Iterable[LearnerRecord]) -> float | None:
    """The mean of the regions' newest losses: it doesn't move when a region with the same loss comes or goes."""
    newest = {item.region: item.loss for item in records}
    losses = [loss for loss in newest.values() if math.isfinite(loss)]
    return math.fsum(losses) / len(losses) if losses else None


def tokens_per_s(lines: Iterable[Line], tokens: float, end_s: float) -> float | None:
    """The mean speed from the first steps on: what starting the processes took says nothing about training.

    Args:
        lines: Of the run.
        tokens: That all regions trained on.
        end_s: When they had, since the run began.

    Returns:
        None when nobody took a step.
    """
    begun_s = (
        line.elapsed_s for line in lines if isinstance(line.record, LearnerRecord) and line.record.local_step > 0
    )
    first_s = min(begun_s, default=end_s)
    return tokens / (end_s - first_s) if end_s > first_s else None


def incomplete(lines: Iterable[Line], damaged: int, known: Known) -> str:
    """What the metrics lack, in a sentence; empty where nothing shows that anything is missing.

    Args:
        lines: Of the run.
        damaged: How many more couldn't be understood.
        known: What the state says.
    """
    there, all_rounds = len(distinct_rounds(lines)), known.totals.rounds
    lacks = []
    if there < all_rounds:
        lacks.append(f"has {there} of {all_rounds} rounds")
    if damaged:
        lacks.append(f"has lines that can't be read: {damaged}")
    if not lacks:
        return ""
    return f"metrics.jsonl {' and '.join(lacks)}: times, speed, curves and traffic are of what is left of it"


def summarise(
    lines: Sequence[Line],
    ledger: LedgerTotals,
    *,
    known: Known | None = None,
    metrics_incomplete: str = "",
    num_fragments: int,
    wall_s: float,
    rejected: Mapping[str, int] | None = None,
    repeated_units: int = 0,
    finished: bool = True,
    unevaluated: str = "",
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        lines: All records of the run.
        ledger: What became of every token.
        known: What the state says of rounds and learners; None where there is no more than the records.
        metrics_incomplete: What the records lack, in a sentence, as of `incomplete`; empty where they are whole.
        num_fragments: P; a fragment that never merged makes `merges_per_fragment_min` zero.
        wall_s: How long the run took.
        rejected: For each reason, how often something was refused.
        repeated_units: Units of data that came into the journal twice.
        finished: Whether the last step was reached; an interrupted run goes on later.
        unevaluated: Why the final model has no score, in a sentence; empty when it has one.

    Returns:
        JSON values; null where the run has nothing to say. The losses are those of the final model or null, never
        those of an earlier one: that is what `last_curve_point` says.
    """
    rounds = distinct_rounds(lines)
    merges = Counter(item.fragment for item in rounds)
    learners = [line.record for line in lines if isinstance(line.record, LearnerRecord)]
    by_region = _regions(lines, learners, rounds)
    whole = known is None or len(rounds) >= (1 - _UNTOLD_SHARE_MAX) * known.totals.rounds
    if known is not None:
        _complete(by_region, known, whole=whole)
    return {
        "finished": finished,
        "validation_nats_per_byte": _final_loss(lines, "validation") if finished else None,
        "test_nats_per_byte": _final_loss(lines, "test") if finished else None,
        "evaluation": _evaluation_words(finished=finished, unevaluated=unevaluated),
        "last_curve_point": _last_curve_point(lines),
        "train_loss": mean_loss(learners),
        "ledger_balance": ledger.balance,
        "repeated_units": repeated_units,
        "participation": participation(rounds),
        "merges_per_fragment_min": min(merges.get(fragment, 0) for fragment in range(num_fragments)),
        "uplink_bits_per_parameter": uplink_bits_per_parameter(rounds),
        "downlink_bits_per_parameter": downlink_bits_per_parameter(rounds),
        "rounds": len(rounds),
        **({} if known is None else _of_state(known)),
        "regions": len(by_region),
        "by_region": by_region,
        "tokens_trained": _whole(ledger.trained_tokens),
        "tokens_merged": _whole(ledger.merged_tokens),
        "tokens_discarded": {str(key): _whole(value) for key, value in sorted(ledger.discarded_tokens.items())},
        "tokens_outstanding": _whole(ledger.outstanding_tokens),
        "wall_s": wall_s,
        # All tokens in a part of the time would be a speed that nobody had.
        "tokens_per_s": tokens_per_s(lines, ledger.trained_tokens, wall_s) if whole else None,
        "metrics_incomplete": metrics_incomplete,
        # What was scored then is the initial model.
        "nothing_merged": finished and not (len(rounds) if known is None else known.totals.rounds),
        "rejected": dict(sorted((rejected or {}).items())),
    }


def _of_state(known: Known) -> dict[str, Any]:
    totals = known.totals
    merged, published = totals.merged_parameters, totals.published_parameters
    return {
        "participation": totals.fresh / totals.members if totals.members else None,
        "merges_per_fragment_min": known.merges_min,
        "uplink_bits_per_parameter": 8 * totals.upload_bytes / merged if merged else None,
        "downlink_bits_per_parameter": 8 * totals.update_bytes / published if published else None,
        "rounds": totals.rounds,
    }


def _complete(by_region: dict[str, dict[str, Any]], known: Known, *, whole: bool) -> None:
    """Put in what the state knows of each region.

    Args:
        by_region: Of the records; changed.
        known: What the state says.
        whole: Whether hardly any record is missing; else in how many rounds a region was live isn't known.
    """
    absent: dict[str, Any] = dict.fromkeys(("loss", "uplink_bytes", "downlink_bytes", "control_bytes", "local_steps"))
    for name in sorted({*by_region, *known.tokens}):
        region = by_region.setdefault(name, {"tokens": 0, **absent, "participation": None, "rounds_live": None})
        merged, rounds = known.merged_fresh.get(name, 0), known.totals.rounds
        region["tokens"] = max(region["tokens"], known.tokens.get(name, 0))
        region["rounds_merged"] = merged
        region["rounds_merged_share"] = merged / rounds if rounds else None
        if not whole:
            region["participation"] = region["rounds_live"] = None


def _evaluations(lines: Iterable[Line]) -> list[EvaluationRecord]:
    records = (line.record for line in lines)
    return [item for item in records if isinstance(item, EvaluationRecord) and math.isfinite(item.nats_per_byte)]


def _final_loss(lines: Iterable[Line], split: str) -> float | None:
    losses = [item.nats_per_byte for item in _evaluations(lines) if item.final and item.split == split]
    return losses[-1] if losses else None


def _last_curve_point(lines: Iterable[Line]) -> dict[str, float] | None:
    points = [item for item in _evaluations(lines) if item.split == "validation" and not item.final]
    if not points:
        return None
    last = points[-1]
    return {"global_step": last.global_step, "tokens": last.tokens, "validation_nats_per_byte": last.nats_per_byte}


def _evaluation_words(*, finished: bool, unevaluated: str) -> str:
    if not finished:
        return "the run isn't finished: the final model is evaluated at its end"
    return unevaluated or "the final model, on everything that was held out"


def _regions(
    lines: Iterable[Line], learners: Sequence[LearnerRecord], rounds: Sequence[RoundRecord]
) -> dict[str, dict[str, Any]]:
    traffic: dict[str, list[TrafficRecord]] = {}
    for line in lines:
        if isinstance(line.record, TrafficRecord):
            traffic.setdefault(line.record.region, []).append(line.record)
    own: dict[str, list[LearnerRecord]] = {}
    for record in learners:
        own.setdefault(record.region, []).append(record)
    result = {}
    for name in sorted({*own, *traffic}):
        seen = traffic.get(name, [])
        # What a region merges of the rounds in which it was live says how well it keeps up; of all rounds, also how
        # long it was away.
        invited = [item for item in rounds if name in item.members]
        merged = sum(name in fresh_learners(item) for item in invited)
        result[name] = {
            "tokens": max((item.tokens for item in own.get(name, [])), default=0),
            "local_steps": max((item.local_step for item in own.get(name, [])), default=0),
            "loss": mean_loss(own.get(name, [])),
            "uplink_bytes": cumulative(item.uplink_bytes for item in seen)[-1] if seen else 0,
            "downlink_bytes": cumulative(item.downlink_bytes for item in seen)[-1] if seen else 0,
            "control_bytes": cumulative(item.control_bytes for item in seen)[-1] if seen else 0,
            "participation": merged / len(invited) if invited else None,
            "rounds_merged": merged,
            "rounds_live": len(invited),
            "rounds_merged_share": merged / len(rounds) if rounds else None,
        }
    return result


def _whole(tokens: float) -> int:
    # The ledger's means over fragments are floats; a total beyond 2^31 stays exact, as floats are to 2^53.
    return round(tokens)
