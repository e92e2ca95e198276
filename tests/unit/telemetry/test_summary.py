"""The summary's arithmetic, and the totals that must neither wrap, nor fall, nor be sums of means."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from wan_diloco.protocol.ledger import DiscardReason, LedgerTotals
from wan_diloco.protocol.syncer_state import Totals
from wan_diloco.telemetry import (
    EvaluationRecord,
    LearnerRecord,
    Line,
    MergedContribution,
    PrometheusMetrics,
    Record,
    RoundRecord,
    TrafficRecord,
    summarise,
)
from wan_diloco.telemetry.summary import Known, cumulative, incomplete, mean_loss, tokens_per_s

LEDGER = LedgerTotals(
    trained_tokens=10251184259.0,
    merged_tokens=10251180000.0,
    outstanding_tokens=59.0,
    discarded_tokens={DiscardReason.OVERLAP: 4000.0, DiscardReason.LATE: 200.0},
    balance=0,
)


def lines(*records: Record) -> list[Line]:
    return [Line(elapsed_s=float(index), wall_s=1.6e9 + index, record=record) for index, record in enumerate(records)]


def learner(region: str, loss: float, tokens: int = 100) -> LearnerRecord:
    return LearnerRecord(
        region=region, local_step=5, global_step=5, tokens=tokens, loss=loss, step_time_s=0.1, learning_rate=1e-3
    )


def merged(name: str, staleness: int = 0) -> MergedContribution:
    return MergedContribution(learner=name, staleness=staleness, steps=24, tokens=24576)


def round_(round_id: int, fragment: int, *contributions: MergedContribution) -> RoundRecord:
    return RoundRecord(
        round_id=round_id,
        fragment=fragment,
        version=1,
        attempt=1,
        opened_s=0.0,
        quorate_s=0.0,
        closed_s=0.0,
        merged_s=0.0,
        published_s=float(round_id),
        members=("a", "b"),
        merged=contributions,
        missing=(),
        grace_s=0.0,
        update_bytes=600,
        upload_bytes={item.learner: 500 for item in contributions},
        parameters=1000,
    )


def test_every_documented_key_is_there_and_is_json() -> None:
    summary = summarise(
        lines(
            learner("a", 2.0, tokens=6_000_000_000),
            learner("b", 3.0, tokens=4_251_184_259),
            TrafficRecord(region="a", uplink_bytes=2**33, downlink_bytes=5, control_bytes=6),
            EvaluationRecord(tokens=1, global_step=1, split="validation", nats_per_byte=1.9),
            EvaluationRecord(tokens=2, global_step=2, split="validation", nats_per_byte=1.5, final=True),
            EvaluationRecord(tokens=2, global_step=2, split="test", nats_per_byte=1.6, final=True),
            round_(1, 0, merged("a"), merged("b")),
            round_(2, 1, merged("a"), merged("b", staleness=1)),
            round_(3, 0, merged("a")),
        ),
        LEDGER,
        num_fragments=2,
        wall_s=100.0,
        rejected={"wrong_length": 2, "duplicate": 1},
    )
    json.dumps(summary, allow_nan=False)
    assert summary["validation_nats_per_byte"] == 1.5
    assert summary["test_nats_per_byte"] == 1.6
    assert summary["train_loss"] == 2.5
    assert summary["ledger_balance"] == 0
    assert summary["participation"] == pytest.approx(4 / 6)
    assert summary["merges_per_fragment_min"] == 1
    assert summary["uplink_bits_per_parameter"] == pytest.approx(8 * 2500 / 5000)
    assert summary["downlink_bits_per_parameter"] == pytest.approx(8 * 1800 / 3000)
    assert summary["tokens_trained"] == 10251184259
    assert summary["tokens_merged"] == 10251180000
    assert summary["tokens_discarded"] == {"late": 200, "overlap": 4000}
    assert summary["tokens_outstanding"] == 59
    assert summary["rounds"] == 3
    assert summary["wall_s"] == 100.0
    assert summary["tokens_per_s"] == pytest.approx(102511842.59)
    assert summary["rejected"] == {"duplicate": 1, "wrong_length": 2}
    assert summary["by_region"]["a"] == {
        "tokens": 6_000_000_000,
        "local_steps": 5,
        "loss": 2.0,
        "uplink_bytes": 2**33,
        "downlink_bytes": 5,
        "control_bytes": 6,
        "participation": 1.0,
        "rounds_merged": 3,
        "rounds_live": 3,
        "rounds_merged_share": 1.0,
    }
    assert summary["by_region"]["b"]["participation"] == pytest.approx(1 / 3)
    assert summary["finished"] is True
    assert summary["last_curve_point"] == {"global_step": 1, "tokens": 1, "validation_nats_per_byte": 1.9}


def test_the_score_of_an_earlier_model_is_never_the_final_one() -> None:
    curve = lines(EvaluationRecord(tokens=281, global_step=281, split="validation", nats_per_byte=2.4))
    summary = summarise(curve, LEDGER, num_fragments=1, wall_s=1.0, unevaluated="the evaluator ended by itself")
    assert (summary["validation_nats_per_byte"], summary["test_nats_per_byte"]) == (None, None)
    assert summary["evaluation"] == "the evaluator ended by itself"
    assert summary["last_curve_point"]["global_step"] == 281


def test_an_interrupted_run_says_that_it_is_one() -> None:
    summary = summarise(lines(learner("a", 2.0)), LEDGER, num_fragments=1, wall_s=1.0, finished=False)
    assert summary["finished"] is False
    assert summary["validation_nats_per_byte"] is None
    assert "isn't finished" in summary["evaluation"]


def test_a_region_that_was_away_merges_less_of_all_rounds_than_of_those_it_was_there_for() -> None:
    away = [dataclasses.replace(round_(number, 0, merged("a")), members=("a",)) for number in (3, 4)]
    there = [round_(number, 0, merged("a"), merged("b")) for number in (1, 2)]
    records = lines(learner("a", 1.0), learner("b", 1.0), *there, *away)
    summary = summarise(records, LEDGER, num_fragments=1, wall_s=1.0)
    region = summary["by_region"]["b"]
    assert (region["participation"], region["rounds_merged_share"]) == (1.0, 0.5)
    assert (region["rounds_merged"], region["rounds_live"]) == (2, 2)
    assert summary["participation"] == 1.0, "as the design has it: of live members"


def test_a_run_in_which_nothing_happened_has_a_summary() -> None:
    nothing = LedgerTotals(trained_tokens=0, merged_tokens=0, outstanding_tokens=0, discarded_tokens={}, balance=0)
    summary = summarise([], nothing, num_fragments=3, wall_s=0.0)
    json.dumps(summary, allow_nan=False)
    for key in ("validation_nats_per_byte", "participation", "uplink_bits_per_parameter", "tokens_per_s"):
        assert summary[key] is None
    assert summary["merges_per_fragment_min"] == 0
    assert (summary["regions"], summary["by_region"]) == (0, {})


def test_a_fragment_that_never_merged_makes_the_minimum_zero() -> None:
    summary = summarise(lines(round_(1, 0, merged("a"))), LEDGER, num_fragments=2, wall_s=1.0)
    assert summary["merges_per_fragment_min"] == 0


def test_a_round_told_again_after_a_restart_counts_once() -> None:
    once = [round_(1, 0, merged("a")), round_(2, 1, merged("b"))]
    twice = [*once, dataclasses.replace(once[1], published_s=9.0)]
    assert summarise(lines(*twice), LEDGER, num_fragments=2, wall_s=1.0)["rounds"] == 2


def test_two_contributions_of_one_learner_are_one_participant() -> None:
    summary = summarise(lines(round_(1, 0, merged("a"), merged("a"))), LEDGER, num_fragments=1, wall_s=1.0)
    assert summary["participation"] == 0.5


def test_the_loss_does_not_move_when_a_replica_leaves() -> None:
    three = [learner(name, 2.0) for name in ("a", "b", "c")]
    assert mean_loss(three) == 2.0
    assert mean_loss(three[:2]) == 2.0
    assert mean_loss([*three, learner("c", math.nan)]) == 2.0
    assert mean_loss([]) is None


def test_totals_beyond_32_bits_stay_exact() -> None:
    assert cumulative([5_000_000_000, 10251184259]) == [5_000_000_000, 10251184259]


@given(st.lists(st.integers(0, 2**62), max_size=30))
def test_totals_never_fall_over_restarts(readings: list[int]) -> None:
    totals = cumulative(readings)
    assert totals == sorted(totals)
    assert len(totals) == len(readings)
    if readings:
        assert totals[-1] >= max(readings)


def test_prometheus_counters_follow_totals_up_and_never_down() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry, version="0.1.0", git="unknown", proto="v1")
    for total in (10251184259, 5, 10251184260):
        metrics.tokens_total.advance_to(total, "us-east")
        value = registry.get_sample_value("wan_diloco_tokens_total", {"learner": "us-east"})
        assert value == max(10251184259, total)
    metrics.wire_bytes_total.advance_to(7, "up", "us-east")
    metrics.rounds_total.labels("published").inc()
    metrics.rejected_total.labels("wrong_length").inc()
    metrics.round_duration_seconds.labels("grace").observe(0.2)
    metrics.train_step_seconds.labels("us-east").observe(0.2)
    metrics.learners_live.set(4)
    metrics.quorum_size.set(2)
    text = metrics.exposition().decode()
    for name in (
        'wan_diloco_rounds_total{outcome="published"} 1.0',
        'wan_diloco_rejected_total{reason="wrong_length"} 1.0',
        'wan_diloco_wire_bytes_total{direction="up",region="us-east"} 7.0',
        'wan_diloco_round_duration_seconds_count{phase="grace"} 1.0',
        'wan_diloco_train_step_seconds_count{learner="us-east"} 1.0',
        "wan_diloco_learners_live 4.0",
        "wan_diloco_quorum_size 2.0",
        'wan_diloco_build_info{git="unknown",proto="v1",version="0.1.0"} 1.0',
    ):
        assert name in text


def test_two_registries_live_in_one_process() -> None:
    for _ in range(2):
        PrometheusMetrics(CollectorRegistry(), version="1", git="g", proto="v1")


@given(st.floats(0, 1e4))
def test_what_the_start_took_says_nothing_about_speed(start_s: float) -> None:
    told = [dataclasses.replace(line, elapsed_s=line.elapsed_s + start_s) for line in lines(*[learner("a", 2.0)] * 3)]
    waiting = Line(elapsed_s=0.0, wall_s=1.6e9, record=dataclasses.replace(learner("a", 2.0), local_step=0))
    assert tokens_per_s([waiting, *told], 500.0, start_s + 10) == pytest.approx(50.0)


def test_without_a_step_there_is_no_speed() -> None:
    assert tokens_per_s([], 0.0, 10.0) is None


def _known() -> Known:
    totals = Totals(
        rounds=9,
        fresh=15,
        members=18,
        merged_parameters=15_000,
        upload_bytes=7500,
        published_parameters=9000,
        update_bytes=5400,
    )
    return Known(totals=totals, merges_min=4, merged_fresh={"a": 9, "b": 6}, tokens={"a": 700, "b": 600})


@pytest.mark.parametrize(
    ("left", "damaged", "lacks"),
    [
        ([], 0, "has 0 of 9 rounds"),
        ([round_(1, 0, merged("a"))], 0, "has 1 of 9 rounds"),
        ([round_(1, 0, merged("a"))], 3, "has 1 of 9 rounds and has lines that can't be read: 3"),
    ],
)
def test_what_the_state_knows_is_right_whatever_became_of_the_metrics(left, damaged, lacks) -> None:
    told, known = lines(learner("a", 2.0), *left), _known()
    words = incomplete(told, damaged, known)
    assert words == f"metrics.jsonl {lacks}: times, speed, curves and traffic are of what is left of it"
    summary = summarise(told, LEDGER, known=known, metrics_incomplete=words, num_fragments=2, wall_s=1.0)
    json.dumps(summary, allow_nan=False)
    assert (summary["rounds"], summary["participation"]) == (9, pytest.approx(15 / 18))
    assert summary["merges_per_fragment_min"] == 4
    assert (summary["uplink_bits_per_parameter"], summary["downlink_bits_per_parameter"]) == (4.0, 4.8)
    assert (summary["metrics_incomplete"], summary["tokens_per_s"]) == (words, None)
    region = summary["by_region"]["b"]
    assert (region["tokens"], region["rounds_merged"], region["rounds_live"]) == (600, 6, None)
    assert region["rounds_merged_share"] == pytest.approx(6 / 9)
    assert (summary["by_region"]["a"]["tokens"], summary["by_region"]["a"]["loss"]) == (700, 2.0)


def test_whole_metrics_say_as_much_as_the_state() -> None:
    records = lines(learner("a", 2.0), round_(1, 0, merged("a")), round_(2, 1, merged("a")))
    totals = Totals(rounds=2, fresh=2, members=4, merged_parameters=2000, upload_bytes=1000, published_parameters=2000)
    known = Known(
        totals=dataclasses.replace(totals, update_bytes=1200), merges_min=1, merged_fresh={"a": 2}, tokens={"a": 100}
    )
    assert incomplete(records, 0, known) == ""
    assert summarise(records, LEDGER, known=known, num_fragments=2, wall_s=1.0) == summarise(
        records, LEDGER, num_fragments=2, wall_s=1.0
    )


def test_a_finished_run_that_merged_nothing_says_so() -> None:
    none = Known(totals=Totals(), merges_min=0, merged_fresh={}, tokens={"a": 5})
    for finished in (True, False):
        summary = summarise([], LEDGER, known=none, num_fragments=1, wall_s=1.0, finished=finished)
        assert summary["nothing_merged"] is finished
    assert summarise([], LEDGER, known=_known(), num_fragments=1, wall_s=1.0)["nothing_merged"] is False
