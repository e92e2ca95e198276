"""The report's tables: durations, regions, what happened, the configuration."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.telemetry.report.markup import Markup, tag
from wan_diloco.telemetry.report.scales import spell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wan_diloco.telemetry.report.story import Moment, Story

__all__ = ["configuration", "durations", "moments", "regions_table", "table"]

_MOMENTS: Final = 200


def durations(story: Story) -> Markup | None:
    """How long the phases of a round took."""
    if not story.rounds:
        return None
    phases: list[tuple[str, list[float]]] = [
        ("waiting for quorum", [item.quorate_s - item.opened_s for item in story.rounds]),
        ("grace", [item.closed_s - item.quorate_s for item in story.rounds]),
        ("merging", [item.merged_s - item.closed_s for item in story.rounds]),
        ("publishing", [item.published_s - item.merged_s for item in story.rounds]),
        ("whole round", [item.published_s - item.opened_s for item in story.rounds]),
    ]
    rows = [
        (name, spell(statistics.median(values), "time"), spell(_high(values), "time"), spell(max(values), "time"))
        for name, values in phases
    ]
    return table("Duration of the rounds", ("Phase", "Median", "95 % below", "Longest"), rows, key="durations")


def regions_table(story: Story) -> Markup | None:
    """One line a region."""
    attendance = story.attendance()
    rows = []
    for name in story.regions:
        seen = story.traffic.get(name)
        invited, fresh, _ = attendance.get(name, (0, 0, 0))
        rows.append(
            (
                name,
                spell(story.tokens.get(name, 0), "tokens"),
                spell(seen[-1].uplink_bytes, "bytes") if seen else "-",
                spell(seen[-1].downlink_bytes, "bytes") if seen else "-",
                spell(fresh / invited, "percent") if invited else "-",
                spell(fresh / len(story.rounds), "percent") if story.rounds else "-",
            )
        )
    if not rows:
        return None
    head = ("Region", "Tokens trained", "Sent", "Received", "Merged in, of its live rounds", "Of all rounds")
    return table("Regions", head, rows, key="regions")


def moments(key: str, title: str, items: Sequence[Moment], empty: str) -> Markup:
    """A table of moments, the newest last; only so many are shown."""
    if not items:
        return tag("section", tag("h3", title), tag("p", empty, class_="empty"), class_="card", id=key)
    shown = items[-_MOMENTS:]
    named = any(item.name for item in shown)
    rows = [
        (
            spell(item.elapsed_s, "time"),
            item.name if named else ("-" if item.duration_s is None else spell(item.duration_s, "time")),
            item.text,
        )
        for item in shown
    ]
    second = "Event" if named else "For"
    note = f"The newest {len(shown)} of {len(items)}." if len(shown) < len(items) else ""
    return table(title, ("At", second, "What" if named else "Why"), rows, key=key, note=note, words=True)


def configuration(config: Mapping[str, Any]) -> Markup:
    """The resolved configuration, one group a table."""
    if not config:
        return tag(
            "section", tag("p", "This run folder has no config.json.", class_="empty"), class_="card", id="config"
        )
    groups: list[Markup] = []
    loose = {key: value for key, value in config.items() if not isinstance(value, dict) and not _is_tables(value)}
    if loose:
        groups.append(_settings("general", loose))
    for key, value in config.items():
        if isinstance(value, dict):
            groups.append(_settings(key, value))
        elif _is_tables(value):
            groups.extend(_settings(f"{key} {index}", item) for index, item in enumerate(value, start=1))
    return tag("div", groups, class_="settings", id="config")


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _settings(name: str, values: Mapping[str, Any]) -> Markup:
    rows = [
        tag(
            "tr",
            tag("th", key, scope="row"),
            tag("td", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)),
        )
        for key, value in values.items()
    ]
    return tag("section", tag("h3", name), tag("table", tag("tbody", rows), class_="pairs"), class_="card")


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    key: str,
    note: str = "",
    words: bool = False,
) -> Markup:
    """A table in a card; the first cell of each row is its name."""
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    return tag(
        "section",
        tag("h3", title),
        tag("p", note, class_="note") if note else None,
        tag(
            "div",
            tag(
                "table",
                tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])),
                tag("tbody", body),
                class_="words" if words else "figures",
            ),
            class_="scroll",
        ),
        class_="card",
        id=key,
    )


def _high(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
