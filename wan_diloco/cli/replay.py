"""`wan-diloco replay`: proves that a run's published versions are what its journal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wan_diloco.cli.folders import Holding, what_is_in
from wan_diloco.cli.options import JsonFlag, folder_path, print_warning
from wan_diloco.errors import EXIT_INTERNAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wan_diloco.syncer.proof import ReplayReport
    from wan_diloco.syncer.replay import Difference

__all__ = ["register", "replay"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco replay runs/sotu")(replay)


def replay(
    run_folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_FOLDER", parser=folder_path, help="The folder of a run, finished or interrupted."),
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Do a run's merges again, and compare the bits.

    Every version that was published since the oldest snapshot that is kept, or since the beginning with
    `syncer.journal_retention = "all"`, is merged once more from the contributions in the journal, and compared with
    what the journal and the snapshots say. Nothing is written. `tape.jsonl` isn't looked at: it is a copy of the
    journal's decisions for people to read.

    The exit code is 70 where other bits come out, and 78 where it can't be told: what is needed is damaged, a
    snapshot, or what else the folder says was published, is ahead of what is left of the journal, or config.json isn't
    the one that the run began with.
    """
    from wan_diloco.config import load_stored
    from wan_diloco.errors import ConfigError, StateDamaged
    from wan_diloco.syncer.proof import WHOLE_JOURNAL_HELP, replay_run

    holding = what_is_in(run_folder)
    if holding not in (Holding.RUN, Holding.FINISHED_RUN) or not (run_folder / "config.json").is_file():
        raise ConfigError("there is no run in this folder", where=str(run_folder))
    report = replay_run(run_folder, load_stored(run_folder / "config.json"))
    for note in report.notes:
        print_warning(note)
    typer.echo(json.dumps(_as_json(report), indent=2) if as_json else _as_text(report))
    if report.difference is not None:
        raise typer.Exit(EXIT_INTERNAL)
    if report.ahead:
        are, they = ("is", "it holds") if len(report.ahead) == 1 else ("are", "they hold")
        raise StateDamaged(
            f"{_named(report.ahead)} {are} ahead of what is left of the journal, so that what {they} can't be checked. "
            f"{WHOLE_JOURNAL_HELP}"
        )
    if report.beyond:
        raise StateDamaged(f"the journal ends too early: {'; '.join(report.beyond)}. {WHOLE_JOURNAL_HELP}")


def _as_text(report: ReplayReport) -> str:
    spans = [
        f"fragment {index}: {begin} to {end}"
        for index, (begin, end) in enumerate(zip(report.begun, report.reached, strict=True))
    ]
    if report.difference is not None:
        lines = [_spelled(report.difference), f"the same before that, since {report.since}"]
    else:
        head = "the same bits" if report.proven else "the same bits, as far as the journal goes"
        lines = [f"{head}: {report.versions} versions of {len(spans)} fragments since {report.since}"]
    if report.snapshots:
        lines.append(f"compared with the same result: {_named(report.snapshots)}")
    return "\n".join([*lines, *report.remarks, "done again, as epoch.version:", *spans])


def _named(snapshots: Sequence[str]) -> str:
    return f"snapshot{'s' if len(snapshots) > 1 else ''} {', '.join(snapshots)}"


def _spelled(difference: Difference) -> str:
    of = {
        "merge": "merging again gives",
        "publication": "the stored update gives",
    }.get(difference.what, f"the {difference.what} value, which {difference.where} has, is now")
    versions = f"version {difference.from_version} to {difference.to_version}"
    return (
        f"other bits: round {difference.round_id}, fragment {difference.fragment_id}, {versions}: "
        f"{of} {difference.found}, and it should be {difference.expected}"
    )


def _as_json(report: ReplayReport) -> dict[str, Any]:
    difference = report.difference
    return {
        "equal": report.proven,
        "versions": report.versions,
        "since": report.since,
        "fragments": [
            {"fragment": index, "from": str(begin), "to": str(end)}
            for index, (begin, end) in enumerate(zip(report.begun, report.reached, strict=True))
        ],
        "snapshots": list(report.snapshots),
        "snapshots_ahead": list(report.ahead),
        "beyond": list(report.beyond),
        "difference": None
        if difference is None
        else {
            "what": difference.what,
            "where": difference.where,
            "round": difference.round_id,
            "fragment": difference.fragment_id,
            "from": str(difference.from_version),
            "to": str(difference.to_version),
            "expected": difference.expected,
            "found": difference.found,
        },
        "notes": [*report.remarks, *report.notes],
    }
