"""Runs the command line, in this process or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests.support.sources import REPOSITORY
from wan_diloco.cli.main import main

__all__ = ["Outcome", "in_own_process", "in_this_process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str
    held: frozenset[int] = frozenset()
    """Signals that came and wait, of a command that ran in this process."""


def in_this_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Quick; what the command imports stays imported."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
    finally:
        # What a command blocked, and what came meanwhile, is not for whoever runs the tests.
        held = signal.sigpending() - mask
        if held:
            signal.sigtimedwait(held, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    captured = capsys.readouterr()
    code = caught.value.code
    return Outcome(
        exit_code=code if isinstance(code, int) else 0,
        stdout=captured.out,
        stderr=captured.err,
        held=frozenset(held),
    )


def in_own_process(program: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> Outcome:
    """`python` with these arguments, from the repository's root."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("WAN_DILOCO_")}
    done = subprocess.run(
        [sys.executable, *program],
        cwd=REPOSITORY,
        env=environment | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Outcome(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)
