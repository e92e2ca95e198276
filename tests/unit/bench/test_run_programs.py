"""What the programs that measure whole runs make of what the runs say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


def test_seeds_that_are_off_in_opposite_ways_are_off_by_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = importlib.import_module("chaos")

    def one(seed: int, *_: object) -> dict[str, Any]:
        off = dict.fromkeys(chaos.ZEROS, 0) | {"ledger_balance": 5 if seed == 1 else -5}
        figures: dict[str, float] = {
            "faults": 3,
            "longest_standstill_s": 1.0,
            "loss_over_faultless": 1.0,
            "merged_over_faultless": 1.0,
        }
        figures |= {"replayed_versions": 7, "replayed_otherwise": int(seed == 1)}
        return off | figures | {"never_well": ["kill syncer at 3 s"] if seed == 2 else []}

    monkeypatch.setattr(chaos, "one", one)
    result = chaos.measure([1, 2], 300.0, 22)
    assert (result["ledger_balance"], result["never_well"], result["repeated_units"]) == (10, 1, 0)
    assert (result["replayed_versions"], result["replayed_otherwise"]) == (14, 1)


def test_a_fault_that_nobody_recovered_from_is_no_quick_recovery(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chaos = importlib.import_module("chaos")
    never = {"kind": "kill", "target": "syncer", "began_s": 3.0, "problem": "", "well_after_s": None}
    report = dict.fromkeys(chaos.ZEROS, 0) | {"faults": 1, "faults_by_kind": {}, "longest_standstill_s": 1.0}
    monkeypatch.setattr(chaos, "finished", lambda _: json.dumps(report | {"befallen": [never]}))
    came_to = {"tokens_merged": 92.0, "tokens_discarded": {}, "validation_nats_per_byte": 1.0}
    monkeypatch.setattr(chaos, "summary", lambda _: came_to)
    result = chaos.one(1, 300.0, 22, tmp_path)
    assert result["well_after_s_max"] is None
    assert result["never_well"] == ["kill syncer at 3.0 s"]
    assert result["replayed_otherwise"] == 1, "there is nothing that could be replayed"


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.71), (2, 4.30), (8, 2.57), (19, 2.09), (1000, 1.98)])
def test_the_bounds_of_a_mean_are_never_too_narrow(degrees: int, value: float) -> None:
    assert importlib.import_module("kill_one").student_t(degrees) == value
