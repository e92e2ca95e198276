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
    "print_warning",
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
    from wan_diloco.config import load_config, process_environment

    loaded = load_config(files, env=process_environment(), overrides=overrides or ())
    for warning in loaded.warnings:
        print_warning(warning)
    return loaded
