"""Line charts in SVG: axes with units, a legend, a sentence for who can't see it, points for the page's script.

Colors are classes that the style sheet resolves for light and dark; nothing here knows what is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from wan_diloco.telemetry.report.markup import Markup, join, number, script_json, tag
from wan_diloco.telemetry.report.scales import Point, Scale, Unit, spell, ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Axis", "Chart", "Series", "empty_figure", "legend", "line_chart", "overlaid_class", "series_class"]

_LEFT: Final = 58
_RIGHT: Final = 18
_TOP: Final = 26
_BOTTOM: Final = 44
_HUES: Final = 8
# The share of points that must be inside the frame when a chart is cut above: the first steps of a loss, and the
# score of the untrained model, would flatten all the rest.
_INSIDE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line.

    Attributes:
        name: For the legend.
        points: In order of x; a NaN is a gap.
        style: Its classes; see `series_class`.
        marked: Whether each point gets a dot.
    """

    name: str
    points: Sequence[Point]
    style: str
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis.

    Attributes:
        title: With its unit in words.
        unit: How its values are written.
        from_zero: Whether zero belongs to it.
        high: Its upper end, where the points don't decide it.
    """

    title: str
    unit: Unit
    from_zero: bool = True
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A line chart without its size.

    Attributes:
        key: Unique on the page; letters, digits and dashes.
        title: What is shown.
        note: How it was made, in small print.
        series: Lines, drawn in this order.
        cut_above: Whether the highest few points may leave the frame.
    """

    key: str
    title: str
    note: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    cut_above: bool = False


def series_class(index: int) -> str:
    """The classes of the n-th thing: a hue, and a dash where the hues begin anew."""
    return f"s{index % _HUES}" + (f" dash{index // _HUES % 3}" if index >= _HUES else "")


def overlaid_class(index: int) -> str:
    """The class of the n-th of lines that may coincide: gaps in the later ones, through which the earlier show."""
    return "" if index == 0 else f"over{min(index, 3)}"


def legend(entries: Sequence[tuple[str, str]], *, lines: bool = False) -> Markup | None:
    """Names beside their colors: pairs of a name and its classes. None for fewer than one."""
    if not entries:
        return None
    kind = "swatch line" if lines else "swatch"
    return tag(
        "ul",
        [tag("li", tag("span", class_=f"{kind} {style}", aria_hidden="true"), name) for name, style in entries],
        class_="legend",
    )


def empty_figure(key: str, title: str, reason: str) -> Markup:
    """What stands where a chart has no data."""
    return tag(
        "figure",
        tag("figcaption", tag("h3", title, id=f"{key}-title")),
        tag("p", reason, class_="empty"),
        class_="card",
        aria_labelledby=f"{key}-title",
        id=key,
    )


def line_chart(chart: Chart, *, width: int = 560, height: int = 300) -> Markup:
    """The chart as a figure; a placeholder where no line has a finite point."""
    series = [item for item in chart.series if any(math.isfinite(y) for _, y in item.points)]
    if not series:
        return empty_figure(chart.key, chart.title, "No data yet.")
    x_scale = _x_scale(chart.x, series, width)
    y_scale, cut = _y_scale(chart, series, height)
    clip = f"{chart.key}-clip"
    frame = tag(
        "clipPath",
        tag("rect", x=_LEFT, y=_TOP - 6, width=width - _LEFT - _RIGHT + 6, height=height - _TOP - _BOTTOM + 12),
        id=clip,
    )
    drawing = tag(
        "svg",
        tag("defs", frame),
        _axes(chart, x_scale, y_scale, width, height),
        tag("g", [_line(item, x_scale, y_scale) for item in series], clip_path=f"url(#{clip})"),
        tag("g", class_="cursor"),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=_describe(chart, series),
        data_chart=f"{chart.key}-data",
    )
    note = chart.note + (" The highest points are above the frame." if cut else "")
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.title, id=f"{chart.key}-title"), tag("p", note, class_="note")),
        legend([(item.name, item.style) for item in series], lines=True),
        tag("div", drawing, class_="plot"),
        script_json(f"{chart.key}-data", _data(chart, series, x_scale, y_scale)),
        class_="card",
        aria_labelledby=f"{chart.key}-title",
        id=chart.key,
    )


def _x_scale(axis: Axis, series: Sequence[Series], width: int) -> Scale:
    values = [x for item in series for x, _ in item.points]
    low = 0.0 if axis.from_zero else min(values)
    high = max(values) if axis.high is None else axis.high
    return Scale(low=low, high=high if high > low else low + 1.0, start=_LEFT, end=width - _RIGHT)


