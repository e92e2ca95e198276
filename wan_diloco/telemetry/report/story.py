"""What a run folder has to say, arranged for the report: lenient about whatever is missing or damaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.telemetry.metrics import METRICS_FILE, read_metrics
from wan_diloco.telemetry.records import (
    EvaluationRecord,
    EventRecord,
    LearnerRecord,
    RoundRecord,
    TrafficRecord,
    WaitingRecord,
)
from wan_diloco.telemetry.summary import (
    SUMMARY_FILE,
    cumulative,
    distinct_rounds,
    downlink_bits_per_parameter,
    fresh_learners,
    participation,
    tokens_per_s,
    uplink_bits_per_parameter,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from wan_diloco.telemetry.records import Line

__all__ = ["Evaluation", "Fate", "Moment", "Progress", "Story", "Traffic", "read_story"]

_CONFIG_FILE: Final = "config.json"
_CHAOS_FILE: Final = "chaos.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A learner's record on the axes of the run: `tokens` are those of all regions together at that time."""

    elapsed_s: float
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The published model's score, and when the model was published: its score was known later."""

    elapsed_s: float
    tokens: int
    split: str
    nats_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A region's totals at one time; never falling."""

    elapsed_s: float
    uplink_bytes: int
    downlink_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A sentence about a time: an event, or what was waited for and for how long (None: to the end)."""

    elapsed_s: float
    name: str
    text: str
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of a share of the tokens; `name` is "merged", "outstanding", or the reason of a discard."""

    name: str
    tokens: float


