"""`wan-diloco run`: everything on this machine, one process group a region, supervised and shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from wan_diloco.cli.folders import Holding, check_baseline_folder, check_folder, what_is_in
from wan_diloco.cli.options import ConfigFiles, JsonFlag, Overrides, RefragmentFlag, folder_path, load
from wan_diloco.cli.preflight import check_data, check_memory, check_port, check_regions
from wan_diloco.cli.words import resume_command
from wan_diloco.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, EXIT_TEMPORARY, ConfigError, UsageError
from wan_diloco.units import format_count, format_duration

if TYPE_CHECKING:
    from wan_diloco.cli.supervise import Outcome
    from wan_diloco.config import RunConfig

__all__ = ["Baseline", "register", "require_merged", "result_text", "run"]

# The ends after which the same run can go on. After others it would fail in the same way.
_RESUMABLE: Final = frozenset({EXIT_TEMPORARY, EXIT_SIGINT, EXIT_SIGTERM})

# Of the regions that were least present.
_REGIONS_SHOWN: Final = 6


class Baseline(StrEnum):
    """What a run is compared with."""

    ALONE = "alone"
    DATA_PARALLEL = "data-parallel"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco run deploy/demo.toml --set run.tokens=2M")(run)


def run(
    files: ConfigFiles,
    overrides: Overrides = None,
    *,
    run_folder: Annotated[
        Path | None,
        typer.Option(
            "--run-folder", metavar="DIR", parser=folder_path, help="Where to keep the run, instead of run.folder."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that is in the folder.")] = False,
    refragment: RefragmentFlag = False,
    baseline: Annotated[
        Baseline | None,
        typer.Option("--baseline", help="Train the same model the ordinary way instead, to compare with."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train one model across regions, all on this machine.

    Starts a syncer and a learner a region, keeps them alive, and shows how they do. Ctrl-C ends the run
    cleanly, and --resume goes on with it. SIGHUP has it read CONFIG again: rates change at once.
    """
    if baseline is not None and resume:
        raise UsageError("a baseline can't be resumed: leave --resume or --baseline out")
    if refragment and not resume:
        raise UsageError("--refragment is for a run that goes on: give --resume too")
    config = load(files, overrides).config
    if baseline is not None:
        _run_baseline(config, baseline, run_folder, as_json=as_json)
        return

    folder = run_folder or config.run.folder_path
    config, holding = check_folder(config, folder, resume=resume, refragment=refragment)
    if holding is Holding.FINISHED_RUN:
        typer.echo(f"wan-diloco: the run in {folder} is finished; this is its result", err=True)
        _print_result(folder, as_json=as_json)
        require_merged(folder)
        return
    outcome = _run_here(
        config,
        folder,
        resume=resume,
        refragment=refragment,
        load=lambda: load(files, overrides).config,
    )
    if outcome.exit_code == EXIT_OK:
        _print_result(folder, as_json=as_json)
        require_merged(folder)
        return
    if outcome.problem:
        typer.echo(f"wan-diloco: {outcome.problem}", err=True)
    typer.echo(f"wan-diloco: logs are in {folder / 'logs'}", err=True)
    if outcome.exit_code in {EXIT_SIGINT, EXIT_SIGTERM} and not (folder / "summary.json").exists():
        typer.echo("wan-diloco: there is no summary: the syncer had not taken the run up yet, or was killed", err=True)
    holding = what_is_in(folder)
    if holding is Holding.FINISHED_RUN:
        typer.echo(f"wan-diloco: the run is finished all the same: {folder / 'report.html'}", err=True)
    elif outcome.exit_code in _RESUMABLE and holding is Holding.RUN:
        command = resume_command(files, overrides, run_folder, as_json=as_json, refragment=refragment)
        typer.echo(f"wan-diloco: go on with {command}", err=True)
    raise typer.Exit(outcome.exit_code)


