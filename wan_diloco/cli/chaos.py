"""`wan-diloco chaos`: a run like any other, and faults that befall it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from wan_diloco.cli.folders import check_folder
from wan_diloco.cli.options import ConfigFiles, JsonFlag, Overrides, folder_path, load, read_duration
from wan_diloco.cli.preflight import check_data, check_memory, check_port, check_regions
from wan_diloco.errors import EXIT_INTERNAL, EXIT_OK, UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from wan_diloco.cli.supervise import Outcome, Supervisor
    from wan_diloco.config import FaultKind, FaultSchedule, RunConfig
    from wan_diloco.lab.chaos_scene import Scene
    from wan_diloco.lab.small_disk import DiskPlan

__all__ = ["chaos", "register"]

# A small disk holds several snapshots and segments of the journal, and a checkpoint of each learner.
_DISK_BYTES_MIN: Final = 512 * 2**20
_DISK_MODELS: Final = 64
_PARAMETER_BYTES: Final = 4


class _Supervised:
    """A supervisor as the laboratory knows one."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._keepers = {keeper.spec.name: keeper for keeper in (supervisor.syncer, *supervisor.learners)}

    @property
    def decided(self) -> asyncio.Event:
        return self._supervisor.decided

    def guardian(self, name: str) -> int | None:
        return self._keepers[name].pid

    def hold(self, regions: frozenset[str]) -> None:
        self._supervisor.held.update(regions)

    def release(self, region: str) -> None:
        self._supervisor.held.discard(region)

    def skew(self, name: str, offset_s: float) -> None:
        from wan_diloco.lab.skewed_clock import skewed

        self._keepers[name].prefix = skewed(offset_s)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco chaos deploy/demo.toml --random --seed 7")(chaos)


