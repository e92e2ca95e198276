"""A configuration that is read again changes rates, and says of the rest that it stays as it is."""

from __future__ import annotations

import copy
from typing import Any

from wan_diloco.config import LiveConfig, RunConfig, adopt_rates, parse_config, render_toml
from wan_diloco.errors import ConfigError

TREE: dict[str, Any] = {
    "run": {"tokens": "1M"},
    "syncer": {"egress": "2gbit"},
    "regions": [{"name": "east", "uplink": "200mbit"}, {"name": "west"}],
}


def config(**changes: dict[str, Any]) -> RunConfig:
    tree = copy.deepcopy(TREE)
    for section, table in changes.items():
        tree[section] = {**tree.get(section, {}), **table}
    return parse_config(tree)


def test_the_syncer_has_no_caps_unless_they_are_given() -> None:
    given = config()
    assert given.syncer.egress_bytes_per_s == 2e9 / 8
    assert given.syncer.ingress_bytes_per_s == 0.0
    assert 'ingress = "0B/s"' in render_toml(given)


def test_rates_are_adopted_and_nothing_else() -> None:
    tree = copy.deepcopy(TREE)
    tree["syncer"] = {"ingress": "1gbit", "threads": 4}
    tree["run"] = {**tree["run"], "tokens": 3_000_000}
    tree["regions"] = [{"name": "east", "uplink": "50mbit", "ranks": 2}, {"name": "north", "uplink": "1mbit"}]
    adopted = adopt_rates(config(), parse_config(tree))
    assert adopted.changed == (
        "syncer.ingress is 1gbit now, was 0B/s (no cap)",
        "syncer.egress is 0B/s (no cap) now, was 2gbit",
        "regions.east.uplink is 50mbit now, was 200mbit",
    )
    assert adopted.ignored == (
        "region west is missing in the configuration, and goes on as it is until the next start",
        "region north is new in the configuration, and doesn't take part before the next start",
        "run.tokens differs in the configuration: a run that was begun keeps it",
        "syncer.threads differs in the configuration: it stays as it is until the next start",
        "regions.east.ranks differs in the configuration: it stays as it is until the next start",
    )
    assert adopted.config.region("east").uplink_bytes_per_s == 50e6 / 8
    assert adopted.config.region("west") == config().region("west")
    assert adopted.config.agreement() == config().agreement()


def test_a_configuration_that_can_not_be_read_changes_nothing_and_is_said() -> None:
    said: list[str] = []

    def broken() -> RunConfig:
        raise ConfigError("isn't TOML", where="demo.toml")

    live = LiveConfig(config(), broken, said.append)
    assert not live.reload()
    assert live.config == config()
    assert len(said) == 1
    assert "demo.toml" in said[0]


def test_each_reload_compares_with_what_is_in_force() -> None:
    said: list[str] = []
    versions = [config(syncer={"ingress": "1gbit"}), config(syncer={"ingress": "1gbit"}), config()]
    live = LiveConfig(config(), lambda: versions.pop(0), said.append)
    assert [live.reload() for _ in range(3)] == [True, False, True]
    assert said == [
        "syncer.ingress is 1gbit now, was 0B/s (no cap)",
        "the configuration was read again; no rate differs",
        "syncer.ingress is 0B/s (no cap) now, was 1gbit",
    ]


def test_the_rates_of_those_that_nobody_listed_are_adopted_too() -> None:
    data, unlisted = {"shards": 3}, {"learners_max": 1}
    before = config(data=data, unlisted=unlisted)
    newer = config(data=data, unlisted={"learners_max": 2, "uplink": "5mbit"})
    adopted = adopt_rates(before, newer)
    assert adopted.changed == ("unlisted.uplink is 5mbit now, was 200mbit",)
    assert adopted.ignored == (
        "unlisted.learners_max differs in the configuration: it stays as it is until the next start",
    )
    assert adopted.config.region("spot").uplink_bytes_per_s == 5e6 / 8


def test_shards_that_a_file_does_not_give_differ_in_nothing() -> None:
    tree = copy.deepcopy(TREE)
    tree["data"] = {"shards": 4}
    tree["regions"] = [{"name": "east", "shard": 1}, {"name": "west", "shard": 3}]
    running = parse_config(tree)
    assert adopt_rates(running, parse_config({**TREE, "regions": [{"name": "east"}, {"name": "west"}]})).ignored == ()
    (sentence,) = adopt_rates(running, parse_config({**tree, "data": {"shards": 5}})).ignored
    assert sentence == "data.shards differs in the configuration: a run that was begun keeps it"
