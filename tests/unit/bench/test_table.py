"""README's tables: what is written, what is left alone, and what is told of bars."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import REPOSITORY

MACHINE = {"processor": "Z80", "cores": 1, "memory_gib": 0.1, "load_1min_before": 0.5, "python": "3.11.0"}


@pytest.fixture
def table() -> Any:
    return importlib.import_module("table")


def figures(key: str, median: float) -> dict[str, Any]:
    return {"machine": MACHINE, key: median, f"{key}_min": median / 2, f"{key}_max": 2 * median}


def line_of(text: str, says: str) -> str:
    (line,) = [line for line in text.splitlines() if says in line]
    return line


def test_a_figure_stands_beside_its_bar_and_its_command(table: Any) -> None:
    text = table.figures_table({"merge": figures("rda4_over_plain4", 2.5)})
    line = line_of(text, "merge of 4 by RDA")
    assert "| 2.5 (1.25 to 5) | <= 2.5 | `python bench/merge.py --threads` |" in line
    assert text.endswith("On Z80, 1 cores, 0.1 GiB, Python 3.11.0.")


@pytest.mark.parametrize(
    ("program", "key", "good", "bad"),
    [("merge", "rda4_over_plain4", 2.5, 2.51), ("transport", "grpc_over_raw_tcp", 0.6, 0.59)],
)
def test_a_missed_bar_is_told(table: Any, program: str, key: str, good: float, bad: float) -> None:
    met, missed = {program: figures(key, good)}, {program: figures(key, bad)}
    assert table.misses(met) == []
    assert "(missed)" not in table.figures_table(met)
    (miss,) = table.misses(missed)
    assert key in miss
    assert table.figures_table(missed).count("(missed)") == 1


@pytest.mark.parametrize(
    ("program", "key", "bar"),
    [
        ("chaos", "longest_standstill_s", 15.0),
        ("kill_one", "round_closed_after_s", 2.0),
        ("slow_regions", "periods_between_merges", 3.0),
    ],
)
def test_a_bound_on_the_worst_is_missed_by_the_worst(table: Any, program: str, key: str, bar: float) -> None:
    found = {program: figures(key, bar / 2)}
    assert table.misses(found) == []
    found[program][f"{key}_max"] = bar + 1
    (miss,) = table.misses(found)
    assert f"{key} is {bar + 1:.3g}, and should be <= {bar:g}, the worst" in miss
    assert table.figures_table(found).count("(missed)") == 1


def test_what_was_not_measured_is_said_to_be_so(table: Any) -> None:
    text = table.figures_table({})
    assert text.count("not measured") == len(table.ROWS)
    assert table.misses({}) == []


def test_only_what_is_between_the_markers_changes(table: Any) -> None:
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    once = table.between(text, "x", "new")
    assert once == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    assert table.between(once, "x", "new") == once


@pytest.mark.parametrize(
    "text", ["", "<!-- x:end --> <!-- x:begin -->", "<!-- x:begin --> <!-- x:begin --> <!-- x:end -->"]
)
def test_a_text_without_good_markers_is_refused(table: Any, text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        table.between(text, "x", "new")


def test_the_readme_has_the_markers(table: Any) -> None:
    text = (REPOSITORY / "README.md").read_text()
    for name in ("bench", "quality"):
        assert f"<!-- {name}:begin -->\nHERE\n<!-- {name}:end -->" in table.between(text, name, "HERE")


def test_make_bench_runs_every_program_that_a_row_names(table: Any) -> None:
    (line,) = [
        line
        for line in (REPOSITORY / "Makefile").read_text().replace("\\\n", " ").splitlines()
        if line.startswith("BENCHES :=")
    ]
    commands = shlex.split(line.partition(":=")[2])
    assert {f"python bench/{command}" for command in commands} >= {table.command(row.program) for row in table.ROWS}
    assert all((REPOSITORY / "bench" / command.split()[0]).exists() for command in commands)
    assert commands[-1] == "quality.py"


def test_results_are_read_by_program(table: Any, tmp_path: Path) -> None:
    (tmp_path / "stall.json").write_text(json.dumps(figures("stall_over_step", 0.01)))
    assert table.load(tmp_path)["stall"]["stall_over_step"] == 0.01
