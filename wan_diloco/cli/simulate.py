"""`wan-diloco simulate`: the real machines, in virtual time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from wan_diloco.cli.options import JsonFlag
from wan_diloco.errors import EXIT_INTERNAL

if TYPE_CHECKING:
    from wan_diloco.simulation.campaign import Campaign

__all__ = ["register"]

_PROGRESS_EVERY_S: Final = 1.0
_FAILURES: Final = Path("failing-seeds.txt")

_commands = typer.Typer(
    help="Play runs in virtual time, and see that nothing is lost.", no_args_is_help=True, rich_markup_mode=None
)


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(_commands, name="simulate")


@_commands.command(epilog="Example: wan-diloco simulate protocol --seeds 1000")
def protocol(
    *,
    seeds: Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="How many worlds to play.")] = 300,
    first: Annotated[int, typer.Option("--first", min=0, metavar="SEED", help="The first of them.")] = 0,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, metavar="SEED", help="Play this one alone, and tell all of it.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, metavar="J", help="Processes; by default all cores.")
    ] = None,
    failures: Annotated[
        Path, typer.Option("--failures", metavar="FILE", help="Gets a line for each seed that fails.")
    ] = _FAILURES,
    as_json: JsonFlag = False,
) -> None:
    """Play worlds of a syncer and learners with all their faults, and check what must hold after every event.

    The machines are the product's; links, disks and clocks are invented. A seed is one world, the same each time, with
    at least 10 merges and 3 faults. Ends with 70 if anything didn't hold.

    `transition_coverage` is the share of the transitions in the machines' tables, of what each may do in each of its
    states, that these worlds have shown; more seeds show more. --json lists those that none has shown.
    """
    if seed is not None:
        _tell(seed)
        return
    from wan_diloco.clock import SystemClock
    from wan_diloco.simulation.campaign import Campaign, play_worlds

    clock, campaign = SystemClock(), Campaign()
    began_s = said_s = clock.now_s()
    for result in play_worlds(first, seeds, jobs or len(os.sched_getaffinity(0))):
        campaign.add(result)
        if result.violation:
            typer.echo(f"seed {result.seed}: {result.violation}", err=True)
            _save(failures, result.seed, result.violation)
        if clock.now_s() >= said_s + _PROGRESS_EVERY_S:
            said_s = clock.now_s()
            typer.echo(f"{campaign.worlds} of {seeds} worlds, {len(campaign.violations)} violations", err=True)
    _print(campaign, campaign.worlds / max(1e-9, clock.now_s() - began_s), as_json=as_json)
    if campaign.violations:
        again = f"wan-diloco simulate protocol --seed {min(campaign.violations)}"
        typer.echo(f"wan-diloco: {len(campaign.violations)} seeds are in {failures}; see one with: {again}", err=True)
        raise typer.Exit(EXIT_INTERNAL)


def _tell(seed: int) -> None:
    from wan_diloco.simulation.transcript import retell

    result = retell(seed, typer.echo)
    typer.echo(f"seed {seed}: {result.violation or 'everything held'}; {result.merges} merges")
    if result.violation:
        raise typer.Exit(EXIT_INTERNAL)


def _save(path: Path, seed: int, violation: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{seed:<8} {' '.join(violation.split())}\n")


def _print(campaign: Campaign, worlds_per_s: float, *, as_json: bool) -> None:
    found = {
        "worlds": campaign.worlds,
        "violations": len(campaign.violations),
        "failing_seeds": {str(seed): text for seed, text in sorted(campaign.violations.items())},
        "worlds_per_s": round(worlds_per_s, 2),
        "transition_coverage": round(campaign.transition_coverage, 4),
        "transitions_unseen": campaign.unseen,
        "transitions_undeclared": sorted(campaign.undeclared),
        "merges": campaign.merges,
        "merges_min": campaign.merges_min,
        "faults": dict(sorted(campaign.faults.items())),
        "faults_min": campaign.faults_min,
        "syncer_crashed": campaign.crashed,
        "events": campaign.events,
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    # A list that long says nothing; programs have it.
    found["transitions_unseen"] = f"{len(campaign.unseen)} of the {campaign.transitions} in the machines' tables"
    for name, value in found.items():
        text = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name:<24} {'; '.join(text) if isinstance(text, list) else text}")
