"""What is to befall a run, and when: the form in which faults are written down, and given again.

A fault names what it hits: `syncer`, `learner:REGION`, `uplink:REGION`, `link:REGION`, or `disk`. Times count from the
first step of the run. Whether this machine can do it, and how, isn't known here.
"""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from wan_diloco.config.explain import mistakes, problem_and_hint
from wan_diloco.config.load import read_table
from wan_diloco.config.names import nearest
from wan_diloco.config.quantities import Duration, Rate
from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["FaultKind", "FaultSchedule", "FaultSettings", "check_schedule", "load_schedule", "parse_schedule"]

_DAY_S: Final = 86_400.0


class FaultKind(StrEnum):
    """What happens.

    `KILL`: a process gets SIGKILL. `STOP`: it gets SIGSTOP, and SIGCONT later.
    `CUT`: a link carries nothing; both ways connections are reset, one way they stand and wait.
    `HALF_OPEN`: bytes vanish, connections stand. `THROTTLE`, `DELAY`, `CORRUPT`: a link is slow, late, noisy.
    `FULL_DISK`: nothing can be written where the run is kept. `JOIN`: a learner isn't there before.
    `SKEW`: a process gets SIGKILL, and the one that follows has a monotonic clock that is ahead.
    """

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    HALF_OPEN = "half-open"
    THROTTLE = "throttle"
    DELAY = "delay"
    CORRUPT = "corrupt"
    FULL_DISK = "full-disk"
    JOIN = "join"
    SKEW = "skew"


_PROCESSES: Final = ("syncer", "learner", "uplink")
_HITS: Final[Mapping[FaultKind, tuple[str, ...]]] = {
    FaultKind.KILL: _PROCESSES,
    FaultKind.STOP: _PROCESSES,
    FaultKind.CUT: ("link",),
    FaultKind.HALF_OPEN: ("link",),
    FaultKind.THROTTLE: ("link",),
    FaultKind.DELAY: ("link",),
    FaultKind.CORRUPT: ("link",),
    FaultKind.FULL_DISK: ("disk",),
    FaultKind.JOIN: ("learner",),
    FaultKind.SKEW: ("syncer", "learner"),
}
_AT_ONCE: Final = frozenset({FaultKind.KILL, FaultKind.JOIN, FaultKind.SKEW})
_WITHOUT_NAME: Final = frozenset({"syncer", "disk"})
# The kind that needs a setting, and no other has it.
_OWNERS: Final[Mapping[str, FaultKind]] = {
    "rate_bytes_per_s": FaultKind.THROTTLE,
    "delay_s": FaultKind.DELAY,
    "flips_per_byte": FaultKind.CORRUPT,
    "offset_s": FaultKind.SKEW,
}


