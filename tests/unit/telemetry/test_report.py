"""The report: one file that parses, that shows every plot, and that no damaged or hostile run folder can break."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from wan_diloco.protocol.ledger import DiscardReason
from wan_diloco.telemetry import (
    EvaluationRecord,
    EventRecord,
    LearnerRecord,
    Line,
    MissingLearner,
    RoundRecord,
    TrafficRecord,
    WaitingRecord,
)
from wan_diloco.telemetry.report import render_report
from wan_diloco.telemetry.report.story import read_story

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLOTS = {
    *("loss-tokens", "loss-time", "participation-rounds", "participation-regions", "timeline"),
    *("traffic-uplink", "traffic-downlink", "fate"),
}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\ud800"


class Page(HTMLParser):
    """Checks that elements nest, and keeps them with their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert len(attributes) == len(attrs)
        figures = [item["id"] or "" for name, item in self.open if name == "figure"]
        self.elements.append((tag, attributes, figures))
        if tag not in {"meta", "input", "br"}:
            self.open.append((tag, attributes))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and (key := self.open[-1][1].get("id")):
            self.texts[key] = self.texts.get(key, "") + data

    def inside(self, figure: str, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, figures in self.elements if name == tag and figure in figures]

    def figures(self) -> set[str]:
        return {attributes["id"] or "" for name, attributes, _ in self.elements if name == "figure"}


def coordinates(page: Page, figure: str) -> list[int]:
    """How many points each line of a figure has."""
    paths = page.inside(figure, "path")
    return [len(re.findall("[ML]", item["d"] or "")) for item in paths if "series" in (item["class"] or "")]


