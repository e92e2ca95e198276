"""SIGHUP: rates are read again, written for those who are started later, and handed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wan_diloco.cli.launch import _reload
from wan_diloco.config import LiveConfig, RunConfig, parse_config


def config(uplink: str, **run: Any) -> RunConfig:
    return parse_config({"run": {"tokens": "1M", **run}, "regions": [{"name": "east", "uplink": uplink}]})


class Everybody:
    """Stands for the supervisor; counts."""

    reloads = 0

    def reload(self) -> None:
        self.reloads += 1


@pytest.mark.parametrize(("newer", "reloads", "written"), [("50mbit", 1, "50mbit"), ("200mbit", 0, None)])
def test_everybody_is_told_when_a_rate_changed(tmp_path: Path, newer: str, reloads: int, written: str | None) -> None:
    everybody, said = Everybody(), list[str]()
    live = LiveConfig(config("200mbit"), lambda: config(newer, seed=7), said.append)
    _reload(live, tmp_path, everybody, said.append)  # type: ignore[arg-type]  # all that is asked of it
    assert everybody.reloads == reloads
    path = tmp_path / "config.next.json"
    assert path.exists() == (written is not None)
    if written is not None:
        tree = json.loads(path.read_text())
        assert tree["regions"][0]["uplink"] == written
        assert tree["run"]["seed"] == 1, "the rest stays"
    assert any("run.seed differs" in text for text in said)


def test_nobody_is_told_of_what_could_not_be_written(tmp_path: Path) -> None:
    everybody, said = Everybody(), list[str]()
    live = LiveConfig(config("200mbit"), lambda: config("50mbit"), said.append)
    _reload(live, tmp_path / "gone", everybody, said.append)  # type: ignore[arg-type]
    assert everybody.reloads == 0
    assert "nobody follows" in said[-1]
