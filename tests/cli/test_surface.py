"""The command line is a contract: what is there is frozen, and a change shows up in a diff."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from tests.support.cli import in_this_process
from tests.support.golden import Golden
from wan_diloco.cli.main import build_app
from wan_diloco.lab.chaos_draw import SORTS


def surface(command: Any) -> dict[str, Any]:
    """Parameters of a command, or the commands of a group; the words of the help aren't part of it."""
    if hasattr(command, "commands"):
        return {name: surface(each) for name, each in command.commands.items()}
    return {parameter.name: parameter_surface(parameter) for parameter in command.params}


def parameter_surface(parameter: Any) -> dict[str, Any]:
    return {
        "kind": parameter.param_type_name,
        "options": sorted([*parameter.opts, *parameter.secondary_opts]),
        "metavar": parameter.metavar,
        "flag": getattr(parameter, "is_flag", False),
        "variable": parameter.envvar,
        "required": parameter.required,
        "repeated": parameter.multiple or parameter.nargs != 1,
        "default": json.loads(json.dumps(parameter.default, default=str)),
    }


def all_commands(command: Any, *words: str) -> list[tuple[str, ...]]:
    """The words of every command and group."""
    below = getattr(command, "commands", {})
    return [words, *(found for name, each in below.items() for found in all_commands(each, *words, name))]


COMMAND = typer.main.get_command(build_app())


def test_commands_and_options_are_as_they_were(golden: Golden) -> None:
    golden.check_json("cli_surface.json", surface(COMMAND))


@pytest.mark.parametrize("words", all_commands(COMMAND), ids=" ".join)
def test_every_command_explains_itself(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = in_this_process(capsys, *words, "--help")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith(" ".join(["Usage: wan-diloco", *words]))


@pytest.mark.parametrize("words", [words for words in all_commands(COMMAND) if words], ids=" ".join)
def test_every_command_shows_an_example(words: tuple[str, ...]) -> None:
    command: Any = COMMAND
    for word in words:
        command = command.commands[word]
    assert hasattr(command, "commands") or (command.epilog or "").startswith(f"Example: wan-diloco {' '.join(words)}")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = in_this_process(capsys)
    assert "Commands:" in outcome.stdout + outcome.stderr


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = in_this_process(capsys, "confg")
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert "confg" in outcome.stderr


def test_the_help_of_chaos_says_how_many_faults_a_draw_needs(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(in_this_process(capsys, "chaos", "--help").stdout.split())
    assert f"of {SORTS} sorts" in words
