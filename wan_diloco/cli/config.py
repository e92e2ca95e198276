"""`wan-diloco config`: what a run is, before it starts."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from wan_diloco.cli.options import ConfigFiles, JsonFlag, Overrides, load, print_warning
from wan_diloco.cli.preflight import check_memory, check_regions, check_source
from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wan_diloco.config import RunConfig

__all__ = ["register"]

_commands = typer.Typer(help="Show and check configurations.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(_commands, name="config")


@_commands.command(epilog="Example: wan-diloco config show deploy/demo.toml --set sync.quorum=2 --sources")
def show(
    files: ConfigFiles,
    overrides: Overrides = None,
    *,
    sources: Annotated[bool, typer.Option("--sources", help="Say where each value comes from.")] = False,
    deadlines: Annotated[
        bool, typer.Option("--deadlines", help="Print every time limit instead, and what it follows from.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check a configuration and print every value in force.

    What only this machine says no to (a text that isn't here, too little memory) is a warning, since a run may be
    meant for others.
    """
    from wan_diloco.config import render_toml

    loaded = load(files, overrides)
    for problem in _problems_here(loaded.config):
        print_warning(f"this can't run here: {problem}")
    if deadlines:
        _show_deadlines(loaded.config, as_json=as_json)
    elif as_json and sources:
        resolved = json.loads(loaded.config.resolved_json())
        typer.echo(json.dumps({"config": resolved, "sources": dict(loaded.sources)}, indent=2))
    elif as_json:
        typer.echo(loaded.config.resolved_json(), nl=False)
    else:
        typer.echo(render_toml(loaded.config, loaded.sources if sources else None), nl=False)


def _show_deadlines(config: RunConfig, *, as_json: bool) -> None:
    from wan_diloco.learner.deadlines import deadlines_of as of_learner
    from wan_diloco.syncer.deadlines import deadlines_of as of_syncer

    tables = {"syncer": of_syncer(config), **{one.name: of_learner(config, one.name) for one in config.regions}}
    if as_json:
        rows = {name: [dataclasses.asdict(row) for row in table] for name, table in tables.items()}
        typer.echo(json.dumps(rows, indent=2))
        return
    for name, table in tables.items():
        typer.echo(name)
        for row in table:
            typer.echo(f"  {row.name:20}{row.limit:>10}  {row.follows}")


def _problems_here(config: RunConfig) -> Iterator[str]:
    """Why `run` would refuse this configuration on this machine, as far as that is quickly known."""
    checks = (check_regions, check_source, lambda it: check_memory(it, learners=len(it.regions), syncers=1))
    for check in checks:
        try:
            check(config)
        except ConfigError as exc:
            yield str(exc)


@_commands.command(epilog="Example: wan-diloco config schema > wan-diloco.schema.json")
def schema() -> None:
    """Print the JSON schema of configurations, for editors and other tools."""
    from wan_diloco.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
