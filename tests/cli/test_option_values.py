"""Values of options that make no sense: refused at once, as a wrong use of the command and not as somebody's bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import in_this_process
from tests.support.syncer import tiny_config
from wan_diloco.errors import EXIT_USAGE


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("wan_diloco.config.process_environment", dict)
    path = tmp_path / "given.json"
    path.write_text(tiny_config().resolved_json())
    return str(path)


@pytest.mark.parametrize("value", ["0s", "1ms", "5", "soon", "", "-3s", "2d", "1e18d"])
def test_a_syncer_is_given_a_time_to_end_in_that_it_can_keep(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    outcome = in_this_process(capsys, "syncer", config, "--run-folder", str(tmp_path / "run"), "--end-within", value)
    assert outcome.exit_code == EXIT_USAGE
    assert outcome.stderr.startswith("wan-diloco: --end-within")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["0s", "1ms", "nonsense", "3d"])
def test_faults_are_drawn_over_a_time_that_makes_sense(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    command = ("chaos", config, "--random", "--run-folder", str(tmp_path / "run"), "--duration", value)
    outcome = in_this_process(capsys, *command)
    assert outcome.exit_code == EXIT_USAGE
    assert outcome.stderr.splitlines()[-1].startswith("wan-diloco: --duration")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["foo", "http://x:1", "1.2.3.4:99999", "1.2.3.4:0", ":::", "", "a b:1", "a:x"])
def test_a_learner_looks_for_no_syncer_at_what_is_no_address(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    outcome = in_this_process(
        capsys, "learner", config, "--region", "east", "--run-folder", str(tmp_path / "run"), "--syncer", value
    )
    assert outcome.exit_code == EXIT_USAGE
    assert "isn't an address" in outcome.stderr
    assert not (tmp_path / "run").exists()
