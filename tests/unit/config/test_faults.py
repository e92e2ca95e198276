"""Schedules of faults: what can be written, what is refused and how it is said, and that they can be given again."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.config import FaultKind, FaultSchedule, check_schedule, load_schedule, parse_schedule
from wan_diloco.errors import ConfigError, UsageError
from wan_diloco.lab.chaos_draw import SORTS, draw_schedule

REGIONS = ("east", "west", "north", "south")

EVERYTHING = """
seed = 9
[[faults]]
at = "9s"
kind = "kill"
target = "uplink:east"
[[faults]]
at = "1s"
kind = "stop"
target = "syncer"
for = "2s"
[[faults]]
at = "3s"
kind = "cut"
target = "link:west"
for = "500ms"
way = "up"
[[faults]]
at = "3s"
kind = "half-open"
target = "link:west"
for = "5s"
[[faults]]
at = "3s"
kind = "throttle"
target = "link:west"
for = "5s"
rate = "1mbit"
[[faults]]
at = "3s"
kind = "delay"
target = "link:west"
for = "5s"
delay = "80ms"
way = "down"
[[faults]]
at = "3s"
kind = "corrupt"
target = "link:west"
for = "5s"
flips_per_byte = 1e-4
[[faults]]
at = "20s"
kind = "full-disk"
target = "disk"
for = "2s"
[[faults]]
at = "4s"
kind = "join"
target = "learner:south"
"""


def draw(seed: int, **changed: object) -> FaultSchedule:
    asked: dict[str, object] = {
        "seed": seed,
        "regions": REGIONS,
        "quorum": 1,
        "duration_s": 300.0,
        "num_faults": 20,
        **changed,
    }
    return draw_schedule(random.Random(seed), **asked)  # type: ignore[arg-type]


def test_a_schedule_is_read_in_order_of_time_and_given_again_from_what_was_saved(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(EVERYTHING)
    schedule = load_schedule(tmp_path / "faults.toml")
    assert [fault.at_s for fault in schedule.in_order] == sorted(fault.at_s for fault in schedule.faults)
    assert schedule.late == {"south"}
    assert schedule.end_s == 22.0
    (tmp_path / "again.json").write_text(schedule.to_json())
    assert load_schedule(tmp_path / "again.json") == schedule
    check_schedule(schedule, REGIONS, 3, "faults.toml")
    with pytest.raises(ConfigError, match="fewer learners than a quorum"):
        check_schedule(schedule, REGIONS, 4, "faults.toml")
    with pytest.raises(ConfigError, match=r"^faults\.toml: faults\[\d+\]\.target: there is no region south"):
        check_schedule(schedule, REGIONS[:3], 1, "faults.toml")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"kind": "bomb", "target": "syncer"}, r"faults\[0\]\.kind"),
        ({"kind": "kill", "target": "link:east"}, "kill can't hit 'link:east'"),
        ({"kind": "kill", "target": "learner"}, "kill can't hit 'learner'"),
        ({"kind": "kill", "target": "syncer:east"}, "kill can't hit 'syncer:east'"),
        ({"kind": "kill", "target": "syncer", "for": "2s"}, "kill is over at once"),
        ({"kind": "stop", "target": "syncer"}, "stop needs how long it lasts"),
        ({"kind": "throttle", "target": "link:east", "for": "2s"}, "rate: throttle needs it"),
        ({"kind": "cut", "target": "link:east", "for": "2s", "rate": "1mbit"}, "rate: cut has none"),
        ({"kind": "half-open", "target": "link:east", "for": "2s", "way": "up"}, "way: half-open has no direction"),
        ({"kind": "stop", "target": "syncer", "for": "2"}, "isn't a duration"),
        ({"kind": "stop", "target": "syncer", "for": "2s", "way": "up"}, "way: stop has no direction"),
        ({"kind": "skew", "target": "syncer"}, "offset: skew needs it"),
        ({"kind": "skew", "target": "uplink:east", "offset": "1h"}, "skew can't hit 'uplink:east'"),
        ({"kind": "kill", "target": "syncer", "colour": 2}, r"faults\[0\]\.colour: is unknown \(there are at, kind,"),
        ({"kind": "stop", "target": "syncer", "fro": "2s"}, r"faults\[0\]\.fro: is unknown \(did you mean for\)"),
        ({"kind": "kil", "target": "syncer"}, r"kind: must be 'kill', .*not the text 'kil' \(did you mean \"kill\"\)$"),
        ({"kind": "kill", "target": 3}, r"^faults.toml: faults\[0\]\.target: must be text, not 3$"),
        ({"kind": "kill"}, r"^faults.toml: faults\[0\]\.target: is missing$"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(fault: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_schedule({"faults": [{"at": "1s", **fault}]}, "faults.toml")


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "faults: is missing"),
        ({"faults": []}, "faults: must have at least 1 entry"),
        ({"faults": 3}, "faults: must be a list, not 3"),
        ({"faults": ["kill"]}, r"faults\[0\]: must be a table, not the text 'kill'"),
        ({"faults": [], "seeds": 1}, r"faults: must have .*; seeds: is unknown \(did you mean seed\)"),
    ],
)
def test_a_schedule_of_the_wrong_shape_is_refused_in_our_words(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^faults\.toml: {sentence}$"):
        parse_schedule(table, "faults.toml")


def test_nobody_joins_twice() -> None:
    join = {"at": "1s", "kind": "join", "target": "learner:east"}
    with pytest.raises(ConfigError, match="joins 2 times"):
        parse_schedule({"faults": [join, join]}, "faults.toml")


@given(seed=st.integers(0, 2**32), num_faults=st.integers(SORTS, 60), duration_s=st.floats(20.0, 3600.0))
def test_draws_have_one_of_each_sort_within_their_time_and_are_the_same_for_a_seed(
    seed: int, num_faults: int, duration_s: float
) -> None:
    schedule = draw(seed, num_faults=num_faults, duration_s=duration_s)
    assert schedule == draw(seed, num_faults=num_faults, duration_s=duration_s)
    assert parse_schedule(json.loads(schedule.to_json()), "drawn") == schedule
    assert len(schedule.faults) == num_faults
    sorts = Counter((fault.kind, fault.sort) for fault in schedule.faults)
    assert len(sorts) == SORTS
    check_schedule(schedule, REGIONS, 1, "drawn")
    assert all(0 <= fault.at_s <= duration_s for fault in schedule.faults)
    (join,) = (fault for fault in schedule.faults if fault.kind is FaultKind.JOIN)
    touched = [fault.at_s for fault in schedule.faults if fault.region == join.region]
    assert min(touched) == join.at_s, "nothing befalls a learner that isn't there"


@given(seed=st.integers(0, 2**32))
def test_in_five_minutes_no_process_is_killed_so_often_that_it_would_be_given_up(seed: int) -> None:
    times: dict[str, list[float]] = {}
    for fault in draw(seed).faults:
        if fault.kind in (FaultKind.KILL, FaultKind.SKEW):
            times.setdefault(fault.target, []).append(fault.at_s)
    for target, killed in times.items():
        soon = sum(after - before < 30.0 for before, after in pairwise(killed))
        assert soon <= 4, (target, killed)


def test_what_a_machine_cannot_do_is_left_out_and_too_few_are_refused() -> None:
    drawn = draw(1, without={FaultKind.FULL_DISK, FaultKind.JOIN})
    assert not {fault.kind for fault in drawn.faults} & {FaultKind.FULL_DISK, FaultKind.JOIN}
    assert not draw(1, quorum=4).late
    with pytest.raises(UsageError, match=f"--faults {SORTS}"):
        draw(1, num_faults=SORTS - 1)


def test_more_faults_than_a_time_can_hold_are_refused_and_how_many_it_can_is_said() -> None:
    with pytest.raises(UsageError, match="100000000 faults don't fit into 10s: 85 do"):
        draw(1, num_faults=100_000_000, duration_s=10.0)
    with pytest.raises(UsageError, match="10001 faults don't fit into 1d: 10000 do"):
        draw(1, num_faults=10_001, duration_s=86_400.0)
    assert len(draw(1, num_faults=10_000, duration_s=86_400.0).faults) == 10_000
