"""How a command fails: one line, the right code, and never a secret."""

from __future__ import annotations

import pytest

from tests.support.cli import Outcome, in_own_process, in_this_process
from wan_diloco.cli import main as entry
from wan_diloco.errors import AuthError, ConfigError, PeerUnavailable, StorageError

SECRET = "SENTINEL-123"


def run_raising(error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The command line with one more command, which holds a secret and fails deep inside."""
    build_app = entry.build_app

    def deep(token: str) -> None:
        password = token
        assert password == SECRET
        raise error

    def with_failing_command():
        app = build_app()

        @app.command()
        def fail(token: str) -> None:
            deep(token)

        return app

    monkeypatch.setattr(entry, "build_app", with_failing_command)
    return in_this_process(capsys, "fail", SECRET)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("is missing", where="run.toml"), 78),
        (PeerUnavailable("nobody answers at 10.0.0.1:7000"), 69),
        (AuthError("incarnation 3 is fenced"), 77),
        (StorageError("disk full"), 75),
    ],
)
def test_an_expected_error_is_one_line_and_its_own_code(
    error: Exception, exit_code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run_raising(error, capsys, monkeypatch)
    assert outcome == Outcome(exit_code=exit_code, stdout="", stderr=f"wan-diloco: {error}\n")


def test_a_text_with_several_lines_is_still_said_on_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_raising(ConfigError("one\n  two"), capsys, monkeypatch).stderr == "wan-diloco: one two\n"


def test_a_bug_is_one_line_that_names_the_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run_raising(RuntimeError("boom"), capsys, monkeypatch)
    assert outcome.exit_code == 70
    assert outcome.stderr.startswith("wan-diloco: internal error: RuntimeError: boom (test_errors.py:")
    assert outcome.stderr.count("\n") == 1
    assert "WAN_DILOCO_DEBUG=1" in outcome.stderr


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), PeerUnavailable("nobody answers")])
def test_no_local_variable_is_ever_shown(
    error: Exception, debug: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAN_DILOCO_DEBUG", debug)
    outcome = run_raising(error, capsys, monkeypatch)
    assert SECRET not in outcome.stdout + outcome.stderr
    assert ("Traceback" in outcome.stderr) == (debug == "1")
    assert outcome.exit_code in (69, 70)


def test_an_interrupt_ends_with_its_own_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_raising(KeyboardInterrupt(), capsys, monkeypatch).exit_code == 130


def test_a_refused_configuration_ends_the_process_with_78_and_no_output() -> None:
    outcome = in_own_process(["-m", "wan_diloco", "config", "show", "deploy/demo.toml", "--set", "sync.quorum=9"])
    assert outcome == Outcome(
        exit_code=78,
        stdout="",
        stderr="wan-diloco: sync.quorum: 9 is more than the number of regions, 4 (1 to 4)\n",
    )
