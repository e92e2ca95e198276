"""`wan-diloco syncer`: the merging service of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from wan_diloco.cli.folders import Holding, check_syncer_folder
from wan_diloco.cli.loading import loading
from wan_diloco.cli.options import ConfigFiles, Overrides, RefragmentFlag, RunFolder, hold_reloads, load, read_duration
from wan_diloco.cli.preflight import check_memory, check_port
from wan_diloco.errors import UsageError

if TYPE_CHECKING:
    from wan_diloco.config import RunConfig

__all__ = ["register", "syncer"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco syncer demo.toml --run-folder runs/demo")(syncer)


def syncer(
    files: ConfigFiles,
    run_folder: RunFolder,
    overrides: Overrides = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Take up the run that is in the folder.")] = False,
    refragment: RefragmentFlag = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Push a syncer aside that has syncer.store, though it may be alive: it ends."),
    ] = False,
    end_within: Annotated[
        str,
        typer.Option("--end-within", metavar="TIME", help="How long it may last after SIGTERM."),
    ] = "27s",
    input_log: Annotated[
        bool, typer.Option("--input-log", help="Write every event to input.jsonl, for debugging.")
    ] = False,
) -> None:
    """Merge the regions' work until the run has ended.

    It listens where `syncer.listen` says, and writes the address to DIR/address. SIGTERM ends it cleanly; started
    again with --resume it goes on with the very same bits. SIGHUP has it read CONFIG again: rates change at once.
    """
    if refragment and not resume:
        raise UsageError("--refragment is for a run that goes on: give --resume too")
    end_within_s = read_duration(end_within, "--end-within", least="1s")
    hold_reloads()

    def given() -> RunConfig:
        return load(files, overrides).config

    config, holding = check_syncer_folder(given(), run_folder, resume=resume, refragment=refragment)
    if holding is Holding.FINISHED_RUN:
        typer.echo(f"wan-diloco: the run in {run_folder} is finished", err=True)
        return
    check_port(config)
    check_memory(config, syncers=1)

    with loading():
        from wan_diloco.clock import SystemClock
        from wan_diloco.syncer.main import run_syncer
        from wan_diloco.telemetry import configure_logging

    configure_logging(SystemClock(), fields={"run": config.run.name, "process": "syncer"})
    code = run_syncer(
        config,
        run_folder,
        resume,
        refragment=refragment,
        input_log=input_log,
        load=given,
        take_over=take_over,
        end_within_s=end_within_s,
    )
    raise typer.Exit(code)