def result_text(summary: Mapping[str, Any], evaluation: Mapping[str, Any], files: Sequence[Path]) -> str:
    """What a finished run came to, for a person.

    Args:
        summary: Of `summary.json`; what is missing or null there isn't said.
        evaluation: Of `evaluation.json`; may be empty.
        files: Where there is more to read.
    """
    rows = [
        ("validation loss", "{:.4f} nats a byte", ("validation_nats_per_byte",)),
        ("test loss", "{:.4f} nats a byte", ("test_nats_per_byte",)),
        ("tokens trained", "{}", ("tokens_trained",)),
        ("tokens trained", "{}", ("tokens",)),
        ("time", "{}", ("wall_s",)),
        ("rounds", "{}", ("rounds",)),
        ("participation", "{:.1%} of the rounds a region was live for", ("participation",)),
        ("bits a parameter", "{:.2f} up, {:.2f} down", ("uplink_bits_per_parameter", "downlink_bits_per_parameter")),
    ]
    lines = []
    for label, form, keys in rows:
        values = [_readable(key, summary.get(key)) for key in keys]
        if None not in values:
            lines.append(f"{label:<18}{form.format(*values)}")
    if "evaluation" in summary and summary.get("validation_nats_per_byte") is None:
        lines.insert(0, f"{'loss':<18}not known: {summary['evaluation']}; --resume tries again")
    shares = {name: region.get("rounds_merged_share") for name, region in summary.get("by_region", {}).items()}
    known = sorted((share, name) for name, share in shares.items() if share is not None)
    if known:
        # Who was away for long is not live in the meantime, and shows only here. Of many regions the least present.
        said = ", ".join(f"{name} {share:.0%}" for share, name in known[:_REGIONS_SHOWN])
        lines.append(f"{'of all rounds':<18}{said}")
    lines += [f"{path.stem:<18}{path}" for path in files]
    if evaluation.get("sample"):
        # What a model writes must not be able to steer a terminal.
        sample = ["".join(filter(str.isprintable, line)) for line in evaluation["sample"].splitlines()]
        lines += ["", "The published model writes:", *(f"    {line}".rstrip() for line in sample)]
    return "\n".join(lines)


def require_merged(folder: Path) -> None:
    """See that a finished run came to something.

    Raises:
        ConfigError: Nothing was merged, so that its model is the initial one.
    """
    from wan_diloco.storage import read_json

    summary = read_json(folder / "summary.json")
    if not summary.get("nothing_merged"):
        return
    refused = ", ".join(f"{reason} {count}" for reason, count in summary.get("rejected", {}).items())
    raise ConfigError(
        f"nothing was merged in this run, and its scores are the initial model's; refused: {refused or 'nothing'}",
        where=str(folder),
        hint="see its logs; with a lower inner.lr or more run.tokens something may be",
    )


def _run_here(
    config: RunConfig, folder: Path, *, resume: bool, refragment: bool, load: Callable[[], RunConfig]
) -> Outcome:
    import random

    from rich.console import Console

    from wan_diloco.cli.launch import launch
    from wan_diloco.cli.progress import make_display
    from wan_diloco.clock import SystemClock
    from wan_diloco.config import process_environment

    check_regions(config)
    check_memory(config, learners=len(config.regions), syncers=1)
    check_port(config)
    check_data(config)
    clock = SystemClock()
    return launch(
        config,
        folder,
        resume=resume,
        refragment=refragment,
        display=make_display(Console(stderr=True), clock),
        env=process_environment(),
        clock=clock,
        rng=random.Random(),
        load=load,
    )


def _print_result(folder: Path, *, as_json: bool) -> None:
    from wan_diloco.storage import read_json

    summary = read_json(folder / "summary.json")
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
        return
    files = [path for name in ("summary.json", "report.html") if (path := folder / name).exists()]
    evaluation = folder / "evaluation.json"
    typer.echo(result_text(summary, read_json(evaluation) if evaluation.exists() else {}, files))


def _run_baseline(config: RunConfig, baseline: Baseline, run_folder: Path | None, *, as_json: bool) -> None:
    folder = run_folder or Path(f"{config.run.folder}-{baseline.value}")
    check_baseline_folder(folder)
    check_memory(config, replicas=1 if baseline is Baseline.ALONE else len(config.regions))
    check_data(config)

    from wan_diloco.learner.baseline import BaselineMode, run_baseline
    from wan_diloco.storage import FolderLock

    with FolderLock(folder, f"{baseline.value} baseline"):
        check_baseline_folder(folder)
        typer.echo(f"wan-diloco: {_announcement(config, baseline)}, in {folder}", err=True)
        exit_code = run_baseline(config, BaselineMode(baseline.value), folder)
    if exit_code != EXIT_OK:
        if exit_code in _RESUMABLE:
            typer.echo("wan-diloco: a baseline can't be resumed: the same command begins it anew", err=True)
        raise typer.Exit(exit_code)
    _print_result(folder, as_json=as_json)


def _announcement(config: RunConfig, baseline: Baseline) -> str:
    """What a baseline trains on, which is what its result must be compared by."""
    from wan_diloco.learner.baseline import BaselineMode, baseline_tokens

    whole = format_count(baseline_tokens(config, BaselineMode.DATA_PARALLEL))
    if baseline is Baseline.DATA_PARALLEL:
        return f"training data-parallel over {len(config.regions)} regions on all {whole} tokens of the run"
    share = format_count(baseline_tokens(config, BaselineMode.ALONE))
    return f"training {config.regions[0].name} alone on its share of the tokens: {share}, of the run's {whole}"


def _readable(key: str, value: Any) -> Any:
    if value is None:
        return None
    if key in {"tokens_trained", "tokens"}:
        return format_count(value)
    return format_duration(value) if key == "wall_s" else value
