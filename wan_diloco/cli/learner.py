"""`wan-diloco learner`: the training job of one region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from wan_diloco.cli.folders import Holding, check_learner_folder, what_is_in
from wan_diloco.cli.loading import loading
from wan_diloco.cli.options import ConfigFiles, Overrides, RunFolder, hold_reloads, load, peer_address
from wan_diloco.cli.preflight import check_memory

if TYPE_CHECKING:
    from wan_diloco.config import RunConfig

__all__ = ["learner", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco learner demo.toml --region us-east --run-folder runs/demo")(learner)


def learner(
    files: ConfigFiles,
    region: Annotated[
        str,
        typer.Option(
            "--region", metavar="NAME", help="Which region this is: a listed one, or another if [unlisted] lets it in."
        ),
    ],
    run_folder: RunFolder,
    overrides: Overrides = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from this region's checkpoint, if any.")] = False,
    syncer: Annotated[
        str | None,
        typer.Option(
            "--syncer",
            metavar="HOST:PORT",
            parser=peer_address,
            help="Where the syncer is, instead of the region's address or DIR/address.",
        ),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            "--threads",
            min=0,
            help="Threads of one step; 0 takes one when the run folder names a syncer on this machine, else all.",
        ),
    ] = 0,
) -> None:
    """Train in one region until the run has ended, or until SIGTERM.

    Training goes on while the syncer is away. SIGHUP has it read CONFIG again: the rate of its uplink changes at once
    (that of its downlink is the syncer's to keep).
    Exit codes: 75 asks to be started again, 77 and 78 not to be.
    """
    hold_reloads()
    config = load(files, overrides).config
    if what_is_in(run_folder) is Holding.FINISHED_RUN:
        typer.echo(f"wan-diloco: the run in {run_folder} is finished", err=True)
        return
    check_learner_folder(run_folder, region, resume=resume)
    check_memory(config, learners=1)

    with loading():
        from wan_diloco.clock import SystemClock
        from wan_diloco.learner.trainer import run_learner
        from wan_diloco.telemetry import configure_logging

    def again() -> RunConfig:
        return load(files, overrides).config

    clock = SystemClock()
    configure_logging(clock, fields={"run": config.run.name, "region": region, "process": "learner"})
    code = run_learner(
        config,
        region=region,
        run_folder=run_folder,
        resume=resume,
        syncer=syncer or "",
        threads=threads,
        clock=clock,
        load=again,
        refused=lambda reason: typer.echo(f"wan-diloco: {region}: {' '.join(reason.split())}", err=True),
    )
    raise typer.Exit(code)
