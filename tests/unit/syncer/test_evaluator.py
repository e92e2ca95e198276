"""The evaluator's work, without its process."""

from __future__ import annotations

import io
import json
import math

import pytest

from tests.support.syncer import tiny_config
from tests.support.text import write_text_corpus
from wan_diloco.models import build_model, model_tensors
from wan_diloco.storage import save_snapshot
from wan_diloco.syncer.evaluator import Evaluator, main, serve


@pytest.fixture
def scene(tmp_path):
    text = write_text_corpus(tmp_path / "text.txt")
    config = tiny_config(data={"source": f"text:{text}"}, evaluation={"tokens": "500"})
    tensors = model_tensors(build_model(config))
    for name in ("step-000000000", "final"):
        save_snapshot(tmp_path / "published", name, tensors, {"global_step": 7, "tokens": 99})
    return Evaluator(config, tmp_path), tmp_path


def _ask(evaluator, *requests):
    answers = io.StringIO()
    serve(evaluator, [json.dumps(request) for request in requests], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_point_of_the_curve_is_about_the_entropy_of_bytes_at_first_and_its_snapshot_goes(scene):
    evaluator, folder = scene
    (answer,) = _ask(evaluator, {"snapshot": "step-000000000", "final": False})
    assert answer["validation_loss"] == pytest.approx(math.log(256), abs=0.3)
    assert (answer["global_step"], answer["tokens"], answer["final"]) == (7, 99, False)
    assert [path.name for path in (folder / "published").iterdir()] == ["final"]


def test_the_final_model_is_evaluated_on_both_sets_writes_and_stays(scene):
    evaluator, folder = scene
    (answer,) = _ask(evaluator, {"snapshot": "final", "final": True})
    kept = json.loads((folder / "evaluation.json").read_text())
    assert kept["test_loss"] == answer["test_loss"] > 0
    assert kept["validation_loss"] == answer["validation_loss"]
    assert kept["sample"].startswith("The ")
    assert (folder / "published" / "final").is_dir()


def test_a_snapshot_that_is_gone_is_a_problem_and_the_next_is_evaluated(scene):
    evaluator, _ = scene
    first, second = _ask(
        evaluator, {"snapshot": "step-000000001", "final": False}, {"snapshot": "step-000000000", "final": False}
    )
    assert "step-000000001" in first["problem"]
    assert "validation_loss" in second


def test_an_evaluator_without_a_run_says_so_and_leaves_with_its_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.nice", lambda _: 0)
    assert main([str(tmp_path)]) == 78
    assert "config.json" in capsys.readouterr().err