@dataclass(slots=True, kw_only=True)
class Story:
    """Everything that the report shows.

    Attributes:
        name: Of the run.
        config: The resolved configuration; empty where the file isn't there.
        summary: `summary.json`; empty while the run goes on, for the time being where it was interrupted.
        chaos: `chaos.json`; empty where no faults were made.
        regions: Names, in the order of the configuration.
        progress: For each region, its records in order of time.
        tokens: The newest cumulative tokens of each region.
        evaluations: In order of time.
        traffic: For each region.
        rounds: Published rounds in order of publication.
        waits: What was waited for.
        events: What happened.
        damaged_lines: Lines of the metrics file that couldn't be read.
        end_s: Elapsed at the last line that tells of training or of a round.
        speed: Tokens a second of all regions, from the first steps on; None before them.
        began_wall_s: Unix time when the run began, if a line says so.
    """

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    chaos: dict[str, Any] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    progress: dict[str, list[Progress]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    traffic: dict[str, list[Traffic]] = field(default_factory=dict)
    rounds: list[RoundRecord] = field(default_factory=list)
    waits: list[Moment] = field(default_factory=list)
    events: list[Moment] = field(default_factory=list)
    damaged_lines: int = 0
    end_s: float = 0.0
    speed: float | None = None
    began_wall_s: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end; an interrupted one has a summary too."""
        return bool(self.summary.get("finished", bool(self.summary)))

    @property
    def is_baseline(self) -> bool:
        """Whether it is ordinary training, for comparison."""
        return "baseline" in self.summary

    def figure(self, key: str) -> float | None:
        """A number of the summary, or what the records say so far."""
        value = self.summary.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        match key:
            case "tokens_trained" if self.is_baseline and isinstance(self.summary.get("tokens"), int):
                return float(self.summary["tokens"])
            case "tokens_trained":
                return float(sum(self.tokens.values())) or None
            case "participation":
                return participation(self.rounds)
            case "uplink_bits_per_parameter":
                return uplink_bits_per_parameter(self.rounds)
            case "downlink_bits_per_parameter":
                return downlink_bits_per_parameter(self.rounds)
            case "rounds":
                return float(len(self.rounds))
            case "wall_s":
                return self.end_s
            case "tokens_per_s":
                return self.speed
            case "validation_nats_per_byte" | "test_nats_per_byte" if self.finished and key in self.summary:
                return None  # the final model has no score, and an earlier one's is not its
            case "validation_nats_per_byte" | "test_nats_per_byte":
                scores = [item.nats_per_byte for item in self.evaluations if key.startswith(item.split)]
                return scores[-1] if scores else None
            case _:
                return None

    def attendance(self) -> dict[str, tuple[int, int, int]]:
        """For each learner: rounds it was a member of, merged fresh in, merged stale in (and not fresh)."""
        members: Counter[str] = Counter()
        fresh: Counter[str] = Counter()
        stale: Counter[str] = Counter()
        for item in self.rounds:
            newest = fresh_learners(item)
            members.update(item.members)
            fresh.update(newest)
            stale.update({entry.learner for entry in item.merged} - newest)
        return {name: (members[name], fresh[name], stale[name]) for name in {*members, *fresh, *stale}}

    def fates(self) -> list[Fate]:
        """Where the tokens went: from the summary, else merged ones from the rounds and all others together."""
        discarded = self.summary.get("tokens_discarded")
        merged = self.summary.get("tokens_merged")
        if isinstance(discarded, dict) and isinstance(merged, int | float):
            reasons = {str(key): value for key, value in discarded.items() if isinstance(value, int | float)}
            outstanding = self.summary.get("tokens_outstanding", 0)
            fates = [
                Fate(name="merged", tokens=merged),
                *(Fate(name=key, tokens=value) for key, value in sorted(reasons.items(), key=lambda item: -item[1])),
                Fate(name="outstanding", tokens=outstanding if isinstance(outstanding, int | float) else 0),
            ]
            return [fate for fate in fates if fate.tokens > 0]
        trained = float(sum(self.tokens.values()))
        parameters = {item.fragment: item.parameters for item in self.rounds}
        whole = sum(parameters.values())
        weighted = sum(item.parameters * sum(entry.tokens for entry in item.merged) for item in self.rounds)
        so_far = min(trained, weighted / whole) if whole else 0.0
        return [
            fate
            for fate in (Fate(name="merged", tokens=so_far), Fate(name="not merged yet", tokens=trained - so_far))
            if fate.tokens > 0
        ]


def read_story(run_folder: Path) -> Story:
    """Read what there is in a run folder.

    Raises:
        ConfigError: The metrics file is there and can't be read.
    """
    log = read_metrics(run_folder / METRICS_FILE)
    config = _read_object(run_folder / _CONFIG_FILE)
    run = config.get("run")
    name = run.get("name") if isinstance(run, dict) else None
    if isinstance(run, dict) and "folder" in run:
        # The setting says where runs of this configuration go by themselves; this one may have been put elsewhere.
        config["run"] = {**run, "folder": str(run_folder)}
    story = Story(
        name=str(name or run_folder.resolve().name),
        config=config,
        summary=_read_object(run_folder / SUMMARY_FILE),
        chaos=_read_object(run_folder / _CHAOS_FILE),
        rounds=distinct_rounds(log.lines),
        damaged_lines=log.damaged,
    )
    lines = sorted((line for line in log.lines if math.isfinite(line.elapsed_s)), key=lambda line: line.elapsed_s)
    if lines:
        # What is written of the evaluation and of farewells, after the last step, isn't the run.
        working = [line for line in lines if isinstance(line.record, LearnerRecord | RoundRecord)]
        story.end_s = (working or lines)[-1].elapsed_s
        began = lines[0].wall_s - lines[0].elapsed_s
        story.began_wall_s = began if math.isfinite(began) else None
    _tell(story, lines)
    story.speed = tokens_per_s(lines, sum(story.tokens.values()), story.end_s)
    known = {*story.progress, *story.traffic, *story.attendance()}
    regions = config.get("regions")
    configured = (
        [str(item.get("name")) for item in regions if isinstance(item, dict)] if isinstance(regions, list) else []
    )
    story.regions = [*(name for name in dict.fromkeys(configured) if name in known), *sorted(known - set(configured))]
    return story


def _tell(story: Story, lines: Iterable[Line]) -> None:
    traffic: dict[str, list[tuple[float, TrafficRecord]]] = {}
    waiting: Moment | None = None
    for line in lines:
        match line.record:
            case LearnerRecord() as record:
                story.tokens[record.region] = max(record.tokens, story.tokens.get(record.region, 0))
                story.progress.setdefault(record.region, []).append(
                    Progress(elapsed_s=line.elapsed_s, tokens=sum(story.tokens.values()), loss=record.loss)
                )
            case EvaluationRecord() as record:
                story.evaluations.append(
                    Evaluation(
                        elapsed_s=record.published_s if math.isfinite(record.published_s) else line.elapsed_s,
                        tokens=record.tokens,
                        split=record.split,
                        nats_per_byte=record.nats_per_byte,
                    )
                )
            case TrafficRecord() as record:
                traffic.setdefault(record.region, []).append((line.elapsed_s, record))
            case WaitingRecord() as record:
                if waiting is not None:
                    story.waits.append(_ended(waiting, line.elapsed_s))
                waiting = Moment(elapsed_s=line.elapsed_s, name="", text=record.reason) if record.reason else None
            case EventRecord() as record:
                story.events.append(Moment(elapsed_s=line.elapsed_s, name=record.name, text=record.detail))
            case RoundRecord():
                pass
    if waiting is not None:
        story.waits.append(waiting)
    for region, seen in traffic.items():
        up = cumulative(record.uplink_bytes for _, record in seen)
        down = cumulative(record.downlink_bytes for _, record in seen)
        story.traffic[region] = [
            Traffic(elapsed_s=time, uplink_bytes=sent, downlink_bytes=received)
            for (time, _), sent, received in zip(seen, up, down, strict=True)
        ]


def _ended(waiting: Moment, elapsed_s: float) -> Moment:
    return Moment(elapsed_s=waiting.elapsed_s, name="", text=waiting.text, duration_s=elapsed_s - waiting.elapsed_s)


def _read_object(path: Path) -> dict[str, Any]:
    # A report of a run that was cut off is worth more than a complaint about one of its files.
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
