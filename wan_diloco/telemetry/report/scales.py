"""Numbers to positions and to words: scales, round ticks, formats, and fewer points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Point", "Scale", "Unit", "bucket_means", "last_of_buckets", "spell", "spell_duration", "ticks"]

Point: TypeAlias = tuple[float, float]
Unit: TypeAlias = Literal["time", "tokens", "bytes", "number", "percent", "count"]

_TIME_STEPS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000),
)
_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A straight line from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The position of a value."""
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start) if span else self.start


def ticks(low: float, high: float, unit: Unit, count: int = 5) -> list[float]:
    """Round values from low to high, about so many."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    wanted = (high - low) / count
    if unit == "time":
        step = next((step for step in _TIME_STEPS_S if step >= wanted), math.ceil(wanted / 864000) * 864000.0)
    else:
        base = 10.0 ** math.floor(math.log10(wanted))
        step = next(factor * base for factor in (1, 2, 2.5, 5, 10) if factor * base >= wanted * (1 - 1e-9))
        if unit in {"count", "tokens", "bytes"}:
            step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def spell(value: float, unit: Unit) -> str:
    """A value for a person, with three or four digits and its unit."""
    if not math.isfinite(value):
        return "-"
    match unit:
        case "time":
            return spell_duration(value)
        case "percent":
            return f"{value * 100:.3g} %"
        case "number":
            return f"{value:.4g}"
        case "tokens" | "count":
            return _with_prefix(value, "")
        case "bytes":
            return _with_prefix(value, "B")


def spell_duration(duration_s: float) -> str:
    """A duration for a person: "80 ms", "2.5 s", "12 min 30 s", "3 h 05 min"."""
    if duration_s == 0:
        return "0"
    if abs(duration_s) < 1:
        return f"{duration_s * 1000:.3g} ms"
    if duration_s < 60:
        return f"{duration_s:.3g} s"
    whole = round(duration_s)
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {minutes:02d} min" if minutes else f"{hours} h"
    return f"{minutes} min {seconds:02d} s" if seconds else f"{minutes} min"


def bucket_means(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most so many points: the mean of each stretch of x. A stretch without finite values is a gap (NaN)."""
    if len(points) <= buckets:
        return list(points)
    return [
        (
            math.fsum(x for x, _ in group) / len(group),
            math.fsum(finite) / len(finite) if (finite := [y for _, y in group if math.isfinite(y)]) else math.nan,
        )
        for group in _groups(points, buckets)
    ]


def last_of_buckets(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most so many points and one: the first, and the last of each stretch of x. For totals, which only rise."""
    if len(points) <= buckets:
        return list(points)
    return [points[0], *(group[-1] for group in _groups(points[1:], buckets))]


def _groups(points: Sequence[Point], buckets: int) -> list[list[Point]]:
    low, high = points[0][0], points[-1][0]
    width = (high - low) / buckets or 1.0
    groups: dict[int, list[Point]] = {}
    for point in points:
        groups.setdefault(min(buckets - 1, int((point[0] - low) / width)), []).append(point)
    return [groups[index] for index in sorted(groups)]


def _with_prefix(value: float, unit: str) -> str:
    gap = " " if unit else ""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{gap}{prefix}{unit}" if unit else f"{value / factor:.3g} {prefix}"
    text = f"{value:.0f}" if value == int(value) else f"{value:.3g}"
    return f"{text}{gap}{unit}"