def chaos(
    files: ConfigFiles,
    overrides: Overrides = None,
    *,
    schedule: Annotated[
        Path | None, typer.Option("--schedule", metavar="FILE", help="Faults to give, in TOML or JSON.")
    ] = None,
    at_random: Annotated[bool, typer.Option("--random", help="Draw faults from a seed.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="What --random draws from.")] = 1,
    duration: Annotated[
        str, typer.Option("--duration", metavar="TIME", help="Over which --random spreads faults.")
    ] = "5min",
    faults: Annotated[
        int,
        typer.Option(
            "--faults",
            min=1,
            help="How many --random draws: one at least of each sort that this machine can do, of 15 sorts.",
        ),
    ] = 20,
    run_folder: Annotated[
        Path | None,
        typer.Option(
            "--run-folder", metavar="DIR", parser=folder_path, help="Where to keep the run, instead of run.folder."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train as `run` does, while processes die, links break and the disk fills up.

    Each region reaches the syncer through a proxy. Faults count from the run's first step; the run goes on to its own
    end. What befell it and what it cost is in DIR/chaos.json and in the report, and the faults in
    DIR/chaos-schedule.json, to be given again. Exit code 70: something was lost or counted twice, or the run wasn't
    watched to its end.
    """
    if at_random == (schedule is not None):
        raise UsageError("give either --schedule FILE or --random")
    config = load(files, overrides).config
    folder = run_folder or config.run.folder_path
    check_folder(config, folder, resume=False)
    check_regions(config)

    from wan_diloco.lab.small_disk import plan_disk

    disk = plan_disk(folder)
    without = _without(disk)
    chosen = _chosen(config, schedule, seed=seed, duration=duration, num_faults=faults, without=without)
    check_memory(config, learners=len(config.regions), syncers=1)
    check_port(config)
    check_data(config)
    outcome, report = _befall(config, folder, chosen, disk, without, files, overrides)
    if outcome.problem:
        typer.echo(f"wan-diloco: {outcome.problem}", err=True)
    _print(report, folder, as_json=as_json)
    if outcome.exit_code != EXIT_OK:
        raise typer.Exit(outcome.exit_code)

    from wan_diloco.cli.run import require_merged
    from wan_diloco.lab.chaos_report import is_sound

    sound = is_sound(report)
    if not sound:
        typer.echo("wan-diloco: something was lost or counted twice", err=True)
    if not sound or report["unwatched"]:
        raise typer.Exit(EXIT_INTERNAL)
    require_merged(folder)


def _without(disk: DiskPlan) -> dict[FaultKind, str]:
    """What this machine can't do, and why."""
    from wan_diloco.config import FaultKind
    from wan_diloco.lab.skewed_clock import why_no_skew

    reasons = {FaultKind.FULL_DISK: disk.why_not, FaultKind.SKEW: why_no_skew()}
    return {kind: reason for kind, reason in reasons.items() if reason}


def _chosen(
    config: RunConfig,
    path: Path | None,
    *,
    seed: int,
    duration: str,
    num_faults: int,
    without: Mapping[FaultKind, str],
) -> FaultSchedule:
    """The faults that were asked for."""
    import random

    from wan_diloco.config import FaultKind, check_schedule, load_schedule
    from wan_diloco.lab.chaos_draw import draw_schedule

    names = [region.name for region in config.regions]
    if path is None:
        return draw_schedule(
            random.Random(seed),
            seed=seed,
            regions=names,
            quorum=config.sync.quorum,
            duration_s=read_duration(duration, "--duration", least="1s"),
            num_faults=num_faults,
            without=without,
        )
    schedule = load_schedule(path)
    check_schedule(schedule, names, config.sync.quorum, str(path))
    for fault in schedule.faults:
        if fault.kind in without and fault.kind is not FaultKind.FULL_DISK:
            raise UsageError(f"{fault.kind.value} can't be done here: {without[fault.kind]}")
    return schedule


def _befall(
    config: RunConfig,
    folder: Path,
    schedule: FaultSchedule,
    disk: DiskPlan,
    without: Mapping[FaultKind, str],
    files: list[Path],
    overrides: list[str] | None,
) -> tuple[Outcome, dict[str, Any]]:
    """The run, from its folder's creation to its reports."""
    from wan_diloco.config import FaultKind
    from wan_diloco.lab.chaos_report import SCHEDULE_FILE
    from wan_diloco.lab.chaos_scene import Scene
    from wan_diloco.lab.small_disk import SmallDisk
    from wan_diloco.storage import write_text
    from wan_diloco.storage.filesystem import ensure_folder

    fills = any(fault.kind is FaultKind.FULL_DISK for fault in schedule.faults)
    with ExitStack() as stack:
        ensure_folder(folder)
        if fills and disk.mount:
            size_bytes = max(_DISK_BYTES_MIN, _DISK_MODELS * _PARAMETER_BYTES * config.model.num_parameters)
            stack.enter_context(SmallDisk(folder, size_bytes))
        write_text(folder / SCHEDULE_FILE, schedule.to_json())
        scene = Scene(config, folder, schedule, fills=fills and not disk.why_not)
        outcome = _run(scene, folder, lambda: scene.routed(load(files, overrides).config))
    report = _conclude(scene, folder, disk.how, {kind.value: reason for kind, reason in without.items()})
    return outcome, report


def _run(scene: Scene, folder: Path, reload: Any) -> Outcome:
    import random

    from rich.console import Console

    from wan_diloco.cli.launch import launch
    from wan_diloco.cli.progress import make_display
    from wan_diloco.clock import SystemClock
    from wan_diloco.config import process_environment

    clock = SystemClock()
    display = make_display(Console(stderr=True), clock)

    async def beside(supervisor: Supervisor) -> None:
        await scene.play(_Supervised(supervisor), lambda text: display.say(f"wan-diloco: {text}"))

    return launch(
        scene.config,
        folder,
        resume=False,
        display=display,
        env=process_environment(),
        clock=clock,
        rng=random.Random(),
        load=reload,
        beside=beside,
    )


def _conclude(scene: Scene, folder: Path, disk: str, without: Mapping[str, str]) -> dict[str, Any]:
    """Write `chaos.json`, and add to the summary and the report of the run."""
    from wan_diloco.lab.chaos_report import CHAOS_FILE, chaos_report, summary_additions
    from wan_diloco.lab.tape_audit import audit_tape
    from wan_diloco.storage import read_json, write_json, write_text
    from wan_diloco.telemetry import SUMMARY_FILE
    from wan_diloco.telemetry.report import render_report

    summary_path, tape = folder / SUMMARY_FILE, folder / "tape.jsonl"
    summary = read_json(summary_path) if summary_path.exists() else {}
    report = chaos_report(
        seed=scene.schedule.seed,
        regions=[region.name for region in scene.config.regions],
        quorum=scene.config.sync.quorum,
        install=scene.config.sync.install,
        befallen=scene.befallen,
        seen=scene.seen,
        audit=audit_tape(tape.read_bytes().splitlines() if tape.exists() else ()),
        links=scene.counts,
        summary=summary,
        disk=disk,
        without=without,
        unwatched=scene.problem,
    )
    write_json(folder / CHAOS_FILE, report)
    if summary:
        write_json(summary_path, summary | summary_additions(report))
        write_text(folder / "report.html", render_report(folder))
    return report


def _print(report: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    from wan_diloco.lab.chaos_report import CHAOS_FILE, chaos_text

    typer.echo(chaos_text(report))
    typer.echo(f"{'chaos':<18}{folder / CHAOS_FILE}")
    if (folder / "report.html").exists():
        typer.echo(f"{'report':<18}{folder / 'report.html'}")
