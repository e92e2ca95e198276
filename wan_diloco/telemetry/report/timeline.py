"""The fragments' rounds over time: an overview of all, and a window in which each round is readable.

The window that is drawn here is the last one; the page's script draws any other from the same data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from wan_diloco.telemetry.report.charts import empty_figure, legend
from wan_diloco.telemetry.report.markup import Markup, join, number, script_json, tag
from wan_diloco.telemetry.report.scales import Scale, spell, ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wan_diloco.telemetry.records import RoundRecord

__all__ = ["timeline"]

WIDTH: Final = 1140
LEFT: Final = 58
RIGHT: Final = 18
PHASES: Final = (
    ("waiting for quorum", "p0"),
    ("grace", "p1"),
    ("merging", "p2"),
    ("publishing", "p3"),
)

_OVERVIEW_HEIGHT: Final = 62
_MARGIN: Final = 58  # above and below the bars of the window
_BINS: Final = 180
# The window shows about so many rounds of each fragment, and the page carries so many rounds in all.
_ROUNDS_PER_FRAGMENT: Final = 5
_ROUNDS_MAX: Final = 6000
_TITLE: Final = "Rounds of each fragment"


def timeline(rounds: Sequence[RoundRecord], end_s: float) -> Markup:
    """The figure.

    Args:
        rounds: In order of publication.
        end_s: Elapsed at the run's end.
    """
    if not rounds:
        return empty_figure("timeline", _TITLE, "No round was published yet.")
    end_s = max(end_s, rounds[-1].published_s)
    fragments = max(item.fragment for item in rounds) + 1
    shown = rounds[-_ROUNDS_MAX:]
    window = _last_window(shown, fragments, end_s)
    pitch = max(5, min(16, 400 // fragments))
    note = (
        f"{len(rounds)} rounds of {fragments} fragments. Above: rounds published over the whole run; drag or use the "
        "arrow keys to move the window. Below: each round of the window, from its opening to its publication."
    )
    if len(shown) < len(rounds):
        note += f" Details of the newest {len(shown)} rounds only."
    data = {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "pitch": pitch,
        "floor": 20 + fragments * pitch,
        "end": end_s,
        "window": list(window),
        "rounds": [_compact(item) for item in shown],
    }
    return tag(
        "figure",
        tag("figcaption", tag("h3", _TITLE, id="timeline-title"), tag("p", note, class_="note")),
        legend(PHASES),
        tag("div", _overview(rounds, end_s, window), class_="plot"),
        tag("div", _window(shown, fragments, window, pitch), class_="plot"),
        script_json("timeline-data", data),
        class_="card wide",
        aria_labelledby="timeline-title",
        id="timeline",
    )


def _compact(item: RoundRecord) -> list[object]:
    times = (item.opened_s, item.quorate_s, item.closed_s, item.merged_s, item.published_s)
    missing = ", ".join(f"{entry.learner} ({entry.reason})" for entry in item.missing)
    return [item.fragment, *(round(time, 3) for time in times), item.round_id, len(item.merged), missing]


def _last_window(rounds: Sequence[RoundRecord], fragments: int, end_s: float) -> tuple[float, float]:
    first = rounds[-min(len(rounds), _ROUNDS_PER_FRAGMENT * fragments)]
    return max(0.0, min(first.opened_s, end_s * 0.999)), end_s


def _overview(rounds: Sequence[RoundRecord], end_s: float, window: tuple[float, float]) -> Markup:
    scale = Scale(low=0.0, high=end_s or 1.0, start=LEFT, end=WIDTH - RIGHT)
    counts = [0] * _BINS
    for item in rounds:
        counts[max(0, min(_BINS - 1, int(item.published_s / (end_s or 1.0) * _BINS)))] += 1
    most = max(counts)
    top, floor = 6, _OVERVIEW_HEIGHT - 18
    pitch = (WIDTH - LEFT - RIGHT) / _BINS
    columns = [
        tag(
            "rect",
            x=LEFT + index * pitch,
            y=floor - count / most * (floor - top),
            width=max(1.0, pitch - 1),
            height=count / most * (floor - top),
            class_="column",
        )
        for index, count in enumerate(counts)
        if count
    ]
    start, stop = scale(window[0]), scale(window[1])
    marks = [
        tag("text", spell(value, "time"), x=scale(value), y=_OVERVIEW_HEIGHT - 4, class_="tick middle")
        for value in ticks(0.0, end_s, "time", count=9)
    ]
    return tag(
        "svg",
        columns,
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor, class_="base"),
        marks,
        tag("text", "all", x=LEFT - 10, y=floor - 4, class_="tick end"),
        tag("rect", x=start, y=1, width=max(3.0, stop - start), height=floor - 1, rx=3, class_="brush"),
        viewBox=f"0 0 {WIDTH} {_OVERVIEW_HEIGHT}",
        id="timeline-overview",
        tabindex=0,
        role="slider",
        aria_orientation="horizontal",
        aria_valuemin=0,
        aria_valuemax=round(end_s),
        aria_valuenow=round(window[0]),
        aria_valuetext=f"{spell(window[0], 'time')} to {spell(window[1], 'time')}",
        aria_label=f"Window of the timeline. {len(rounds)} rounds over {spell(end_s, 'time')}.",
    )


def _window(rounds: Sequence[RoundRecord], fragments: int, window: tuple[float, float], pitch: int) -> Markup:
    scale = Scale(low=window[0], high=window[1], start=LEFT, end=WIDTH - RIGHT)
    height = fragments * pitch + _MARGIN
    inside = [item for item in rounds if item.published_s >= window[0] and item.opened_s <= window[1]]
    every = max(1, -(-12 // pitch)) if fragments > 1 else 1
    names = [
        tag("text", str(index), x=LEFT - 10, y=20 + index * pitch + pitch / 2 + 4, class_="tick end")
        for index in range(0, fragments, every)
    ]
    floor = 20 + fragments * pitch
    longest = max((item.published_s - item.opened_s for item in inside), default=0.0)
    return tag(
        "svg",
        tag("text", "fragment", x=4, y=12, class_="axis"),
        names,
        tag("g", [_ruler(value, scale, floor) for value in ticks(*window, "time", count=9)], id="timeline-ruler"),
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor, class_="base"),
        tag("text", "time since the start", x=WIDTH - RIGHT, y=height - 4, class_="axis end"),
        tag("g", [_bar(item, scale, pitch) for item in inside], id="timeline-bars"),
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        id="timeline-window",
        aria_label=(
            f"{_TITLE}. Bars from opening to publication, {len(inside)} rounds between {spell(window[0], 'time')} and "
            f"{spell(window[1], 'time')}; the longest took {spell(longest, 'time')}."
        ),
    )


def _ruler(value: float, scale: Scale, floor: int) -> Markup:
    return join(
        tag("line", x1=scale(value), x2=scale(value), y1=20, y2=floor, class_="grid"),
        tag("text", spell(value, "time"), x=scale(value), y=floor + 16, class_="tick middle"),
    )


def _bar(item: RoundRecord, scale: Scale, pitch: int) -> Markup:
    times = (item.opened_s, item.quorate_s, item.closed_s, item.merged_s, item.published_s)
    top = number(20 + item.fragment * pitch + max(1, pitch // 6))
    thick = pitch - 2 * max(1, pitch // 6)
    parts = []
    for (_, style), start, stop in zip(PHASES, times, times[1:], strict=False):
        left = max(scale.start, scale(start))
        right = min(scale.end, scale(stop))
        if stop > start and right > left:
            width = max(1.0, right - left)
            parts.append(tag("rect", x=left, y=top, width=width, height=thick, class_=f"fill {style}"))
    spent = ", ".join(
        f"{name} {spell(max(0.0, stop - start), 'time')}"
        for (name, _), start, stop in zip(PHASES, times, times[1:], strict=False)
    )
    title = f"round {item.round_id}, fragment {item.fragment}: {len(item.merged)} merged; {spent}"
    return tag("g", tag("title", title), parts)
