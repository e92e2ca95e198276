"""The report's part on faults that were made to befall a run, from its `chaos.json`; lenient about what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wan_diloco.telemetry.report.charts import Axis, Chart, Series, line_chart
from wan_diloco.telemetry.report.markup import Markup, tag
from wan_diloco.telemetry.report.scales import spell
from wan_diloco.telemetry.report.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["faults_part"]

_HEAD = ("At", "Fault", "Lasted", "Well again after", "Stood still", "Rounds missed", "Tokens discarded meanwhile")
_NOTE = (
    "Well again: work that came after the fault's end was merged, of the region that it hit, or of all. Stood still: "
    "the longest time without a published round until then. Faults at the same time share what they cost."
)


def faults_part(chaos: Mapping[str, Any]) -> Markup:
    """A table of the faults and what each cost, and who was there over time.

    Args:
        chaos: The content of `chaos.json`; not empty.
    """
    items = [item for item in chaos.get("befallen") or () if isinstance(item, dict)]
    note = _NOTE
    for kind, reason in (chaos.get("without") or {}).items():
        note += f" Without {kind}: {reason}."
    return tag(
        "div",
        _presence(chaos),
        table("Faults", _HEAD, [_row(item) for item in items], key="faults", note=note),
        class_="stack",
    )


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    what = f"{item.get('kind')} {item.get('target')}"
    if item.get("problem"):
        return (_time(item.get("at_s")), what, str(item["problem"]), "-", "-", "-", "-")
    lasted = _time(item.get("ended_s", 0.0) - item.get("began_s", 0.0))
    well = _time(item.get("well_after_s"))
    if item.get("cut_short"):
        lasted, well = f"{lasted}, undone early, as the run ended", "-"
    discarded = item.get("tokens_discarded") or {}
    missed = item.get("rounds_missed")
    return (
        _time(item.get("began_s")),
        what,
        lasted,
        well,
        _time(item.get("standstill_s")),
        "-" if missed is None else str(missed),
        ", ".join(f"{reason} {spell(tokens, 'tokens')}" for reason, tokens in discarded.items()) or "-",
    )


def _time(value: Any) -> str:
    return spell(value, "time") if isinstance(value, int | float) else "never"


def _presence(chaos: Mapping[str, Any]) -> Markup:
    found = [item for item in chaos.get("presence") or () if isinstance(item, dict)]
    names = {
        "alive": "alive: the process is there",
        "training": "training: it takes steps",
        "averaged": "averaged: merged fresh",
    }
    series = [
        Series(
            name=name,
            points=[(float(item["from_s"]), float(item[key])) for item in found if key in item],
            style=f"s{index}",
        )
        for index, (key, name) in enumerate(names.items())
    ]
    most = max((float(item.get("regions", 0)) for item in found), default=1.0)
    chart = Chart(
        key="presence",
        title="Alive, training and averaged",
        note="Regions, in stretches of five seconds: whose process was there, who took steps, whose work was merged.",
        x=Axis(title="time since the first step", unit="time"),
        y=Axis(title="regions", unit="count", high=most),
        series=series,
    )
    return line_chart(chart)
