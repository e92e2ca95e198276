"""What is compared takes turns."""

from __future__ import annotations

import importlib

import pytest


def test_each_ratio_is_that_of_neighbours() -> None:
    """A machine that slows down during the rounds changes no ratio that was taken within one."""
    rounds = importlib.import_module("rounds")
    calls: list[str] = []

    def clock(job: object) -> float:
        assert callable(job)
        job()
        return (3.0 if calls[-1] == "job" else 2.0) * (1 + (len(calls) - 1) // 2)

    over, times_s = rounds.ratios(lambda: calls.append("job"), lambda: calls.append("yardstick"), 3, clock=clock)
    assert calls == ["yardstick", "job"] * 4
    assert over == pytest.approx([1.5, 1.5, 1.5])
    assert times_s == [6.0, 9.0, 12.0]


def test_a_figure_is_noted_with_its_extremes() -> None:
    rounds = importlib.import_module("rounds")
    result: dict[str, float] = {}
    rounds.note(result, "x", [3.0, 1.0, 2.0, 9.0])
    assert result == {"x": 2.5, "x_min": 1.0, "x_max": 9.0}
