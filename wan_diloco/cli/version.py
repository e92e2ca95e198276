"""`wan-diloco version`: what is installed."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import typer

from wan_diloco.cli.options import JsonFlag

__all__ = ["register"]

_PACKAGES = ("wan-diloco", "torch", "grpcio", "protobuf", "numba", "zstandard")
"""What a report of a problem should name; read from the packages' metadata, nothing is imported."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco version --json")(version)


def version(*, as_json: JsonFlag = False) -> None:
    """Print the versions that results depend on."""
    versions = {name: _installed(name) for name in _PACKAGES} | {"python": platform.python_version()}
    if as_json:
        typer.echo(json.dumps(versions, indent=2))
    else:
        for name, value in versions.items():
            typer.echo(f"{name:<12} {value}")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
