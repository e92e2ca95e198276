"""A SIGHUP that comes while a process starts."""

from __future__ import annotations

import signal

import pytest

from tests.support.cli import in_this_process
from wan_diloco.cli import learner, syncer
from wan_diloco.errors import EXIT_CONFIG, ConfigError


@pytest.mark.parametrize(
    ("module", "arguments"), [(learner, ["learner", "run.toml", "--region", "east"]), (syncer, ["syncer", "run.toml"])]
)
def test_it_waits_and_ends_nothing(module, arguments, tmp_path, capsys, monkeypatch):
    def load(*_):
        signal.raise_signal(signal.SIGHUP)
        raise ConfigError("isn't TOML", where="run.toml")

    monkeypatch.setattr(module, "load", load)
    outcome = in_this_process(capsys, *arguments, "--run-folder", str(tmp_path))
    assert outcome.exit_code == EXIT_CONFIG
    assert outcome.held == {signal.SIGHUP}
