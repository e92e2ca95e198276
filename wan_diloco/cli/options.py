"""Options that several commands share, so that they mean the same everywhere, and what reads them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wan_diloco.config import LoadedConfig

__all__ = [
    "ConfigFiles",
    "JsonFlag",
    "Overrides",
    "RefragmentFlag",
    "RunFolder",
    "folder_path",
    "hold_reloads",
    "load",
    "peer_address",
    "print_warning",
    "read_duration",
]

ConfigFiles = Annotated[
    list[Path], typer.Argument(metavar="CONFIG", help="TOML files; a later one is laid over the earlier.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one value, over files and WAN_DILOCO_SECTION__KEY."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RefragmentFlag = Annotated[
    bool,
    typer.Option(
        "--refragment", help="With --resume: cut the values anew where sync.fragments differs; work under way is lost."
    ),
]


def folder_path(text: str) -> Path:
    """A folder as it was given.

    Raises:
        BadParameter: It is empty, which `Path` takes for the current folder: a variable that isn't set, most likely.
    """
    if not text:
        raise typer.BadParameter("it is empty; write . for the current folder")
    return Path(text)


def read_duration(text: str, option: str, *, least: str, most: str = "1d") -> float:
    """Seconds of a duration that an option was given.

    Args:
        text: As it was given.
        option: Its name, for people.
        least: The shortest that makes sense.
        most: The longest.

    Raises:
        UsageError: It isn't written like one, or makes no sense.
    """
    from wan_diloco.errors import UnitError, UsageError
    from wan_diloco.units import parse_duration

    try:
        duration_s = parse_duration(text)
    except UnitError as error:
        raise UsageError(f"{option}: {error}") from error
    if not parse_duration(least) <= duration_s <= parse_duration(most):
        raise UsageError(f"{option} must be from {least} to {most}, not {text}")
    return duration_s


def peer_address(text: str) -> str:
    """Where somebody is to be found, as it was given.

    Raises:
        BadParameter: It is no address: whoever looks for it would look for ever.
    """
    from wan_diloco.config.addresses import why_no_address

    if problem := why_no_address(text):
        raise typer.BadParameter(f"{text!r} isn't an address: {problem}; write it like 10.0.0.1:7000")
    return text


RunFolder = Annotated[
    Path,
    typer.Option(
        "--run-folder", metavar="DIR", parser=folder_path, help="Where the run keeps its files; created if missing."
    ),
]


def print_warning(text: str) -> None:
    """Say one line on stderr."""
    typer.echo(f"wan-diloco: warning: {text}", err=True)


def hold_reloads() -> None:
    """Have a SIGHUP that comes while the process starts wait until it can be obeyed: it would end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])


def load(files: Sequence[Path], overrides: Sequence[str] | None) -> LoadedConfig:
    """The configuration that a command was given; its warnings go to stderr.

    Raises:
        ConfigError: It can't be used.
    """
    from wan_diloco.config import load_config, process_environment, quiet_grpc

    # Every command that talks to anybody comes by here first.
    quiet_grpc()
    loaded = load_config(files, env=process_environment(), overrides=overrides or ())
    for warning in loaded.warnings:
        print_warning(warning)
    return loaded
