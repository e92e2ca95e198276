"""Run folders that look like those of a real run, made from a seed."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING

import pytest

from wan_diloco.telemetry import (
    EvaluationRecord,
    EventRecord,
    LearnerRecord,
    Line,
    MergedContribution,
    MissingLearner,
    Record,
    RoundRecord,
    TrafficRecord,
    WaitingRecord,
)
from wan_diloco.telemetry.records import encode_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REGIONS = ("us-east", "us-west", "eu-west", "asia-ne")
STEP_S = {"us-east": 0.1, "us-west": 0.1, "eu-west": 0.125, "asia-ne": 0.16}
BATCH = 1024


def learner_records(rng: random.Random, duration_s: float) -> list[tuple[float, Record]]:
    records: list[tuple[float, Record]] = []
    for region in REGIONS:
        sent = received = 0
        for index in range(1, int(duration_s)):
            step = int(index / STEP_S[region])
            loss = 1.45 + 4.1 * math.exp(-step / 60) + 1.2 * math.exp(-step / 900) + rng.gauss(0, 0.05)
            record = LearnerRecord(
                region=region,
                local_step=step,
                global_step=int(index / 0.1),
                tokens=step * BATCH,
                loss=loss,
                step_time_s=STEP_S[region],
                learning_rate=3e-3,
            )
            records.append((float(index), record))
            sent += int(52_000 * 0.1 / STEP_S[region])
            received += 61_000
            traffic = TrafficRecord(
                region=region, uplink_bytes=sent, downlink_bytes=received, control_bytes=index * 900
            )
            records.append((float(index), traffic))
    return records


def round_records(rng: random.Random, duration_s: float, fragments: int) -> list[tuple[float, Record]]:
    records: list[tuple[float, Record]] = []
    for number in range(int(duration_s * 10)):
        opened = 0.1 * number + rng.random() * 0.02
        quorate = opened + 0.05 + rng.random() * 0.04
        closed = quorate + 0.03 + rng.random() * 0.04
        joined = [name for name in REGIONS if rng.random() < (0.97 if name != "asia-ne" else 0.6)] or [REGIONS[0]]
        records.append(
            (
                closed + 0.06,
                RoundRecord(
                    round_id=number,
                    fragment=number % fragments,
                    version=number // fragments + 1,
                    attempt=1,
                    opened_s=opened,
                    quorate_s=quorate,
                    closed_s=closed,
                    merged_s=closed + 0.01 + rng.random() * 0.01,
                    published_s=closed + 0.06,
                    members=REGIONS,
                    merged=tuple(
                        MergedContribution(
                            learner=name,
                            staleness=int(name == "asia-ne" and rng.random() < 0.2),
                            steps=int(fragments * 0.1 / STEP_S[name]),
                            tokens=int(fragments * 0.1 / STEP_S[name]) * BATCH,
                        )
                        for name in joined
                    ),
                    missing=tuple(
                        MissingLearner(learner=name, reason="busy") for name in REGIONS if name not in joined
                    ),
                    grace_s=closed - quorate,
                    update_bytes=3100,
                    upload_bytes=dict.fromkeys(joined, 2900),
                    parameters=6200,
                ),
            )
        )
    return records


def make_lines(duration_s: float = 60.0, fragments: int = 24, seed: int = 1) -> list[Line]:
    """The lines of a run of four regions, in order of time."""
    rng = random.Random(seed)
    records = [*learner_records(rng, duration_s), *round_records(rng, duration_s, fragments)]
    for index in range(0, int(duration_s) + 1, max(1, int(duration_s / 12))):
        steps = index / 0.1
        score = 1.5 + 4.0 * math.exp(-steps / 70) + 1.15 * math.exp(-steps / 900)
        for split in ("validation", "test") if index + duration_s / 12 > duration_s else ("validation",):
            record = EvaluationRecord(
                tokens=int(steps * 3.4 * BATCH), global_step=int(steps), split=split, nats_per_byte=score
            )
            records.append((float(index), record))
    records.extend(
        [
            (0.4, WaitingRecord(reason="3 of 4 regions said Hello, asia-ne isn't there yet")),
            (2.1, WaitingRecord(reason="")),
            (duration_s * 0.4, WaitingRecord(reason="round 812: 1 of 2 learners, eu-west silent 4.1 s")),
            (duration_s * 0.45, WaitingRecord(reason="")),
            *(
                (0.2 + index * 0.5, EventRecord(name="learner_joined", detail=name))
                for index, name in enumerate(REGIONS)
            ),
            (duration_s * 0.4, EventRecord(name="learner_left", detail="eu-west: lease ran out")),
            (duration_s * 0.45, EventRecord(name="learner_joined", detail="eu-west, incarnation 2")),
        ]
    )
    records.sort(key=lambda item: item[0])
    return [Line(elapsed_s=time, wall_s=1_600_000_000.0 + time, record=record) for time, record in records]


CONFIG = {
    "run": {"name": "sotu", "seed": 1, "tokens": 10_000_000},
    "model": {"kind": "decoder", "dim": 64, "layers": 3, "vocab": 256},
    "sync": {"topology": "star", "fragments": 24, "period_steps": 24, "overlap_steps": 2, "quorum": 1},
    "wire": {"codec": "int4", "zstd": True},
    "regions": [{"name": name, "ranks": 1, "uplink": "200mbit"} for name in REGIONS],
}
SUMMARY = {
    "validation_nats_per_byte": 1.5312,
    "test_nats_per_byte": 1.5467,
    "ledger_balance": 0,
    "participation": 0.83,
    "merges_per_fragment_min": 24,
    "uplink_bits_per_parameter": 3.74,
    "downlink_bits_per_parameter": 4.0,
    "tokens_trained": 2_100_000,
    "tokens_merged": 1_700_000,
    "tokens_discarded": {"overlap": 210_000, "late": 90_000, "stale_base": 40_000, "crashed": 12_000},
    "tokens_outstanding": 48_000,
    "rounds": 600,
    "wall_s": 61.5,
    "tokens_per_s": 34_100.0,
    "rejected": {},
}


def write_run(folder: Path, lines: list[Line], *, finished: bool = True) -> Path:
    """Write a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(encode_line(line) for line in lines))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if finished:
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
    return folder


@pytest.fixture(scope="session")
def run_lines() -> list[Line]:
    """Lines of a minute's run."""
    return make_lines()


@pytest.fixture(scope="session")
def lines_of() -> Callable[..., list[Line]]:
    """Makes lines of other runs."""
    return make_lines


@pytest.fixture(scope="session")
def run_writer() -> Callable[..., Path]:
    """Writes run folders."""
    return write_run