def test_every_plot_has_its_points_title_and_sentence(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    page = Page(render_report(run_writer(tmp_path, run_lines)))
    assert page.figures() == PLOTS
    assert [count > 20 for count in coordinates(page, "loss-tokens")] == [True] * 4 + [False] * 2
    assert coordinates(page, "loss-time")[4] == 13
    assert all(count > 20 for count in coordinates(page, "traffic-uplink") + coordinates(page, "traffic-downlink"))
    assert coordinates(page, "participation-rounds")[0] > 20
    assert len(page.inside("participation-regions", "rect")) >= 4
    assert len(page.inside("fate", "rect")) == 6
    assert len(page.inside("timeline", "rect")) > 24 * 3 * 3
    for figure in PLOTS:
        pictures = page.inside(figure, "svg")
        assert pictures
        assert all(len(item["aria-label"] or "") > 30 for item in pictures)
        assert page.texts[f"{figure}-title"]
    sentence = page.inside("traffic-uplink", "svg")[0]["aria-label"] or ""
    assert "bytes against time since the start" in sentence
    assert "us-east: from" in sentence


def test_no_link_leaves_the_file(tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]) -> None:
    text = render_report(run_writer(tmp_path, run_lines))
    page = Page(text)
    for name, attributes, _ in page.elements:
        assert name not in {"link", "iframe", "img", "object"}
        assert not attributes.get("src")
        assert (attributes.get("href") or "#").startswith("#")
    # The one address is the name of SVG in the script.
    assert set(re.findall(r"[a-z]+://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_headline_figures_are_those_of_the_summary(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    text = render_report(run_writer(tmp_path, run_lines))
    for words in (
        "<dd>1.531</dd>",
        "<dd>2.1 M</dd>",
        "<dd>83 %</dd>",
        "<dd>balanced</dd>",
        "3.74",
        "4.00",
        ">finished<",
    ):
        assert words in text
    assert "discarded: stale_base" in text
    assert "round 812: 1 of 2 learners, eu-west silent 4.1 s" in text
    assert "learner_left" in text
    assert "period_steps" in text


def test_a_score_stands_where_its_model_was_published(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    """The evaluator answers half a minute late."""
    late = [
        dataclasses.replace(
            line, elapsed_s=line.elapsed_s + 30, record=dataclasses.replace(line.record, published_s=line.elapsed_s)
        )
        if isinstance(line.record, EvaluationRecord)
        else line
        for line in run_lines
    ]
    in_time, delayed = (run_writer(tmp_path / name, lines) for name, lines in (("a", run_lines), ("b", late)))
    drawn = [read_story(folder).evaluations for folder in (in_time, delayed)]
    assert drawn[0] == drawn[1]


def test_what_was_interrupted_is_not_finished_and_tells_where_the_tokens_went(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path, run_lines)
    summary = json.loads((folder / "summary.json").read_text())
    interim = {"finished": False, "validation_nats_per_byte": None, "test_nats_per_byte": None}
    (folder / "summary.json").write_text(json.dumps({**summary, **interim}))
    text = render_report(folder)
    assert "not finished" in text
    assert "discarded: stale_base" in text
    assert "published model so far" in text


def test_a_final_model_without_a_score_is_not_given_an_older_one(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path, run_lines)
    summary = json.loads((folder / "summary.json").read_text())
    lost = {"validation_nats_per_byte": None, "test_nats_per_byte": None, "evaluation": "the evaluator is gone"}
    (folder / "summary.json").write_text(json.dumps({**summary, **lost}))
    tiles = render_report(folder).partition("</dl>")[0]
    assert "<dt>Validation loss</dt><dd>-</dd>" in tiles
    assert "the evaluator is gone" in tiles


def test_each_fate_is_explained_and_each_share_says_of_what(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path, run_lines)
    summary = json.loads((folder / "summary.json").read_text())
    fates = dict.fromkeys(map(str, DiscardReason), 1000)
    (folder / "summary.json").write_text(json.dumps({**summary, "tokens_discarded": fates}))
    text = render_report(folder)
    meanings = re.findall('<td class="about">(.*?)</td>', text)
    assert len(meanings) == len(fates) + 2
    assert len({meaning for meaning in meanings if meaning}) == len(meanings), "none without words, none like another"
    assert "of the rounds a region was live for" in text
    assert "Of all rounds" in text


def test_the_time_of_the_evaluation_is_no_time_of_the_run(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    score = EvaluationRecord(
        tokens=5, global_step=6, split="validation", nats_per_byte=1.5, final=True, published_s=60.0
    )
    last = Line(elapsed_s=1500.0, wall_s=1.6e9, record=score)
    assert read_story(run_writer(tmp_path, [*run_lines, last])).end_s < 65


def test_the_speed_of_a_run_that_goes_on_is_that_of_its_training(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    late = [replace(line, elapsed_s=line.elapsed_s + 500.0) for line in run_lines]
    folders = run_writer(tmp_path / "quick", run_lines), run_writer(tmp_path / "late", late)
    for folder in folders:
        (folder / "summary.json").unlink(missing_ok=True)
    quick, slow = (read_story(folder).figure("tokens_per_s") for folder in folders)
    assert slow == pytest.approx(quick)


def test_lines_that_coincide_show_through_each_other(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    page = Page(render_report(run_writer(tmp_path, run_lines)))
    styles = [item["class"] or "" for item in page.inside("loss-tokens", "path")]
    assert [style.split()[-1] for style in styles[:4]] == ["thin", "over1", "over2", "over3"]
    assert [style.split()[-1] for style in styles[4:]] == ["ink", "ink-2"], "on top of all, and whole"


def test_the_folder_that_is_shown_is_the_one_that_the_run_is_in(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / "elsewhere", run_lines)
    (folder / "config.json").write_text(json.dumps({"run": {"name": "sotu", "folder": "runs/sotu"}}))
    text = render_report(folder)
    assert "runs/sotu" not in text
    assert str(folder) in text


def test_a_baseline_has_a_report_of_what_it_has(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    lines = [line for line in run_lines if isinstance(line.record, LearnerRecord | EvaluationRecord)]
    folder = run_writer(tmp_path, lines)
    summary = {"baseline": "alone", "validation_nats_per_byte": 1.4567, "tokens": 4_000_000, "wall_s": 60.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    text = render_report(folder)
    page = Page(text)
    assert page.figures() == {"loss-tokens", "loss-time"}
    assert "baseline: alone" in text
    assert "1.457" in text
    assert "<dd>4 M</dd>" in text
    assert "Participation" not in text
    assert "trained model, validation" in text


def test_a_ledger_that_does_not_balance_is_shown(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path, run_lines)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "ledger_balance": 1024}))
    text = render_report(folder)
    assert "off by 1.02 k" in text
    assert "lost or counted twice" in text


def test_a_run_that_goes_on_is_told_from_its_records(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    text = render_report(run_writer(tmp_path, run_lines, finished=False))
    page = Page(text)
    assert page.figures() == PLOTS
    assert "not finished" in text
    assert "not merged yet" in text
    assert len(page.inside("fate", "rect")) == 2


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_cut_off_metrics_file_is_told_as_far_as_it_goes(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path], share: float
) -> None:
    folder = run_writer(tmp_path, run_lines, finished=False)
    data = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(data[: int(len(data) * share)])
    page = Page(render_report(folder))
    assert page.figures() == PLOTS


def test_an_empty_folder_has_a_report_that_says_so(tmp_path: Path) -> None:
    text = render_report(tmp_path)
    page = Page(text)
    assert page.figures() == PLOTS
    assert text.count("No data yet.") == 7
    assert "no config.json" in text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"\xff", b"{}", b'{"run": 5, "model": [], "regions": {"a": 1}}']
)
def test_damaged_files_beside_the_metrics_leave_gaps_only(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path], content: bytes
) -> None:
    folder = run_writer(tmp_path, run_lines)
    (folder / "config.json").write_bytes(content)
    (folder / "summary.json").write_bytes(content)
    assert Page(render_report(folder)).figures() == PLOTS


def hostile(record: Any) -> Any:
    """The record with every text in it replaced."""
    match record:
        case RoundRecord():
            merged = tuple(dataclasses.replace(item, learner=HOSTILE) for item in record.merged)
            missing = (MissingLearner(learner=HOSTILE, reason=HOSTILE),)
            return dataclasses.replace(record, members=(HOSTILE,), merged=merged, missing=missing)
        case LearnerRecord() | TrafficRecord():
            return dataclasses.replace(record, region=HOSTILE)
        case EvaluationRecord():
            return dataclasses.replace(record, split=HOSTILE)
        case WaitingRecord():
            return WaitingRecord(reason=HOSTILE)
        case EventRecord():
            return EventRecord(name=HOSTILE, detail=HOSTILE)
    raise AssertionError


def test_everything_from_outside_is_escaped(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    lines = [dataclasses.replace(line, record=hostile(line.record)) for line in run_lines]
    folder = run_writer(tmp_path, lines)
    config = {
        "run": {"name": HOSTILE},
        HOSTILE: {HOSTILE: HOSTILE},
        "wire": {"codec": HOSTILE},
        "regions": [{HOSTILE: 1}],
    }
    (folder / "config.json").write_text(json.dumps(config))
    summary = {"tokens_merged": 5, "tokens_discarded": {HOSTILE: 5}}
    (folder / "summary.json").write_text(json.dumps(summary))
    text = render_report(folder)
    text.encode()
    page = Page(text)
    scripts = [attributes for name, attributes, _ in page.elements if name == "script"]
    # Data of five line charts and of the timeline, and the page's own script.
    assert [item.get("type") for item in scripts] == ["application/json"] * (len(scripts) - 1) + [None]
    assert all(not key.startswith("on") for _, attributes, _ in page.elements for key in attributes)
    assert "\x00" not in text
    assert "<script>alert" not in text


def test_numbers_that_are_not_finite_are_gaps(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    lines = [
        dataclasses.replace(line, record=dataclasses.replace(line.record, loss=float("nan")))
        if isinstance(line.record, LearnerRecord) and (line.record.region == "us-east" or 20 < line.elapsed_s < 30)
        else line
        for line in run_lines
    ]
    text = render_report(run_writer(tmp_path, lines))
    page = Page(text)
    drawn = [str(value) for _, attributes, figures in page.elements if figures for value in attributes.values()]
    assert drawn
    assert not [value for value in drawn if "nan" in value.lower()]
    learners = page.inside("loss-time", "path")[:3]
    assert all((item["d"] or "").count("M") == 2 for item in learners)
    for element, attributes, _ in page.elements:
        if element == "script" and attributes.get("type"):
            json.loads(page.texts[attributes["id"] or ""])


def test_tokens_that_are_no_bytes_get_a_scale_of_their_own(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path, run_lines)
    (folder / "config.json").write_text(json.dumps({"model": {"vocab": 4096}}))
    page = Page(render_report(folder))
    assert page.figures() == PLOTS | {"score-tokens", "score-time"}
    assert "nats a token" in (page.inside("loss-tokens", "svg")[0]["aria-label"] or "")
    assert "nats a byte" in (page.inside("score-tokens", "svg")[0]["aria-label"] or "")


def test_a_long_run_gives_a_file_of_bounded_size(
    tmp_path: Path, lines_of: Callable[..., list[Line]], run_writer: Callable[..., Path]
) -> None:
    text = render_report(run_writer(tmp_path, lines_of(duration_s=620.0)))
    page = Page(text)
    assert len(text) < 1_200_000
    assert all(count <= 241 for figure in ("loss-time", "traffic-uplink") for count in coordinates(page, figure))
    assert len(json.loads(page.texts["timeline-data"])["rounds"]) == 6000
    assert "Details of the newest 6000 rounds only." in text


def test_twenty_regions_are_told_apart_by_hue_and_dash(
    tmp_path: Path, run_lines: list[Line], run_writer: Callable[..., Path]
) -> None:
    lines = [
        dataclasses.replace(line, record=dataclasses.replace(line.record, region=f"region-{index}"))
        for index in range(20)
        for line in run_lines
        if isinstance(line.record, TrafficRecord) and line.record.region == "us-east"
    ]
    page = Page(render_report(run_writer(tmp_path, lines)))
    classes = [item["class"] for item in page.inside("traffic-uplink", "path")]
    assert len(set(classes)) == 20
