"""Defaults, files, environment, flags: who wins, and who is said to have won."""

from __future__ import annotations

from pathlib import Path

import pytest

from wan_diloco.config import load_config, process_environment, render_toml
from wan_diloco.errors import ConfigError

BASE = """
[run]
tokens = "1M"
[sync]
fragments = 8
quorum = 2
[[regions]]
name = "us-east"
uplink = "100mbit"
[[regions]]
name = "eu-west"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def test_each_layer_wins_over_the_one_before(base: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text("[sync]\nperiod_steps = 10\nfragments = 9\n")
    env = {"WAN_DILOCO_SYNC__PERIOD_STEPS": "11", "WAN_DILOCO_SYNC__OVERLAP_STEPS": "3"}
    loaded = load_config([base, over], env=env, overrides=["sync.overlap_steps=4"])
    sync = loaded.config.sync
    assert (sync.quorum, sync.fragments, sync.period_steps, sync.overlap_steps) == (2, 9, 11, 4)
    assert {key: loaded.sources[f"sync.{key}"] for key in ("quorum", "fragments", "period_steps", "overlap_steps")} == {
        "quorum": f"file {base}",
        "fragments": f"file {over}",
        "period_steps": "env WAN_DILOCO_SYNC__PERIOD_STEPS",
        "overlap_steps": "flag --set",
    }
    assert loaded.sources["sync.alpha"] == "default"


def test_every_setting_has_a_source(base: Path) -> None:
    loaded = load_config([base], env={})
    written = loaded.config.model_dump(mode="json", by_alias=True)
    keys = {f"{section}.{key}" for section, table in written.items() if section != "regions" for key in table}
    keys |= {f"regions.{table['name']}.{key}" for table in written["regions"] for key in table}
    assert set(loaded.sources) == keys
    assert loaded.sources["regions.us-east.uplink"] == f"file {base}"
    assert loaded.sources["regions.eu-west.uplink"] == "default"


def test_a_later_list_of_regions_replaces_the_earlier(base: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text('[sync]\nquorum = 1\n[[regions]]\nname = "us-east"\n')
    loaded = load_config([base, over], env={})
    assert [region.name for region in loaded.config.regions] == ["us-east"]
    assert loaded.config.region("us-east").uplink_bytes_per_s == 25e6
    assert loaded.sources["regions.us-east.uplink"] == "default"
    assert loaded.sources["regions.us-east.name"] == f"file {over}"


def test_one_region_is_reached_by_its_name(base: Path) -> None:
    env = {"WAN_DILOCO_REGIONS__US_EAST__UPLINK": "50mbit"}
    loaded = load_config([base], env=env, overrides=["regions.eu-west.step_time_min=80ms"])
    assert loaded.config.region("us-east").uplink_bytes_per_s == 6.25e6
    assert loaded.config.region("eu-west").step_time_min_s == 0.08
    assert loaded.sources["regions.us-east.uplink"] == "env WAN_DILOCO_REGIONS__US_EAST__UPLINK"
    assert loaded.sources["regions.eu-west.step_time_min"] == "flag --set"


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.tokens=2M", "run", "tokens", 2_000_000),
        ("run.tokens=2048000", "run", "tokens", 2_048_000),
        ("inner.lr=1e-4", "inner", "lr", 1e-4),
        ("model.tied=false", "model", "tied", False),
        ("wire.codec=int8", "wire", "codec", "int8"),
        ('wire.codec="int8"', "wire", "codec", "int8"),
        ("run.name=5", "run", "name", "5"),
        ("run.name=1e3", "run", "name", "1e3"),
        ("data.source=text:/data/a=b", "data", "source", "text:/data/a=b"),
        ("run.folder=x\nname = 1", "run", "folder", "x\nname = 1"),
        ("outer.mean_patterns=['embed']", "outer", "mean_patterns", ("embed",)),
        ("syncer.listen=127.0.0.1:7000", "syncer", "listen", "127.0.0.1:7000"),
        (" sync.quorum = 1 ", "sync", "quorum", 1),
    ],
)
def test_the_text_of_a_flag_becomes_what_the_setting_is(
    base: Path, override: str, section: str, key: str, value: object
) -> None:
    config = load_config([base], env={}, overrides=[override]).config
    assert getattr(getattr(config, section), key) == value


def test_a_bad_variable_is_named_as_the_culprit(base: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"sync\.quorum: must be at least 1, not 0 \(set by env WAN_DILOCO_SYNC__QUORUM"
    ):
        load_config([base], env={"WAN_DILOCO_SYNC__QUORUM": "0"})
    with pytest.raises(ConfigError, match=r"sync\.quorom: is unknown .*did you mean sync.quorum; set by env"):
        load_config([base], env={"WAN_DILOCO_SYNC__QUOROM": "1"})


def test_variables_that_are_no_settings_are_left_alone(base: Path) -> None:
    env = {"WAN_DILOCO_DEBUG": "1", "WAN_DILOCO_SYNCER_PORT": "tcp://10.0.0.1:7000", "OTHER__SYNC__QUORUM": "9"}
    assert load_config([base], env=env).config == load_config([base], env={}).config


def test_a_variable_with_one_underscore_too_few_is_pointed_at(base: Path) -> None:
    (warning,) = load_config([base], env={"WAN_DILOCO_SYNC_QUORUM": "1"}).warnings
    assert warning == "WAN_DILOCO_SYNC_QUORUM is ignored: did you mean WAN_DILOCO_SYNC__QUORUM"


def test_loading_changes_no_argument(base: Path) -> None:
    env = {"WAN_DILOCO_SYNC__QUORUM": "1"}
    load_config([base], env=env, overrides=("run.seed=4",))
    assert env == {"WAN_DILOCO_SYNC__QUORUM": "1"}


def test_the_process_environment_is_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAN_DILOCO_SYNC__QUORUM", "1")
    assert process_environment()["WAN_DILOCO_SYNC__QUORUM"] == "1"


def test_the_rendered_toml_reads_back_to_the_same_run(base: Path, tmp_path: Path) -> None:
    loaded = load_config([base], env={}, overrides=['run.folder=it\'s "here" \\ there', "inner.eps=1e-9"])
    for sources in (None, loaded.sources):
        again = tmp_path / "again.toml"
        again.write_text(render_toml(loaded.config, sources))
        assert load_config([again], env={}).config == loaded.config


def test_rendered_lines_say_where_they_come_from(base: Path) -> None:
    loaded = load_config([base], env={}, overrides=["run.seed=4"])
    lines = {line.split(" = ")[0]: line for line in render_toml(loaded.config, loaded.sources).splitlines()}
    assert lines["seed"].endswith("# flag --set")
    assert lines["fragments"].endswith(f"# file {base}")
    assert lines["alpha"].endswith("# default")


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["outer.momentum_warmup_steps=5"], "outer.momentum_warmup_steps has no effect while outer.momentum is 0"),
        (["outer.mean_patterns=['x']"], "outer.mean_patterns has no effect with outer.merge = mean"),
        (["data.shards=4"], "data.shards is 4 and there are 2 regions: the shards of nobody are kept"),
        (["model.hidden=99", "model.ffn_multiple=8"], "model.ffn_multiple has no effect when model.hidden is given"),
        (["sync.overlap_steps=0", "sync.grace_safety=0.5"], "sync.grace_safety has no effect in lockstep"),
        (["sync.overlap_steps=0", "sync.install=rebase"], "sync.install has no effect in lockstep"),
        (["sync.install=rebase"], "exactly-once is given up"),
        (["sync.install=rebase", "sync.alpha=0.5"], "sync.alpha has no effect with sync.install = rebase"),
        (["inner.warmup_steps=1000"], "never reaches inner.lr"),
        (["sync.period_steps=1000"], "some fragments are never merged"),
        (["syncer.journal_retention=all"], "syncer.journal_retention = all drops nothing of the journal: about "),
    ],
)
def test_settings_without_effect_are_pointed_at(base: Path, overrides: list[str], warning: str) -> None:
    warnings = load_config([base], env={}, overrides=overrides).warnings
    assert any(warning in text for text in warnings), warnings


def test_an_era_split_of_one_region_is_pointed_at(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('[run]\ntokens = "1M"\n[data]\nsplit = "era"\n[[regions]]\nname = "a"\n')
    assert load_config([file], env={}).warnings == ("data.split = era has no effect with one region",)


def test_a_run_without_odd_settings_has_no_warnings(base: Path) -> None:
    assert load_config([base], env={}).warnings == ()
