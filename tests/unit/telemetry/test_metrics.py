"""`metrics.jsonl`: records that come back as written, shared files, damaged lines, full disks."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.clock import ManualClock
from wan_diloco.errors import ConfigError
from wan_diloco.telemetry import (
    EvaluationRecord,
    EventRecord,
    LearnerRecord,
    Line,
    MergedContribution,
    MetricsWriter,
    MissingLearner,
    Record,
    RoundRecord,
    TrafficRecord,
    WaitingRecord,
    read_metrics,
)
from wan_diloco.telemetry.records import decode_line, encode_line

if TYPE_CHECKING:
    from pathlib import Path

LEARNER = LearnerRecord(
    region="us-east", local_step=7, global_step=6, tokens=10251184259, loss=2.5, step_time_s=0.1, learning_rate=1e-3
)
ROUND = RoundRecord(
    round_id=812,
    fragment=3,
    version=17,
    attempt=1,
    opened_s=1.0,
    quorate_s=1.5,
    closed_s=1.75,
    merged_s=1.8,
    published_s=2.0,
    members=("us-east", "eu-west"),
    merged=(MergedContribution(learner="us-east", staleness=0, steps=24, tokens=24576),),
    missing=(MissingLearner(learner="eu-west", reason="silent"),),
    grace_s=0.25,
    update_bytes=5000,
    upload_bytes={"us-east": 4800},
    parameters=10_000,
)
RECORDS: list[Record] = [
    LEARNER,
    ROUND,
    TrafficRecord(region="us-east", uplink_bytes=2**40, downlink_bytes=2, control_bytes=3),
    EvaluationRecord(tokens=100, global_step=5, split="test", nats_per_byte=1.5, final=True, published_s=2.5),
    WaitingRecord(reason='1 of 2 learners, "eu-west" silent'),
    EventRecord(name="learner_joined", detail="zone \u2713\nline two"),
]

APPENDER = """
import sys
from pathlib import Path
from wan_diloco.clock import ManualClock
from wan_diloco.telemetry.metrics import MetricsWriter
from wan_diloco.telemetry.records import EventRecord
with MetricsWriter(Path(sys.argv[1]), ManualClock(), origin_s=0.0) as writer:
    for index in range(300):
        assert writer.write(EventRecord(name=sys.argv[2], detail="x" * (index % 50) + str(index)))
