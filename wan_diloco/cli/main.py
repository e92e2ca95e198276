"""The entry point: all commands, and the one place where an error becomes an exit code.

An error of our tree ends in one line on stderr and its own code. Anything else is a bug: one line and
`EXIT_INTERNAL`; WAN_DILOCO_DEBUG=1 adds the traceback. Local variables are never shown: they may hold secrets.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from wan_diloco.cli import chaos, config, export, learner, replay, run, simulate, status, syncer, version
from wan_diloco.errors import EXIT_INTERNAL, WanDilocoError

__all__ = ["build_app", "main"]


def build_app() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        name="wan-diloco",
        help="Train one model across regions joined by ordinary wide-area links.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
    )
    # A command a line, in the order of the help.
    run.register(app)
    syncer.register(app)
    learner.register(app)
    status.register(app)
    export.register(app)
    replay.register(app)
    simulate.register(app)
    chaos.register(app)
    config.register(app)
    version.register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit code.

    Args:
        arguments: What follows the program's name; the process's own when not given.

    Raises:
        SystemExit: Always.
    """
    command = typer.main.get_command(build_app())
    try:
        command.main(arguments if arguments is None else list(arguments), prog_name="wan-diloco")
    except WanDilocoError as error:
        sys.exit(_report(str(error), error, error.exit_code))
    except Exception as error:  # noqa: BLE001 - the last supervisor: whatever comes here is a bug, and ends the process
        sys.exit(_report(f"internal error: {_described(error)}", error, EXIT_INTERNAL))


def _described(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}; WAN_DILOCO_DEBUG=1 shows the traceback"


def _report(text: str, error: Exception, exit_code: int) -> int:
    """Say it on one line, whatever the text holds."""
    from wan_diloco.config.environment import DEBUG_VARIABLE, process_environment

    typer.echo(f"wan-diloco: {' '.join(text.split())}", err=True)
    if process_environment().get(DEBUG_VARIABLE) == "1":
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    return exit_code
