"""Writes a resolved configuration as TOML that reads back to the same configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wan_diloco.config.schema import RunConfig

__all__ = ["render_toml"]


def render_toml(config: RunConfig, sources: Mapping[str, str] | None = None) -> str:
    """Every setting, one a line.

    Args:
        config: What to write.
        sources: Dotted key -> layer; given, each line ends in a comment that names the layer.
    """
    return "\n".join(_lines(config.model_dump(mode="json", by_alias=True), sources or {})) + "\n"


def _lines(tree: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    for section, table in tree.items():
        for entry in table if isinstance(table, list) else [table]:
            region = isinstance(table, list)
            label = f"{section}.{entry['name']}" if region else section
            yield f"[[{section}]]" if region else f"[{section}]"
            yield from (_line(key, value, sources.get(f"{label}.{key}", "")) for key, value in entry.items())
            yield ""


def _line(key: str, value: object, source: str) -> str:
    # a JSON value of these kinds (text, number, boolean, list of text) is the same value in TOML
    line = f"{key} = {json.dumps(value)}"
    return f"{line:<40}  # {source}" if source else line
