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
    text = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("BENCHES :=")]
    commands = shlex.split(line.partition(":=")[2])
    assert {f"python bench/{command}" for command in commands} >= {table.command(row.program) for row in table.ROWS}
    assert all((REPOSITORY / "bench" / command.split()[0]).exists() for command in commands)
    assert commands[-1] == "quality.py"


def test_results_are_read_by_program(table: Any, tmp_path: Path) -> None:
    (tmp_path / "stall.json").write_text(json.dumps(figures("stall_over_step", 0.01)))
    assert table.load(tmp_path)["stall"]["stall_over_step"] == 0.01
