"""Bars in SVG: one stacked bar of shares, and a row of bars for each region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wan_diloco.telemetry.report.charts import empty_figure, legend
from wan_diloco.telemetry.report.markup import Markup, tag
from wan_diloco.telemetry.report.scales import Unit, spell

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Share", "row_bars", "stacked_bar"]

_GAP: Final = 2  # between neighbours, so that they stay apart without an outline
_LABEL_WIDTH: Final = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a bar: its name, its size, its classes, and in a sentence what it is."""

    name: str
    value: float
    style: str
    about: str = ""


def stacked_bar(key: str, title: str, note: str, shares: Sequence[Share], unit: Unit, *, width: int = 1140) -> Markup:
    """One bar of shares that add up to the whole, with a table of them below."""
    total = sum(share.value for share in shares)
    if total <= 0:
        return empty_figure(key, title, "No data yet.")
    parts = []
    left = 0.0
    for share in shares:
        length = share.value / total * width
        parts.append(
            tag(
                "rect",
                tag("title", f"{share.name}: {spell(share.value, unit)} ({spell(share.value / total, 'percent')})"),
                x=left,
                y=4,
                width=max(length - _GAP, 1.0),
                height=36,
                rx=3,
                class_=f"fill {share.style}",
            )
        )
        if length > _LABEL_WIDTH:
            label = spell(share.value / total, "percent")
            parts.append(tag("text", label, x=left + 10, y=27, class_=f"inside on-{share.style}"))
        left += length
    sentence = ", ".join(
        f"{share.name} {spell(share.value, unit)} or {spell(share.value / total, 'percent')}" for share in shares
    )
    rows = [
        tag(
            "tr",
            tag("th", tag("span", class_=f"swatch {share.style}", aria_hidden="true"), share.name, scope="row"),
            tag("td", spell(share.value, unit)),
            tag("td", spell(share.value / total, "percent")),
            tag("td", share.about, class_="about"),
        )
        for share in shares
    ]
    titles = [tag("th", title, scope="col") for title in ("Fate", "Tokens", "Share")]
    head = tag("tr", titles, tag("th", "What that means", scope="col", class_="about"))
    return tag(
        "figure",
        tag("figcaption", tag("h3", title, id=f"{key}-title"), tag("p", note, class_="note")),
        tag(
            "div",
            tag("svg", parts, viewBox=f"0 0 {width} 44", role="img", aria_label=f"{title}. Stacked bar: {sentence}."),
            class_="plot",
        ),
        tag("div", tag("table", tag("thead", head), tag("tbody", rows), class_="figures"), class_="scroll"),
        class_="card wide",
        aria_labelledby=f"{key}-title",
        id=key,
    )


def row_bars(
    key: str, title: str, note: str, rows: Sequence[tuple[str, Sequence[Share]]], *, width: int = 560
) -> Markup:
    """A bar for each row, of shares of one (0 to 1), written at its end."""
    if not rows:
        return empty_figure(key, title, "No data yet.")
    left, right, pitch = 118, 112, max(34, min(62, 250 // len(rows)))
    thick = pitch - 14 if pitch < 48 else pitch // 2 + 4
    room = width - left - right
    height = pitch * len(rows) + 26
    parts: list[Markup] = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + value * room
        parts.append(tag("line", x1=x, x2=x, y1=2, y2=height - 24, class_="base" if value == 0 else "grid"))
        parts.append(tag("text", spell(value, "percent"), x=x, y=height - 6, class_="tick middle"))
    sentences = []
    for index, (name, shares) in enumerate(rows):
        top = index * pitch + (pitch - thick) // 2
        middle = top + thick // 2 + 5
        at = float(left)
        parts.append(tag("text", name, x=left - 10, y=middle, class_="name end"))
        for share in shares:
            length = max(0.0, min(1.0, share.value)) * room
            if length > 0:
                text = f"{name}, {share.name}: {spell(share.value, 'percent')}"
                box = {"x": at, "y": top, "width": max(length - _GAP, 1.0), "height": thick, "rx": 3}
                parts.append(tag("rect", tag("title", text), **box, class_=f"fill {share.style}"))
            at += length
        written = " + ".join(spell(share.value, "percent") for share in shares if share.value > 0) or "0 %"
        parts.append(tag("text", written, x=at + 8, y=middle, class_="value"))
        sentences.append(f"{name} " + ", ".join(f"{spell(share.value, 'percent')} {share.name}" for share in shares))
    names = {share.name: share.style for _, shares in rows for share in shares}
    return tag(
        "figure",
        tag("figcaption", tag("h3", title, id=f"{key}-title"), tag("p", note, class_="note")),
        legend(list(names.items())),
        tag(
            "div",
            tag(
                "svg",
                parts,
                viewBox=f"0 0 {width} {height}",
                role="img",
                aria_label=f"{title}. Bars: {'; '.join(sentences)}.",
            ),
            class_="plot",
        ),
        class_="card",
        aria_labelledby=f"{key}-title",
        id=key,
    )