"""


def test_a_line_from_before_a_field_was_there_is_read(tmp_path: Path) -> None:
    line = {"kind": "evaluation", "elapsed_s": 1.0, "wall_s": 2.0, "tokens": 3, "global_step": 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, "split": "validation", "nats_per_byte": 5.0}) + "\n")
    (read,) = read_metrics(tmp_path / "metrics.jsonl").lines
    assert isinstance(read.record, EvaluationRecord)
    assert read.record.final is False
    assert math.isnan(read.record.published_s)


def test_every_kind_of_record_comes_back_with_its_times(tmp_path: Path) -> None:
    clock = ManualClock(now_s=100.0, wall_s=1_600_000_000.0)
    with MetricsWriter(tmp_path / "metrics.jsonl", clock) as writer:
        clock.advance(1.5)
        for record in RECORDS:
            assert writer.write(record)
        expected = tuple(Line(elapsed_s=1.5, wall_s=1_600_000_001.5, record=record) for record in RECORDS)
        assert writer.tail() == expected
        assert writer.to_elapsed_s(102.0) == 2.0
    log = read_metrics(tmp_path / "metrics.jsonl")
    assert log.lines == expected
    assert log.damaged == 0


def test_a_line_is_flat_json_with_the_documented_names(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m", ManualClock()) as writer:
        writer.write(ROUND)
    content = json.loads((tmp_path / "m").read_text())
    assert content["kind"] == "round"
    assert content["merged"] == [{"learner": "us-east", "staleness": 0, "steps": 24, "tokens": 24576}]
    assert content["missing"] == [{"learner": "eu-west", "reason": "silent"}]
    assert content["upload_bytes"] == {"us-east": 4800}
    assert set(content) == {
        *("kind", "elapsed_s", "wall_s", "round_id", "fragment", "version", "attempt", "opened_s", "quorate_s"),
        *("closed_s", "merged_s", "published_s", "members", "merged", "missing", "grace_s", "update_bytes"),
        *("upload_bytes", "parameters"),
    }


def test_a_loss_that_is_not_finite_is_null_and_reads_as_nan() -> None:
    record = LearnerRecord(
        region="a", local_step=1, global_step=1, tokens=1, loss=math.inf, step_time_s=math.nan, learning_rate=0.0
    )
    text = encode_line(Line(elapsed_s=0.0, wall_s=0.0, record=record))
    assert json.loads(text)["loss"] is None
    line = decode_line(text)
    assert line is not None
    assert isinstance(line.record, LearnerRecord)
    assert math.isnan(line.record.loss)


def test_two_processes_may_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    processes = [subprocess.Popen([sys.executable, "-c", APPENDER, str(path), name]) for name in ("a", "b")]
    assert [process.wait() for process in processes] == [0, 0]
    log = read_metrics(path)
    assert log.damaged == 0
    for name in ("a", "b"):
        details = [line.record.detail for line in log.lines if getattr(line.record, "name", "") == name]
        assert [int(detail.lstrip("x")) for detail in details] == list(range(300))


def test_a_torn_last_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, ManualClock()) as writer:
        for record in RECORDS:
            writer.write(record)
    os.truncate(path, path.stat().st_size - 3)
    with MetricsWriter(path, ManualClock()) as writer:
        writer.write(LEARNER)
    log = read_metrics(path)
    assert [line.record for line in log.lines] == [*RECORDS[:-1], LEARNER]
    assert log.damaged == 1


def test_elapsed_time_goes_on_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = ManualClock(now_s=5.0)
    with MetricsWriter(path, first) as writer:
        first.advance(60.0)
        writer.write(LEARNER)
    second = ManualClock(now_s=1000.0)
    with MetricsWriter(path, second) as writer:
        second.advance(1.0)
        writer.write(LEARNER)
    assert [line.elapsed_s for line in read_metrics(path).lines] == [60.0, 61.0]


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write = os.write
    calls = []

    def fills_up(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        return write(descriptor, data[:9]) if len(calls) == 1 else full()

    with MetricsWriter(path, ManualClock()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fills_up)
            assert [writer.write(LEARNER) for _ in range(3)] == [False, False, False]
        assert writer.write(ROUND)
        assert writer.dropped == 3
        assert len(writer.tail()) == 4
    log = read_metrics(path)
    assert [line.record for line in log.lines] == [ROUND]
    assert log.damaged == 1


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_tail_in_memory_is_bounded(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m", ManualClock(), tail_lines=3) as writer:
        for index in range(10):
            writer.write(EventRecord(name=str(index), detail=""))
        assert [getattr(line.record, "name", "") for line in writer.tail()] == ["7", "8", "9"]


def test_a_missing_file_is_empty_and_an_unusable_one_is_a_configuration_error(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nothing").lines == ()
    with pytest.raises(ConfigError, match="can't read"):
        read_metrics(tmp_path)
    with pytest.raises(ConfigError, match="can't write"):
        MetricsWriter(tmp_path / "no" / "folder", ManualClock())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"kind": "unknown", "elapsed_s": 1, "wall_s": 1}',
        b'{"kind": ["learner"], "elapsed_s": 1, "wall_s": 1}',
        b'{"kind": "waiting", "elapsed_s": 1, "wall_s": 1}',
        b'{"kind": "waiting", "elapsed_s": "1", "wall_s": 1, "reason": "x"}',
        b'{"kind": "waiting", "elapsed_s": 1, "wall_s": 1, "reason": 5}',
        b'{"kind":"evaluation","elapsed_s":1,"wall_s":1,"tokens":true,"global_step":1,"split":"x","nats_per_byte":1}',
        b"[" * 100_000,
        b'{"kind": "evaluation", "elapsed_s": 1' + b"0" * 400 + b', "wall_s": 1}',
    ],
)
def test_damaged_lines_are_no_records(text: bytes) -> None:
    assert decode_line(text) is None


def test_a_field_that_a_later_version_adds_is_ignored() -> None:
    line = decode_line(b'{"kind":"waiting","elapsed_s":1,"wall_s":2,"reason":"x","new":[1]}')
    assert line == Line(elapsed_s=1.0, wall_s=2.0, record=WaitingRecord(reason="x"))


@given(index=st.integers(0, len(RECORDS) - 1), data=st.data())
def test_no_damage_to_a_line_raises(index: int, data: st.DataObject) -> None:
    text = bytearray(encode_line(Line(elapsed_s=1.0, wall_s=2.0, record=RECORDS[index])))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    line = decode_line(bytes(text))
    assert line is None or isinstance(line, Line)
