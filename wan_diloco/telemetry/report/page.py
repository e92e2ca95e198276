"""One HTML file that tells a run: no network, no library, readable without its script."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING

from wan_diloco.telemetry.report import sections, tables
from wan_diloco.telemetry.report.faults import faults_part
from wan_diloco.telemetry.report.markup import Markup, tag
from wan_diloco.telemetry.report.scales import spell
from wan_diloco.telemetry.report.story import Story, read_story
from wan_diloco.telemetry.report.timeline import timeline

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["render_report"]

_PART_TITLES = (
    ("quality", "Quality"),
    ("participation", "Participation"),
    ("rounds", "Rounds"),
    ("traffic", "Traffic"),
    ("tokens", "Tokens"),
    ("faults", "Faults"),
    ("story", "What happened"),
    ("configuration", "Configuration"),
)


def render_report(run_folder: Path) -> str:
    """The report of a run or a baseline, finished or not, from `metrics.jsonl`, `summary.json` and `config.json`.

    Faults that were made to befall it are in `chaos.json`, if any.
    Whatever is missing or cut off leaves a gap in the report and nothing worse.

    Returns:
        A complete HTML document in ASCII and UTF-8 alike.

    Raises:
        ConfigError: The metrics file is there and can't be read.
    """
    story = read_story(run_folder)
    if story.is_baseline:
        return _page(story, sections.baseline_headlines(story), _baseline_parts(story))
    parts = _run_parts(story)
    if story.chaos:
        parts["faults"] = faults_part(story.chaos)
    return _page(story, sections.headlines(story), parts)


def _baseline_parts(story: Story) -> dict[str, Markup]:
    return {
        "quality": tag("div", sections.losses(story), class_="grid"),
        "configuration": tables.configuration(story.config),
    }


def _run_parts(story: Story) -> dict[str, Markup]:
    return {
        "quality": tag("div", sections.losses(story), class_="grid"),
        "participation": tag("div", sections.participation_figures(story), class_="grid"),
        "rounds": tag("div", timeline(story.rounds, story.end_s), tables.durations(story), class_="stack"),
        "traffic": tag("div", sections.traffic(story), class_="grid"),
        "tokens": tag("div", sections.fate(story), tables.regions_table(story), class_="stack"),
        "story": tag(
            "div",
            tables.moments("waiting", "What was waited for", story.waits, "Nothing was waited for."),
            tables.moments("events", "Events", story.events, "No event was recorded."),
            class_="grid",
        ),
        "configuration": tables.configuration(story.config),
    }


def _page(story: Story, headlines: Markup, parts: dict[str, Markup]) -> str:
    titles = [(key, title) for key, title in _PART_TITLES if key in parts]
    body = tag(
        "main",
        _header(story, titles),
        headlines,
        [
            tag("section", tag("h2", title), parts[key], id=f"part-{key}", class_="part", aria_label=title)
            for key, title in titles
        ],
        tag("footer", tag("p", _footer(story))),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{story.name} - run report"),
        tag("style", Markup(_resource("report.css"))),
    )
    return "<!doctype html>\n" + tag(
        "html", head, tag("body", body, tag("script", Markup(_resource("report.js")))), lang="en"
    )


def _header(story: Story, titles: list[tuple[str, str]]) -> Markup:
    facts = []
    if story.is_baseline:
        facts.append(f"baseline: {story.summary['baseline']}")
    elif story.regions:
        facts.append(f"{len(story.regions)} region{'s' if len(story.regions) > 1 else ''}: {', '.join(story.regions)}")
    wire = story.config.get("wire")
    if isinstance(wire, dict) and wire.get("codec"):
        facts.append(f"codec {wire['codec']}")
    if story.began_wall_s is not None and 0 <= story.began_wall_s < 2**36:
        began = datetime.fromtimestamp(story.began_wall_s, tz=UTC)
        facts.append(f"began {began:%Y-%m-%d %H:%M} UTC")
    if story.damaged_lines:
        facts.append(f"{story.damaged_lines} unreadable line{'s' if story.damaged_lines > 1 else ''} in the metrics")
    state = ("finished", "done") if story.finished else (f"not finished, {spell(story.end_s, 'time')} seen", "open")
    return tag(
        "header",
        tag("p", "Run report", class_="kicker"),
        tag("h1", story.name, tag("span", state[0], class_=f"state {state[1]}")),
        tag("p", " \u00b7 ".join(facts), class_="facts") if facts else None,
        tag(
            "nav",
            [tag("a", title, href=f"#part-{key}") for key, title in titles],
            aria_label="Parts of the report",
        ),
    )


def _footer(story: Story) -> str:
    records = sum(map(len, story.progress.values())) + len(story.rounds) + len(story.evaluations)
    return f"wan-diloco. Made from {records} records; curves are averaged or thinned to at most a few hundred points."


def _resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
