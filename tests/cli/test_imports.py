"""The help answers at once, because nothing heavy is imported for it."""

from __future__ import annotations

import json

import pytest

from tests.support.cli import in_own_process

HEAVY = ("torch", "grpc", "google.protobuf", "numpy", "numba", "pydantic", "structlog", "rich", "safetensors", "fsspec")
# typer itself reads the parameters of a command with it
OF_TYPER = ["pydantic"]

PROGRAM = """
import json, sys
from wan_diloco.cli.main import main
try:
    main({arguments!r})
except SystemExit as exit:
    code = exit.code
print(json.dumps([code, sorted(set({heavy!r}) & set(sys.modules))]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["--help"], []),
        (["config", "show", "--help"], OF_TYPER),
        (["version"], OF_TYPER),
        (["config", "show", "deploy/demo.toml"], OF_TYPER),
        (["config", "schema"], OF_TYPER),
    ],
    ids=" ".join,
)
def test_a_command_imports_only_what_it_uses(arguments: list[str], imported: list[str]) -> None:
    outcome = in_own_process(["-c", PROGRAM.format(arguments=arguments, heavy=HEAVY)])
    assert json.loads(outcome.stderr.splitlines()[-1]) == [0, imported]


def test_the_package_runs_as_a_module() -> None:
    outcome = in_own_process(["-m", "wan_diloco", "version", "--json"])
    assert outcome.exit_code == 0
    assert json.loads(outcome.stdout)["wan-diloco"]


_ENVIRONMENT = """
import os, sys
from pathlib import Path
from wan_diloco.cli.options import load
load([Path("deploy/demo.toml")], [])
assert "grpc" not in sys.modules
print(os.environ["GRPC_VERBOSITY"])
"""


@pytest.mark.parametrize(("given", "left"), [({}, "NONE"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG")])
def test_grpc_writes_no_lines_of_its_own_unless_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], left: str
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    assert in_own_process(["-c", _ENVIRONMENT], env=given).stdout == f"{left}\n"
