"""The configuration in the run folder: a syncer that starts doesn't take rates back that were changed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.syncer import tiny_config
from wan_diloco.syncer.main import _write_config


def test_it_is_written_where_there_is_none_or_another(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    _write_config(path, tiny_config())
    assert path.read_text() == tiny_config().resolved_json()
    for other in ("no JSON", tiny_config(outer={"lr": 0.5}).resolved_json()):
        path.write_text(other)
        _write_config(path, tiny_config())
        assert path.read_text() == tiny_config().resolved_json()


def test_rates_that_were_changed_meanwhile_stay(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(tiny_config(syncer={"ingress": "1gbit"}).resolved_json())
    _write_config(path, tiny_config())
    assert json.loads(path.read_text())["syncer"]["ingress"] == "1gbit"
