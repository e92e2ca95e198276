"""`wan-diloco status`: how a run stands, asked of its syncer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from wan_diloco.cli.options import JsonFlag, folder_path, peer_address
from wan_diloco.cli.view import facts, view_of
from wan_diloco.errors import ConfigError, PeerUnavailable, TransportError, UsageError
from wan_diloco.units import format_count, format_duration, format_size

__all__ = ["register", "status", "status_text"]

_TIMEOUT_S: Final = 5.0
_COLUMNS: Final = (
    "learner",
    "state",
    "step",
    "behind",
    "merged",
    "tokens",
    "loss",
    "step time",
    "heard",
    "sent",
    "recv",
)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco status --run-folder runs/demo")(status)


def status(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST:PORT",
            parser=peer_address,
            help="Where the syncer is, instead of DIR/address.",
            show_default=False,
        ),
    ] = None,
    *,
    run_folder: Annotated[
        Path | None,
        typer.Option("--run-folder", metavar="DIR", parser=folder_path, help="The folder of a run on this machine."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say how a run that goes on stands.

    Its syncer is asked, and nothing is changed. "behind" is in steps of the run, "merged" the share of all rounds, and
    "heard" how long ago anything came from a learner. The exit code is 69 where no syncer answers.
    """
    if address is not None and run_folder is None:
        where = address
    elif address is None and run_folder is not None:
        where = _address_in(run_folder)
    else:
        raise UsageError("give either the address of a syncer or --run-folder")
    told = _fetch(where)
    typer.echo(json.dumps(told, indent=2) if as_json else status_text(told, where))


def status_text(told: Mapping[str, Any], where: str) -> str:
    """A syncer's answer for a person.

    Args:
        told: Whatever it lacks isn't said.
        where: The syncer's address.
    """
    from wan_diloco.cli.history import History

    processes = {"syncer": ("running", 0)}
    view = view_of(told, answering=True, processes=processes, history=History(), now_s=0.0)
    learners = {str(learner.get("learner_id")): learner for learner in told.get("learners") or ()}
    rows = [_COLUMNS]
    for region in view.regions:
        learner = learners[region.name]
        rows.append(
            (
                region.name,
                region.state,
                _said(region.local_step, str),
                _said(learner.get("behind_steps"), str),
                _said(_share(learner, told), "{:.0%}".format),
                _said(region.tokens, format_count),
                _said(region.loss, "{:.3f}".format),
                _said(region.step_time_s or None, format_duration),
                _said(learner.get("silent_s"), "{:.0f}s ago".format),
                _said(region.uplink_bytes, format_size),
                _said(region.downlink_bytes, format_size),
            )
        )
    open_, due = told.get("rounds_open") or (), told.get("rounds_due") or 0
    lines = [
        f"syncer {where}, term {_said(told.get('term'), str)}, epoch {_said(told.get('epoch'), str)}",
        ", ".join(facts(view)),
        f"rounds: {len(open_)} open, {due} due",
        "",
        *_table(rows),
        "",
    ]
    # What is said of an open round is said of nothing else.
    reasons = [f"fragment {item.get('fragment_id')}: {item['reason']}" for item in open_ if item.get("reason")]
    lines += [f"waits: {reason}" for reason in dict.fromkeys((*view.waiting, *reasons))]
    store: Mapping[str, Any] = told.get("store") or {}
    if store:
        newest, failures = store.get("newest_snapshot") or "no snapshot yet", store.get("failures") or 0
        lines.append(f"store: {store.get('place')} has {newest}; {failures} failures")
    # What peers and stores say must not be able to steer a terminal.
    return "\n".join("".join(filter(str.isprintable, line)).rstrip() for line in lines).rstrip()


def _fetch(where: str) -> dict[str, object]:
    import asyncio

    from wan_diloco.transport.grpc_client import fetch_status

    try:
        return asyncio.run(fetch_status(where, _TIMEOUT_S))
    except TransportError as exc:
        raise PeerUnavailable(f"no syncer answers at {where}: {exc}") from exc


def _address_in(run_folder: Path) -> str:
    path = run_folder / "address"
    try:
        return peer_address(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, NotADirectoryError) as exc:
        if not (run_folder / "state").is_dir():
            raise ConfigError("no syncer has a run in this folder", where=str(run_folder)) from exc
        raise PeerUnavailable(f"no syncer listens for the run in {run_folder}: there is no {path}") from exc
    except (OSError, UnicodeDecodeError, typer.BadParameter) as exc:
        raise ConfigError(f"says no address: {exc}", where=str(path)) from exc


def _share(learner: Mapping[str, Any], told: Mapping[str, Any]) -> float | None:
    merged, rounds = learner.get("merged_fresh"), told.get("rounds")
    return merged / rounds if merged is not None and rounds else None


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be; words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _said(value: Any, form: Any) -> str:
    return "-" if value is None else str(form(value))
