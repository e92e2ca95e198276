"""The records of `metrics.jsonl`: what one line can be, and reading lines that may be damaged.

A line is a JSON object with `kind`, `elapsed_s`, `wall_s` and the record's own fields. Cumulative
fields are totals since the run began and never fall. A loss is a mean over tokens, never a sum. A
number that isn't finite is written as null.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

__all__ = [
    "EvaluationRecord",
    "EventRecord",
    "LearnerRecord",
    "Line",
    "MergedContribution",
    "MissingLearner",
    "Record",
    "RoundRecord",
    "TrafficRecord",
    "WaitingRecord",
    "decode_line",
    "encode_line",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRecord:
    """A learner's progress.

    Attributes:
        region: Whose.
        local_step: Steps of this life.
        global_step: The syncer's step count last heard.
        tokens: Cumulative over the run.
        loss: Mean nats a token of the newest steps.
        step_time_s: Of the newest steps, mean.
        learning_rate: Of the newest step.
    """

    kind: ClassVar[str] = "learner"
    region: str
    local_step: int
    global_step: int
    tokens: int
    loss: float
    step_time_s: float
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedContribution:
    """One contribution of a round; staleness 0 is fresh."""

    learner: str
    staleness: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingLearner:
    """A member that a round closed without, and why."""

    learner: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """A round that was published.

    Attributes:
        round_id: Unique in the run.
        fragment: Whose round.
        version: The count of the version that it published.
        attempt: The attempt that closed, from 1.
        opened_s: Elapsed; as are `quorate_s`, `closed_s`, `merged_s`, `published_s`.
        members: The live learners when it closed.
        merged: What went in.
        missing: Members that didn't.
        grace_s: The grace that was granted.
        update_bytes: The encoded update.
        upload_bytes: For each learner, the payloads that were merged.
        parameters: Of the fragment.
    """

    kind: ClassVar[str] = "round"
    round_id: int
    fragment: int
    version: int
    attempt: int
    opened_s: float
    quorate_s: float
    closed_s: float
    merged_s: float
    published_s: float
    members: tuple[str, ...]
    merged: tuple[MergedContribution, ...]
    missing: tuple[MissingLearner, ...]
    grace_s: float
    update_bytes: int
    upload_bytes: Mapping[str, int] = field(default_factory=dict)
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRecord:
    """Bytes of a region on the wide-area link, cumulative, seen from the region."""

    kind: ClassVar[str] = "traffic"
    region: str
    uplink_bytes: int
    downlink_bytes: int
    control_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The published model on held-out text.

    Attributes:
        tokens: Trained by all regions when it was published.
        global_step: Likewise.
        split: "validation" or "test".
        nats_per_byte: Mean over bytes.
        final: Whether it is the score of the run, on everything that was held out.
        published_s: Elapsed when the model was published, which is before it was evaluated.
    """

    kind: ClassVar[str] = "evaluation"
    tokens: int
    global_step: int
    split: str
    nats_per_byte: float
    final: bool = False
    published_s: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRecord:
    """Why nothing happens; once per change, empty when the wait is over."""

    kind: ClassVar[str] = "waiting"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened once: `learner_joined`, `learner_left`, `contribution_rejected`."""

    kind: ClassVar[str] = "event"
    name: str
    detail: str


Record: TypeAlias = LearnerRecord | RoundRecord | TrafficRecord | EvaluationRecord | WaitingRecord | EventRecord

_KINDS: typing.Final[dict[str, type[Record]]] = {
    record.kind: record
    for record in (LearnerRecord, RoundRecord, TrafficRecord, EvaluationRecord, WaitingRecord, EventRecord)
}


_HINTS: typing.Final[dict[type[Any], dict[str, Any]]] = {
    shape: {name: hint for name, hint in typing.get_type_hints(shape).items() if name != "kind"}
    for shape in (*_KINDS.values(), MergedContribution, MissingLearner)
}
_DEFAULTED: typing.Final[dict[type[Any], frozenset[str]]] = {
    shape: frozenset(item.name for item in dataclasses.fields(shape) if item.default is not dataclasses.MISSING)
    for shape in _HINTS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A record and when it was written.

    Attributes:
        elapsed_s: Since the run began.
        wall_s: Unix time, for people.
        record: What it says.
    """

    elapsed_s: float
    wall_s: float
    record: Record


def encode_line(line: Line) -> bytes:
    """The line's bytes, with its line feed."""
    content = {
        "kind": line.record.kind,
        "elapsed_s": round(line.elapsed_s, 6),
        "wall_s": round(line.wall_s, 3),
        **dataclasses.asdict(line.record),
    }
    return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode_line(text: bytes) -> Line | None:
    """The line in these bytes; None where they are damaged, or of a kind that isn't known here."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or (shape := _KINDS.get(str(content.get("kind")))) is None:
        return None
    try:
        return Line(
            elapsed_s=_convert(float, content["elapsed_s"]),
            wall_s=_convert(float, content["wall_s"]),
            record=_build(shape, content),
        )
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _build(shape: type[Any], content: Any) -> Any:
    if not isinstance(content, dict):
        raise TypeError(f"{shape.__name__} is an object")
    # A field that came later has a default, so that older files stay readable.
    known = {name: hint for name, hint in _HINTS[shape].items() if name in content or name not in _DEFAULTED[shape]}
    return shape(**{name: _convert(hint, content[name]) for name, hint in known.items()})


def _convert(hint: Any, value: Any) -> Any:
    if hint is float:
        # null is how a number that isn't finite is written.
        return math.nan if value is None else float(_checked(value, int, float))
    if hint is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} isn't a bool")
        return value
    if hint in {int, str}:
        return _checked(value, hint)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(_convert(arguments[0], item) for item in _checked(value, list))
    if typing.get_origin(hint) is Mapping:
        return {key: _convert(arguments[1], item) for key, item in _checked(value, dict).items()}
    return _build(hint, value)


def _checked(value: Any, *shapes: type[Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, shapes):
        raise TypeError(f"{value!r} isn't a {shapes[0].__name__}")
    return value
