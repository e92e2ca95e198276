"""With which settings a run goes on, with which it doesn't, and whose text is whose."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.config import FREE_KEYS, RunConfig, check_shards, keep_shards, parse_config, require_resumable
from wan_diloco.errors import ConfigError

NAMES = ("east", "north", "south", "west")


def run_of(*names: str, shards: dict[str, int] | None = None, **tables: dict[str, Any]) -> RunConfig:
    regions = [{"name": name, **({"shard": shards[name]} if shards and name in shards else {})} for name in names]
    return parse_config({"run": {"tokens": "1M", **tables.pop("run", {})}, **tables, "regions": regions})


def resume(now: RunConfig, before: RunConfig, *, refragment: bool = False) -> None:
    require_resumable(now.agreement(), dict(before.agreement()), refragment=refragment, folder="runs/x")


def kept_shards(now: RunConfig, before: RunConfig) -> RunConfig:
    return keep_shards(now, before.shards, before.num_shards)


def refused(now: RunConfig, before: RunConfig, *, refragment: bool = False) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resume(now, before, refragment=refragment)
    return caught.value


CHANGED: dict[str, dict[str, Any]] = {
    "sync.grace_safety": {"sync": {"grace_safety": 0.5}},
    "sync.membership_lease": {"sync": {"membership_lease": "7s"}},
    "sync.overwritten_steps_max": {"sync": {"overwritten_steps_max": 9}},
    "sync.quorum": {"sync": {"quorum": 2}},
    "wire.chunk_bytes": {"wire": {"chunk_bytes": "64KiB"}},
    "wire.zstd": {"wire": {"zstd": False}},
}


@pytest.mark.parametrize("key", sorted(FREE_KEYS))
def test_for_whom_rounds_wait_and_how_bytes_travel_may_change(key: str) -> None:
    before, now = run_of("a", "b"), run_of("a", "b", **CHANGED[key])
    assert dict(now.agreement())[key] != dict(before.agreement())[key]
    resume(now, before)


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("sync.period_steps", {"sync": {"period_steps": 12}}),
        ("sync.overlap_steps", {"sync": {"overlap_steps": 3, "overwritten_steps_max": 4}}),
        ("sync.install", {"sync": {"install": "rebase"}}),
        ("wire.codec", {"wire": {"codec": "f32"}}),
        ("outer.lr", {"outer": {"lr": 0.5}}),
        ("inner.lr", {"inner": {"lr": 0.5}}),
        ("model.layers", {"model": {"layers": 2}}),
        ("run.tokens", {"run": {"tokens": "2M"}}),
    ],
)
def test_what_shapes_the_model_stays_for_good(key: str, tables: dict[str, dict[str, Any]]) -> None:
    error = refused(run_of("a", **tables), run_of("a"), refragment=True)
    assert error.where == key
    assert "another --run-folder" in error.hint


def test_another_number_of_fragments_is_a_matter_of_a_word() -> None:
    before, now = run_of("a"), run_of("a", sync={"fragments": 7})
    error = refused(now, before)
    assert error.where == "sync.fragments"
    assert "--refragment" in error.hint
    resume(now, before, refragment=True)


def test_regions_come_where_a_shard_is_spare_and_go_and_come_back() -> None:
    before = run_of("a", "b", data={"shards": 3})
    grown = run_of("a", "b", "c", data={"shards": 3})
    shrunk = run_of("a", data={"shards": 3})
    for now in (grown, shrunk):
        resume(now, before)
        resume(before, now)


def test_the_number_of_shards_is_for_good() -> None:
    error = refused(run_of("a", "b", "c"), run_of("a", "b"))
    assert error.where == "data.shards"
    assert "set it to 2" in error.hint


def test_nobody_gets_another_shard_than_it_had() -> None:
    before = run_of("a", "b", "c")
    error = refused(run_of("a", "c", data={"shards": 3}), before)
    assert error.where == "regions.c.shard"
    assert error.hint == "set it to 2"
    resume(run_of("a", "c", shards={"c": 2}, data={"shards": 3}), before)


def test_nobody_gets_what_was_anothers() -> None:
    error = refused(run_of("a", "new", data={"shards": 2}), run_of("a", "b"))
    assert error.where == "regions.new.shard"
    assert "b's for good" in error.problem


@pytest.mark.parametrize(
    ("tables", "shards", "where"),
    [
        ({"data": {"shards": 1}}, None, "data.shards"),
        ({}, {"a": 1}, "regions.b.shard"),
        ({}, {"b": 0}, "regions.b.shard"),
        ({}, {"b": 2}, "regions.b.shard"),
    ],
)
def test_shards_are_there_and_each_is_one_regions(
    tables: dict[str, dict[str, Any]], shards: dict[str, int] | None, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of("a", "b", shards=shards, **tables)
    assert where in str(caught.value)


@given(
    st.permutations(NAMES).flatmap(lambda names: st.integers(1, 4).map(lambda count: names[:count])),
    st.permutations(NAMES).flatmap(lambda names: st.integers(1, 4).map(lambda count: names[:count])),
    st.integers(0, 3),
)
def test_who_stays_keeps_its_shard_and_who_comes_gets_a_spare_one(
    before_names: list[str], now_names: list[str], spare: int
) -> None:
    before = run_of(*before_names, data={"shards": len(before_names) + spare})
    now = run_of(*now_names)
    new = set(now_names) - set(before_names)
    if len(new) > spare:
        with pytest.raises(ConfigError, match="no shard is left for it"):
            kept_shards(now, before)
        return
    kept = kept_shards(now, before)
    assert kept.num_shards == before.num_shards
    assert all(kept.shards[name] == before.shards[name] for name in set(now_names) & set(before_names))
    assert len(set(kept.shards.values())) == len(now_names)
    assert {kept.shards[name] for name in new}.isdisjoint(before.shards.values())
    resume(kept, before)
    assert kept_shards(kept, before) == kept
    assert parse_config(kept.model_dump(mode="json", by_alias=True)) == kept, "it is a configuration like any other"


def test_what_is_given_isnt_changed() -> None:
    before = run_of("a", "b", data={"shards": 5})
    kept = kept_shards(run_of("a", "c", shards={"c": 4}, data={"shards": 5}), before)
    assert kept.shards == {"a": 0, "c": 4}


@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=3, max_size=6), st.integers(0, 2))
def test_who_is_gone_since_long_keeps_its_shard(starts: list[set[str]], spare: int) -> None:
    """However often regions come and go, nobody is given what anybody had; only want of shards keeps anybody out."""
    config = run_of(*sorted(starts[0]), data={"shards": len(starts[0]) + spare})
    had: dict[str, int] = dict(config.shards)
    for names in starts[1:]:
        if len(had.keys() | names) > config.num_shards:
            with pytest.raises(ConfigError, match="no shard is left for it"):
                keep_shards(run_of(*sorted(names)), had, config.num_shards)
            continue
        kept = keep_shards(run_of(*sorted(names)), had, config.num_shards)
        check_shards(kept.shards, had)
        had |= kept.shards
        assert len(set(had.values())) == len(had)
