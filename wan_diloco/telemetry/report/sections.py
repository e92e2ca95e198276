"""The report's figures: what each shows, and in which words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from wan_diloco.telemetry.report.bars import Share, row_bars, stacked_bar
from wan_diloco.telemetry.report.charts import Axis, Chart, Series, line_chart, overlaid_class, series_class
from wan_diloco.telemetry.report.markup import Markup, tag
from wan_diloco.telemetry.report.scales import bucket_means, last_of_buckets, spell
from wan_diloco.telemetry.summary import fresh_learners

if TYPE_CHECKING:
    from wan_diloco.telemetry.report.scales import Point
    from wan_diloco.telemetry.report.story import Evaluation, Progress, Story, Traffic

__all__ = [
    "baseline_headlines",
    "fate",
    "headlines",
    "losses",
    "participation_figures",
    "traffic",
]

_POINTS: Final = 240
_STRETCHES: Final = 120  # of a noisy loss
_BYTE_VOCABULARY: Final = 256
_FATES: Final = {"merged": "f0", "outstanding": "f7", "not merged yet": "f7"}
_MEANINGS: Final = {
    "merged": "went into the published model",
    "outstanding": "trained, and its fate was not decided yet",
    "not merged yet": "trained, and not merged so far: on its way, or lost for one of the reasons of the ledger",
    "overlap": "trained while its fragment was being merged, and overwritten when the result was installed",
    "late": "its round closed without it, and the next value was installed over it before it could be sent",
    "stale_base": "rested on a value that was more than one version old when it could have been merged",
    "refused": "the syncer could not use it: damaged, not finite, or not what was agreed on",
    "crashed": "its learner died before it was sent",
    "lease_ended": "its learner was away, and another needed the data that it read",
    "unreadable": "it was acknowledged, and the syncer's disk could not give it back",
    "syncer_lost": "a syncer that restarted knew nothing of it",
    "run_ended": "trained or sent after the last round of its fragment",
    "removed": "its region was taken out of the configuration before it was sent",
    "refragmented": "was under way when the parameters were cut into other fragments",
}


def headlines(story: Story) -> Markup:
    """The figures that a run is judged by."""
    balance = story.figure("ledger_balance")
    least = story.figure("merges_per_fragment_min")
    tiles: list[tuple[str, str, str]] = [
        *_quality_tiles(story),
        ("Participation", _spelled(story, "participation", "percent"), "of the rounds a region was live for"),
        (
            "Rounds",
            _spelled(story, "rounds", "count"),
            "published" if least is None else f"at least {spell(least, 'count')} of each fragment",
        ),
        ("Bits a parameter", _bits(story), "merged work up, updates down"),
        (
            "Ledger",
            "-" if balance is None else ("balanced" if balance == 0 else f"off by {spell(balance, 'count')}"),
            "written at the end of the run" if balance is None else "every token accounted for",
        ),
    ]
    if balance:
        tiles[-1] = (tiles[-1][0], tiles[-1][1], "tokens lost or counted twice")
    if repeated := story.figure("repeated_units"):
        tiles.append(("Repeated data", spell(repeated, "count"), "units that came twice into the journal"))
    return _tiles(tiles)


def baseline_headlines(story: Story) -> Markup:
    """Those of them that make sense without a wide area."""
    return _tiles(_quality_tiles(story))


def _quality_tiles(story: Story) -> list[tuple[str, str, str]]:
    model = "trained model" if story.is_baseline else "published model"
    about = f"nats a byte, {model}"
    if not story.finished:
        about += " so far"
    elif story.figure("validation_nats_per_byte") is None:
        about = str(story.summary.get("evaluation", "not evaluated"))
    regions = "tokens a second" if story.is_baseline else "tokens a second, all regions, from the first steps on"
    return [
        ("Validation loss", _spelled(story, "validation_nats_per_byte", "number"), about),
        ("Test loss", _spelled(story, "test_nats_per_byte", "number"), f"nats a byte, {model}"),
        ("Tokens trained", _spelled(story, "tokens_trained", "tokens"), f"in {spell(_wall_s(story), 'time')}"),
        ("Speed", _spelled(story, "tokens_per_s", "tokens"), regions),
    ]


def _tiles(tiles: list[tuple[str, str, str]]) -> Markup:
    return tag(
        "dl",
        [
            tag("div", tag("dt", name), tag("dd", value), tag("dd", about, class_="about"), class_="tile")
            for name, value, about in tiles
        ],
        class_="tiles",
    )


def losses(story: Story) -> list[Markup]:
    """Loss of each learner and of the published model, against tokens and against time."""
    model = story.config.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    bytewise = vocabulary in {None, _BYTE_VOCABULARY}
    figures = []
    for key, axis, along, of_score in (
        ("tokens", Axis(title="tokens trained by all regions", unit="tokens"), _by_tokens, _score_by_tokens),
        ("time", Axis(title="time since the start", unit="time"), _by_time, _score_by_time),
    ):
        learners = [
            Series(
                name=region,
                points=bucket_means([along(item) for item in story.progress[region]], _STRETCHES),
                style=f"{series_class(index)} thin {overlaid_class(index)}",
            )
            for index, region in enumerate(story.regions)
            if region in story.progress
        ]
        published = [
            Series(
                name=f"trained model, {split}" if story.is_baseline else f"published model, {split}",
                points=bucket_means([of_score(item) for item in story.evaluations if item.split == split], _POINTS),
                style=style,
                marked=True,
            )
            for split, style in (("validation", "ink"), ("test", "ink-2"))
            if any(item.split == split for item in story.evaluations)
        ]
        note = "Training loss of each learner (means of short stretches); score of the published model, at publication."
        if story.is_baseline:
            note = "The training loss (means of short stretches) and the score on held-out text."
        title = f"Loss against {key}"
        if bytewise:
            figures.append(_loss_chart(f"loss-{key}", title, note, axis, [*learners, *published], "nats a byte"))
        else:
            # A token isn't a byte here: two scales, so two charts.
            words = "Each learner's training loss."
            figures.append(
                _loss_chart(f"loss-{key}", f"Training {title.lower()}", words, axis, learners, "nats a token")
            )
            words = "The published model on held-out text."
            name = f"Published model's {title.lower()}"
            figures.append(_loss_chart(f"score-{key}", name, words, axis, published, "nats a byte"))
    return figures


def traffic(story: Story) -> list[Markup]:
    """Bytes each way over time, for each region, on the same scale."""
    most = max(
        (max(item[-1].uplink_bytes, item[-1].downlink_bytes) for item in story.traffic.values() if item), default=0
    )
    figures = []
    for key, title, reading in (
        ("uplink", "Sent to the syncer", _uplink),
        ("downlink", "Received from the syncer", _downlink),
    ):
        series = [
            Series(
                name=region,
                points=last_of_buckets([reading(item) for item in story.traffic[region]], _POINTS),
                style=f"{series_class(index)} {overlaid_class(index)}",
            )
            for index, region in enumerate(story.regions)
            if story.traffic.get(region)
        ]
        chart = Chart(
            key=f"traffic-{key}",
            title=title,
            note="Bytes over the wide-area link since the start.",
            x=Axis(title="time since the start", unit="time"),
            y=Axis(title="bytes", unit="bytes", high=most * 1.05 or None),
            series=series,
        )
        figures.append(line_chart(chart))
    return figures


def participation_figures(story: Story) -> list[Markup]:
    """Participation over the rounds, and of each region."""
    shares = [
        (float(index), len(fresh_learners(item)) / len(item.members) if item.members else float("nan"))
        for index, item in enumerate(story.rounds, start=1)
    ]
    buckets = max(min(len(shares), 12), min(120, len(shares) // 8))
    over_rounds = Chart(
        key="participation-rounds",
        title="Participation over the rounds",
        note="Live members that a round merged fresh; means of neighbouring rounds.",
        x=Axis(title="round, in order of publication", unit="count"),
        y=Axis(title="share of live members", unit="percent", high=1.0),
        series=[Series(name="merged fresh", points=bucket_means(shares, buckets), style="s0")],
    )
    attendance = story.attendance()
    rows = [
        (
            name,
            (
                Share(name="fresh", value=fresh / max(1, invited, fresh + stale), style="f0"),
                Share(name="one round late", value=stale / max(1, invited, fresh + stale), style="f1"),
            ),
        )
        for name in story.regions
        if name in attendance
        for invited, fresh, stale in [attendance[name]]
    ]
    note = "Of the rounds in which it was a live member: those that merged its work. Away is not counted; see Regions."
    return [line_chart(over_rounds), row_bars("participation-regions", "Participation of each region", note, rows)]


def fate(story: Story) -> Markup:
    """Where the tokens went."""
    shares = []
    reasons = 0
    for item in story.fates():
        style = _FATES.get(item.name)
        if style is None:
            style = f"f{1 + reasons % 6}"
            reasons += 1
        merged = item.name in _FATES
        name = item.name if merged else f"discarded: {item.name}"
        shares.append(Share(name=name, value=item.tokens, style=style, about=_MEANINGS.get(item.name, "")))
    if "tokens_merged" in story.summary:
        note = (
            "Every token that a learner trained on, by the ledger: means over the fragments, weighted by their bytes."
        )
    else:
        note = "So far, from the rounds alone: the ledger is written when the run ends or is interrupted."
    return stacked_bar("fate", "Where the tokens went", note, shares, "tokens")


def _loss_chart(key: str, title: str, note: str, x: Axis, series: list[Series], y: str) -> Markup:
    axis = Axis(title=y, unit="number", from_zero=False)
    return line_chart(Chart(key=key, title=title, note=note, x=x, y=axis, series=series, cut_above=True))


def _by_tokens(item: Progress) -> Point:
    return float(item.tokens), item.loss


def _by_time(item: Progress) -> Point:
    return item.elapsed_s, item.loss


def _score_by_tokens(item: Evaluation) -> Point:
    return float(item.tokens), item.nats_per_byte


def _score_by_time(item: Evaluation) -> Point:
    return item.elapsed_s, item.nats_per_byte


def _uplink(item: Traffic) -> Point:
    return item.elapsed_s, float(item.uplink_bytes)


def _downlink(item: Traffic) -> Point:
    return item.elapsed_s, float(item.downlink_bytes)


def _spelled(story: Story, key: str, unit: Any) -> str:
    value = story.figure(key)
    if value is None:
        return "-"
    return f"{value:#.4g}" if unit == "number" else spell(value, unit)


def _bits(story: Story) -> str:
    parts = []
    for key, arrow in (("uplink_bits_per_parameter", "\u2191"), ("downlink_bits_per_parameter", "\u2193")):
        value = story.figure(key)
        parts.append("-" if value is None else f"{value:#.3g} {arrow}")
    return "  ".join(parts)


def _wall_s(story: Story) -> float:
    return story.figure("wall_s") or story.end_s
