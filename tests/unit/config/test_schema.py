"""What a configuration holds when nothing is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.config import ModelSettings, RunConfig, load_config, parse_config
from wan_diloco.config.quantities import duration_text, rate_text, size_text
from wan_diloco.units import parse_duration, parse_rate, parse_size


def run_of(*names: str, **sections: dict[str, Any]) -> RunConfig:
    """A valid run of these regions, with some sections given."""
    sections["run"] = {"tokens": "1M"} | sections.get("run", {})
    return parse_config({**sections, "regions": [{"name": name} for name in names or ("a", "b")]})


def test_the_least_that_is_needed_is_tokens_and_a_region() -> None:
    config = run_of("us-east")
    assert config.run.tokens == 1_000_000
    assert (config.sync.fragments, config.sync.period_steps, config.sync.overlap_steps) == (24, 24, 2)
    assert (config.sync.quorum, config.sync.grace_safety, config.wire.codec) == (1, 0.9, "int4")


def test_quantities_are_in_base_units() -> None:
    config = parse_config(
        {
            "run": {"tokens": "10M", "start_timeout": "2min"},
            "sync": {"membership_lease": "500ms"},
            "wire": {"chunk_bytes": "1MiB"},
            "syncer": {"snapshot_every": "1h"},
            "evaluation": {"tokens": "64k"},
            "regions": [{"name": "a", "uplink": "400mbit", "downlink": "1MB/s", "step_time_min": "80ms"}],
        }
    )
    assert config.run.tokens == 10_000_000
    assert config.run.start_timeout_s == 120.0
    assert config.sync.membership_lease_s == 0.5
    assert config.wire.chunk_bytes == 2**20
    assert config.syncer.snapshot_every_s == 3600.0
    assert config.evaluation.tokens == 64_000
    region = config.region("a")
    assert (region.uplink_bytes_per_s, region.downlink_bytes_per_s, region.step_time_min_s) == (50e6, 1e6, 0.08)


def test_whole_numbers_serve_as_numbers() -> None:
    assert run_of(inner={"lr": 1, "clip_norm": 0}).inner.lr == 1.0


def test_automatic_values_are_filled_in() -> None:
    config = run_of(run={"name": "first"}, model={"dim": 96}, sync={"overlap_steps": 3})
    assert config.run.folder_path == Path("runs/first")
    assert config.model.hidden == 256
    assert config.sync.overwritten_steps_max == 5


def test_given_values_win_over_automatic_ones() -> None:
    config = run_of(run={"folder": "elsewhere"}, model={"hidden": 100}, sync={"overwritten_steps_max": 7})
    assert (config.run.folder, config.model.hidden, config.sync.overwritten_steps_max) == ("elsewhere", 100, 7)


@given(st.integers(1, 4096), st.integers(1, 256))
def test_the_automatic_hidden_width_is_the_next_multiple_above_eight_thirds(dim: int, multiple: int) -> None:
    hidden = ModelSettings(dim=dim, ffn_multiple=multiple).hidden
    assert hidden % multiple == 0
    assert 3 * (hidden - multiple) < 8 * dim <= 3 * hidden


def test_total_steps_count_the_batches_of_all_regions() -> None:
    config = run_of("a", "b", "c", "d", run={"tokens": "10M"}, inner={"batch_tokens": 1024})
    assert config.tokens_per_step == 4096
    assert config.total_steps == 10_000_000 // 4096


def test_a_configuration_cannot_be_changed() -> None:
    config = run_of()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.sync.quorum = 2  # type: ignore[misc]


def test_an_unknown_region_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="mars"):
        run_of("a").region("mars")


def test_lockstep_is_an_overlap_of_zero() -> None:
    assert run_of("a", "b", sync={"overlap_steps": 0, "quorum": 2}).lockstep
    assert not run_of("a", "b").lockstep


def test_lockstep_takes_any_codec() -> None:
    for codec in ("f32", "int4"):
        sections = {"sync": {"overlap_steps": 0, "quorum": 2}, "wire": {"codec": codec}}
        assert run_of("a", "b", **sections).wire.codec == codec


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"layers": 4}},
        {"outer": {"lr": 0.7}},
        {"sync": {"quorum": 2}},
        {"wire": {"codec": "f32"}},
        {"inner": {"batch_tokens": 2048}},
        {"inner": {"lr": 1e-3}},
        {"run": {"seed": 2}},
        {"run": {"tokens": "2M"}},
        {"data": {"split": "era"}},
        {"data": {"shards": 3}},
        {"data": {"source": "text:corpus"}},
    ],
)
def test_what_all_sides_must_share_is_in_the_agreement(changed: dict[str, dict[str, Any]]) -> None:
    assert run_of(**changed).agreement() != run_of().agreement()


def test_the_order_of_regions_is_agreed_on() -> None:
    assert run_of("a", "b").agreement() != run_of("b", "a").agreement()


@pytest.mark.parametrize(
    "changed",
    [
        {"run": {"folder": "elsewhere"}},
        {"run": {"start_timeout": "5s"}},
        {"syncer": {"listen": "0.0.0.0:7000", "insecure": True}},
        {"syncer": {"threads": 4}},
        {"evaluation": {"every_steps": 10}},
        {"unlisted": {"uplink": "1mbit"}},
        {"inner": {"lr": 3e-3}},
    ],
)
def test_each_sides_own_affairs_are_not_in_the_agreement(changed: dict[str, dict[str, Any]]) -> None:
    assert run_of(**changed).agreement() == run_of().agreement()


def test_whether_others_may_join_is_the_syncers_affair() -> None:
    spare = {"shards": 3}
    assert run_of(data=spare, unlisted={"learners_max": 2}).agreement() == run_of(data=spare).agreement()


def test_a_region_that_nobody_listed_has_the_settings_of_its_kind() -> None:
    unlisted = {"learners_max": 1, "uplink": "3mbit", "downlink": "5mbit", "step_time_min": "80ms", "channels": 2}
    config = run_of("a", data={"shards": 2}, unlisted=unlisted)
    other = config.region("spot-7")
    assert (other.name, other.ranks, other.channels, other.address) == ("spot-7", 1, 2, "")
    assert (other.uplink_bytes_per_s, other.downlink_bytes_per_s) == (3e6 / 8, 5e6 / 8)
    assert other.step_time_min_s == 0.08
    assert config.region("a").uplink_bytes_per_s == 200e6 / 8
    assert config.num_shards == 2


@pytest.mark.parametrize(("learners_max", "name"), [(0, "spot-7"), (1, "Spot"), (1, "a/b"), (1, "")])
def test_who_may_not_take_part_is_no_region(learners_max: int, name: str) -> None:
    config = run_of("a", data={"shards": 2}, unlisted={"learners_max": learners_max})
    with pytest.raises(KeyError):
        config.region(name)


def test_rates_addresses_and_paths_are_not_in_the_agreement() -> None:
    def variant(**region: Any) -> RunConfig:
        path = region.pop("path", "x")
        tree = {"run": {"tokens": "1M"}, "data": {"source": f"text:{path}"}, "regions": [{"name": "a", **region}]}
        return parse_config(tree)

    plain = variant().agreement()
    for change in ({"uplink": "1mbit"}, {"downlink": "1mbit"}, {"address": "h:1"}, {"ranks": 2}, {"path": "y"}):
        assert variant(**change).agreement() == plain


def test_the_agreement_is_sorted_and_plain() -> None:
    agreement = dict(run_of().agreement())
    assert list(agreement) == sorted(agreement)
    assert json.loads(agreement["sync.fragments"]) == 24
    assert json.loads(agreement["regions"]) == {"a": 0, "b": 1}


def test_the_resolved_json_reads_back_to_the_same_run(tmp_path: Path) -> None:
    config = run_of("a", "b", inner={"lr": 1e-4}, wire={"chunk_bytes": "5000B"}, sync={"membership_lease": "1.7s"})
    (tmp_path / "config.json").write_text(config.resolved_json())
    again = load_config([tmp_path / "config.json"], env={})
    assert again.config == config
    assert again.config.agreement() == config.agreement()
    assert again.warnings == ()


@given(st.floats(1e-3, 1e12))
def test_the_text_of_a_rate_is_exact(rate_bytes_per_s: float) -> None:
    assert parse_rate(rate_text(rate_bytes_per_s)) == rate_bytes_per_s


@given(st.floats(0.0, 1e9))
def test_the_text_of_a_duration_is_exact(duration_s: float) -> None:
    assert parse_duration(duration_text(duration_s)) == duration_s


@given(st.integers(0, 2**50))
def test_the_text_of_a_size_is_exact(size_bytes: int) -> None:
    assert parse_size(size_text(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [(rate_text(25e6), "200mbit"), (duration_text(0.08), "80ms"), (size_text(2**19), "512KiB"), (size_text(0), "0B")],
)
def test_the_text_of_a_quantity_is_what_a_person_would_write(text: str, expected: str) -> None:
    assert text == expected