def _y_scale(chart: Chart, series: Sequence[Series], height: int) -> tuple[Scale, bool]:
    values = sorted(y for item in series for _, y in item.points if math.isfinite(y))
    low, high, cut = values[0], values[-1], False
    if chart.cut_above:
        # Each line has its own quantile, so that a line of few points isn't cut because of one of many.
        robust = max(_quantile([y for _, y in item.points if math.isfinite(y)]) for item in series)
        robust += 0.15 * (robust - low)
        # Cutting has to be worth it.
        high, cut = (robust, True) if 0 < robust - low < 0.7 * (high - low) else (high, False)
    if chart.y.high is not None:
        high = chart.y.high
    span = high - low or abs(high) or 1.0
    if chart.y.from_zero:
        low = min(0.0, low)
    else:
        low -= 0.05 * span
    if chart.y.high is None:
        high += 0.05 * span
    return Scale(low=low, high=high, start=height - _BOTTOM, end=_TOP), cut


def _quantile(values: list[float]) -> float:
    return sorted(values)[max(0, min(len(values) - 2, int(_INSIDE * len(values))))]


def _axes(chart: Chart, x_scale: Scale, y_scale: Scale, width: int, height: int) -> Markup:
    bottom = height - _BOTTOM
    across = [
        (
            tag("line", x1=_LEFT, x2=width - _RIGHT, y1=y_scale(value), y2=y_scale(value), class_="grid"),
            tag("text", spell(value, chart.y.unit), x=_LEFT - 8, y=y_scale(value) + 4, class_="tick end"),
        )
        for value in ticks(y_scale.low, y_scale.high, chart.y.unit, count=6)
    ]
    # Words like "12 min 30 s" need room.
    along = [
        (
            tag("line", x1=x_scale(value), x2=x_scale(value), y1=bottom, y2=bottom + 4, class_="base"),
            tag("text", spell(value, chart.x.unit), x=x_scale(value), y=bottom + 18, class_="tick middle"),
        )
        for value in ticks(x_scale.low, x_scale.high, chart.x.unit, count=max(3, width // 110))
    ]
    return tag(
        "g",
        across,
        tag("line", x1=_LEFT, x2=width - _RIGHT, y1=bottom, y2=bottom, class_="base"),
        along,
        tag("text", chart.y.title, x=4, y=12, class_="axis"),
        tag("text", chart.x.title, x=width - _RIGHT, y=height - 6, class_="axis end"),
        aria_hidden="true",
    )


def _line(item: Series, x_scale: Scale, y_scale: Scale) -> Markup:
    steps = []
    pen_up = True
    for x, y in item.points:
        if not math.isfinite(y):
            pen_up = True
            continue
        steps.append(f"{'M' if pen_up else 'L'}{number(x_scale(x))} {number(y_scale(y))}")
        pen_up = False
    finite = [(x, y) for x, y in item.points if math.isfinite(y)]
    seen = [(x, y) for x, y in finite if y <= y_scale.high]
    dots = seen if item.marked or len(finite) == 1 else []
    return join(
        tag("path", d="".join(steps), class_=f"series {item.style}"),
        [tag("circle", cx=x_scale(x), cy=y_scale(y), r=3, class_=f"dot {item.style}") for x, y in dots],
    )


def _describe(chart: Chart, series: Sequence[Series]) -> str:
    parts = [f"{chart.title}. Line chart of {chart.y.title} against {chart.x.title}."]
    for item in series:
        finite = [y for _, y in item.points if math.isfinite(y)]
        unit = chart.y.unit
        parts.append(f"{item.name}: from {spell(finite[0], unit)} to {spell(finite[-1], unit)}.")
    return " ".join(parts)


def _data(chart: Chart, series: Sequence[Series], x_scale: Scale, y_scale: Scale) -> dict[str, object]:
    def significant(value: float) -> float | None:
        return float(f"{value:.6g}") if math.isfinite(value) else None

    return {
        "x": [x_scale.low, x_scale.high, x_scale.start, x_scale.end, chart.x.unit],
        "y": [y_scale.low, y_scale.high, y_scale.start, y_scale.end, chart.y.unit],
        "series": [
            {
                "name": item.name,
                "style": item.style,
                "points": [significant(value) for value in chain.from_iterable(item.points)],
            }
            for item in series
        ],
    }