def _refuse(problem: str, hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("fault", "{problem}", {"problem": f"{problem} ({hint})" if hint else problem})


class FaultSettings(BaseModel):
    """One fault."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    at_s: Duration = Field(ge=0.0, le=_DAY_S, alias="at")
    """When, counted from the run's first step."""

    kind: Annotated[FaultKind, Field(strict=False)]
    """What."""

    target: str
    """What it hits."""

    duration_s: Duration = Field(default=0.0, ge=0.0, le=_DAY_S, alias="for")
    """How long it lasts."""

    way: Literal["both", "up", "down"] = "both"
    """Which direction of a link; up is towards the syncer."""

    rate_bytes_per_s: Rate | None = Field(default=None, gt=0.0, alias="rate")
    """What a throttled link still carries, each way."""

    delay_s: Duration | None = Field(default=None, gt=0.0, le=3600.0, alias="delay")
    """How much later a delayed link's bytes arrive, each way."""

    flips_per_byte: float | None = Field(default=None, gt=0.0, le=1.0)
    """How likely a byte of a noisy link has a bit turned over."""

    offset_s: Duration | None = Field(default=None, ge=1.0, le=100 * _DAY_S, alias="offset")
    """By how much a skewed clock is ahead."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        what = self.kind.value
        sort, colon, name = self.target.partition(":")
        if sort not in _HITS[self.kind] or bool(name) == (sort in _WITHOUT_NAME) or bool(colon) != bool(name):
            forms = [each if each in _WITHOUT_NAME else f"{each}:REGION" for each in _HITS[self.kind]]
            raise _refuse(f"target: {what} can't hit {self.target!r}", f"it hits {' or '.join(forms)}")
        if (self.kind in _AT_ONCE) == bool(self.duration_s):
            raise _refuse(f"for: {what} {'is over at once' if self.kind in _AT_ONCE else 'needs how long it lasts'}")
        for key, owner in _OWNERS.items():
            written = type(self).model_fields[key].alias or key
            if (getattr(self, key) is None) == (self.kind is owner):
                raise _refuse(f"{written}: {what} {'needs it' if self.kind is owner else 'has none'}")
        if self.way != "both" and (sort != "link" or self.kind is FaultKind.HALF_OPEN):
            raise _refuse(f"way: {what} has no direction")
        return self

    @property
    def sort(self) -> str:
        """What kind of thing it hits: syncer, learner, uplink, link or disk."""
        return self.target.partition(":")[0]

    @property
    def region(self) -> str:
        """The region that it hits; "" where it isn't one."""
        return self.target.partition(":")[2]


class FaultSchedule(BaseModel):
    """All faults of a run, in order of time."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    seed: int = Field(default=1, ge=0, lt=2**63)
    """Which bits a noisy link turns over; also what faults were drawn from, where they were."""

    faults: Annotated[tuple[FaultSettings, ...], Field(strict=False, min_length=1, max_length=10_000)]
    """In any order."""

    @model_validator(mode="after")
    def _joins_once(self) -> Self:
        for target, times in Counter(each.target for each in self.faults if each.kind is FaultKind.JOIN).items():
            if times > 1:
                raise _refuse(f"{target} joins {times} times")
        return self

    @property
    def in_order(self) -> tuple[FaultSettings, ...]:
        """By time; those of one moment as they were written."""
        return tuple(sorted(self.faults, key=lambda fault: fault.at_s))

    @property
    def late(self) -> frozenset[str]:
        """Regions whose learners aren't there at the start."""
        return frozenset(fault.region for fault in self.faults if fault.kind is FaultKind.JOIN)

    @property
    def end_s(self) -> float:
        """When the last fault is over."""
        return max(fault.at_s + fault.duration_s for fault in self.faults)

    def to_json(self) -> str:
        """Text that `load_schedule` reads back to an equal schedule."""
        written = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return json.dumps({"seed": self.seed, **written}, indent=2) + "\n"


def load_schedule(path: Path) -> FaultSchedule:
    """Read a schedule: TOML with [[faults]] tables, or JSON as `to_json` writes it.

    Raises:
        ConfigError: The file can't be read, or what it says is no schedule; every mistake is named.
    """
    return parse_schedule(read_table(path), str(path))


def parse_schedule(table: Mapping[str, Any], where: str) -> FaultSchedule:
    """A schedule from nested plain values.

    Raises:
        ConfigError: They are none.
    """
    try:
        return FaultSchedule.model_validate(table)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentences(error)), where=where) from error


def check_schedule(schedule: FaultSchedule, regions: Sequence[str], quorum: int, where: str) -> None:
    """See that a schedule fits a run.

    Args:
        schedule: What is to befall it.
        regions: Of the run.
        quorum: Of the run.
        where: The schedule's file, for people.

    Raises:
        ConfigError: It names a region that isn't there, or leaves too few learners to begin with.
    """
    unknown = [
        f"faults[{index}].target: there is no region {fault.region}"
        for index, fault in enumerate(schedule.faults)
        if fault.region and fault.region not in regions
    ]
    if unknown:
        raise ConfigError("; ".join(unknown), where=where, hint=f"regions are {', '.join(regions)}")
    if len(regions) - len(schedule.late) < quorum:
        raise ConfigError(f"{len(schedule.late)} late joiners leave fewer learners than a quorum", where=where)


def _sentences(error: ValidationError) -> Iterator[str]:
    shape: type[BaseModel]
    for detail in mistakes(error):
        match detail["loc"]:
            case ("faults", int(index), *rest):
                place, shape = ".".join([f"faults[{index}]", *map(str, rest)]), FaultSettings
            case rest:
                place, shape = ".".join(map(str, rest)), FaultSchedule
        problem, hint = problem_and_hint(detail, partial(_near, str(rest[-1]) if rest else "", shape))
        said = f"{problem} ({hint})" if hint else problem
        yield f"{place}: {said}" if place else said


def _near(key: str, shape: type[BaseModel]) -> str:
    names = [field.alias or name for name, field in shape.model_fields.items()]
    near = nearest(key, names)
    return f"did you mean {near}" if near else f"there are {', '.join(names)}"
