"""The evaluator's work, without its process."""

from __future__ import annotations

import io
import json
import math
import threading

import pytest

from tests.support.snapshots import save_snapshot
from tests.support.syncer import tiny_config
from tests.support.text import write_text_corpus
from wan_diloco.models import build_model, model_tensors
from wan_diloco.syncer.evaluator import Evaluator, main, serve


@pytest.fixture
def scene(tmp_path):
    text = write_text_corpus(tmp_path / "text.txt")
    config = tiny_config(data={"source": f"text:{text}"}, evaluation={"tokens": "500"})
    tensors = model_tensors(build_model(config))
    for name in ("step-000000000", "final"):
        save_snapshot(tmp_path / "published", name, tensors, {"global_step": 7, "tokens": 99, "published_s": 2.5})
    return Evaluator(config, tmp_path), tmp_path


def _ask(evaluator, *requests, threads=1):
    answers = io.StringIO()
    lines = [json.dumps({"hurry": request["final"], **request}) for request in requests]
    serve(evaluator, lines, answers, threads=threads)
    said = [json.loads(line) for line in answers.getvalue().splitlines()]
    return [answer for answer in said if "progress" not in answer]


def test_a_point_of_the_curve_is_about_the_entropy_of_bytes_at_first_and_its_snapshot_goes(scene):
    evaluator, folder = scene
    (answer,) = _ask(evaluator, {"snapshot": "step-000000000", "final": False})
    assert answer["validation_loss"] == pytest.approx(math.log(256), abs=0.3)
    assert (answer["global_step"], answer["tokens"], answer["final"]) == (7, 99, False)
    assert answer["published_s"] == 2.5, "when it was published, not when it was looked at"
    assert [path.name for path in (folder / "published").iterdir()] == ["final"]


def test_the_final_model_is_evaluated_on_both_sets_writes_and_stays(scene):
    evaluator, folder = scene
    (answer,) = _ask(evaluator, {"snapshot": "final", "final": True})
    kept = json.loads((folder / "evaluation.json").read_text())
    assert kept["test_loss"] == answer["test_loss"] > 0
    assert kept["validation_loss"] == answer["validation_loss"]
    assert kept["sample"].startswith("The ")
    assert (folder / "published" / "final").is_dir()


def test_a_thread_more_changes_no_bit(scene):
    evaluator, _ = scene
    one, three = (_ask(evaluator, {"snapshot": "final", "final": True}, threads=number)[0] for number in (1, 3))
    assert one == three


def test_it_steps_behind_the_run_only_for_what_nobody_waits_for(scene, monkeypatch):
    evaluator, _ = scene
    nice_threads: list[int] = []
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr("os.nice", lambda _: nice_threads.append(threading.get_ident()))
    monkeypatch.setattr(evaluator, "curve_point", lambda name, *, threads: look(name, threads, final=False))
    monkeypatch.setattr(evaluator, "final", lambda name, *, threads: look(name, threads, final=True))

    def look(name, threads, *, final):
        seen.append((threading.get_ident() in nice_threads, threads > 1))
        return {"final": final}

    requests = [
        {"snapshot": "a", "final": False, "hurry": False},
        {"snapshot": "b", "final": False, "hurry": True},
        {"snapshot": "c", "final": True, "hurry": True},
    ]
    _ask(evaluator, *requests, threads=2)
    assert seen == [(True, False), (False, True), (False, True)]


def test_it_says_how_far_it_is(scene, monkeypatch):
    evaluator, _ = scene
    monkeypatch.setattr("wan_diloco.syncer.evaluator._PROGRESS_EVERY_S", 0.0)
    answers = io.StringIO()
    serve(evaluator, [json.dumps({"snapshot": "final", "final": True, "hurry": True})], answers)
    *before, last = [json.loads(line) for line in answers.getvalue().splitlines()]
    shares = [line["progress"] for line in before]
    assert len(shares) > 100, "after every batch, and every byte that it writes"
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] <= 1.0
    assert {line["snapshot"] for line in before} == {"final"}
    assert last["test_loss"] > 0


def test_a_snapshot_that_is_gone_is_a_problem_and_the_next_is_evaluated(scene):
    evaluator, _ = scene
    first, second = _ask(
        evaluator, {"snapshot": "step-000000001", "final": False}, {"snapshot": "step-000000000", "final": False}
    )
    assert "step-000000001" in first["problem"]
    assert "validation_loss" in second


def test_an_evaluator_without_a_run_says_so_and_leaves_with_its_code(tmp_path, capsys):
    assert main([str(tmp_path)]) == 78
    assert "config.json" in capsys.readouterr().err
