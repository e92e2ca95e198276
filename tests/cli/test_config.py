"""`wan-diloco config` and `wan-diloco version`."""

from __future__ import annotations

import json
import platform
import tomllib
from pathlib import Path

import pytest

from tests.support.cli import in_this_process
from tests.support.sources import REPOSITORY
from wan_diloco.config import load_config, parse_config

DEMO = str(REPOSITORY / "deploy" / "demo.toml")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan_diloco.config.process_environment", dict)


def test_show_prints_toml_of_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = in_this_process(capsys, "config", "show", DEMO, "--set", "sync.quorum=2")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    expected = load_config([Path(DEMO)], env={}, overrides=["sync.quorum=2"]).config
    assert parse_config(tomllib.loads(outcome.stdout)) == expected


def test_show_says_where_values_come_from(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan_diloco.config.process_environment", lambda: {"WAN_DILOCO_RUN__SEED": "9"})
    outcome = in_this_process(capsys, "config", "show", DEMO, "--set", "sync.quorum=2", "--sources")
    lines = {line.partition(" = ")[0]: line for line in outcome.stdout.splitlines()}
    assert lines["quorum"].endswith("# flag --set")
    assert lines["seed"].endswith("# env WAN_DILOCO_RUN__SEED")
    assert lines["fragments"].endswith(f"# file {DEMO}")
    assert lines["alpha"].endswith("# default")


def test_show_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = in_this_process(capsys, "config", "show", DEMO, "--json")
    assert parse_config(json.loads(outcome.stdout)) == load_config([Path(DEMO)], env={}).config


def test_show_prints_json_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = in_this_process(capsys, "config", "show", DEMO, "--json", "--sources")
    shown = json.loads(outcome.stdout)
    assert shown["config"]["run"]["name"] == "sotu"
    assert shown["sources"]["run.name"] == f"file {DEMO}"


def test_show_prints_every_time_limit_and_what_it_follows_from(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("config", "show", DEMO, "--deadlines", "--set", "sync.membership_lease=6s")
    lines = [line.split() for line in in_this_process(capsys, *arguments).stdout.splitlines()]
    assert ["lease", "6s", "sync.membership_lease;"] in [line[:3] for line in lines]
    assert ["heartbeat", "1.5s", "sync.membership_lease", "/", "4"] in lines
    shown = json.loads(in_this_process(capsys, *arguments, "--json").stdout)
    assert list(shown) == ["syncer", *(region.name for region in load_config([Path(DEMO)], env={}).config.regions)]
    assert all(row["follows"] and (row["limit_s"] or row["limit_steps"]) for table in shown.values() for row in table)


def test_warnings_go_to_stderr_and_change_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "outer.momentum=0", "--set", "outer.momentum_warmup_steps=9"]
    outcome = in_this_process(capsys, "config", "show", DEMO, "--json", *overrides)
    assert json.loads(outcome.stdout)["outer"]["momentum_warmup_steps"] == 9
    assert outcome.stderr == (
        "wan-diloco: warning: outer.momentum_warmup_steps has no effect while outer.momentum is 0\n"
    )


def test_what_cant_run_on_this_machine_is_said_and_still_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = [f"data.source=text:{tmp_path / 'nothing.txt'}", "regions.us-east.ranks=2", "model.dim=65536"]
    outcome = in_this_process(capsys, "config", "show", DEMO, *(word for text in settings for word in ("--set", text)))
    assert outcome.exit_code == 0
    assert "dim = 65536" in outcome.stdout
    lines = outcome.stderr.splitlines()
    assert all(line.startswith("wan-diloco: warning: this can't run here: ") for line in lines)
    for line, words in zip(lines, ("a region trains with one rank", "no file or folder", "of memory"), strict=True):
        assert words in line


def test_the_schema_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(in_this_process(capsys, "config", "schema").stdout)
    assert schema["required"] == ["run", "regions"]
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(setting["description"] for setting in section["properties"].values()), section["title"]
    uplink = schema["$defs"]["RegionSettings"]["properties"]["uplink"]
    assert (uplink["type"], uplink["default"]) == ("string", "200mbit")


def test_version_names_what_results_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    versions = json.loads(in_this_process(capsys, "version", "--json").stdout)
    assert versions["python"] == platform.python_version()
    assert {"wan-diloco", "torch", "grpcio", "protobuf"} <= set(versions)
    text = in_this_process(capsys, "version").stdout
    assert all(name in text and value in text for name, value in versions.items())


def test_the_demo_is_four_regions_on_real_text() -> None:
    loaded = load_config([Path(DEMO)], env={})
    assert [region.name for region in loaded.config.regions] == ["us-east", "us-west", "eu-west", "ap-south"]
    assert loaded.config.data.source == "sotu"
    assert loaded.warnings == ()
