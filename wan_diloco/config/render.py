"""Writes for people and tools: a resolved configuration as TOML, and the JSON schema of all configurations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from wan_diloco.config.schema import RegionSettings, RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

__all__ = ["json_schema", "render_toml"]


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


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, with defaults in the form in which they are written."""
    schema = RunConfig.model_json_schema(by_alias=True)
    for section, field in RunConfig.model_fields.items():
        # pydantic shows the default of a whole section in base units; those of its settings say it better
        schema["properties"][section].pop("default", None)
        model: Any = RegionSettings if section == "regions" else field.annotation
        described = schema["$defs"][model.__name__]["properties"]
        for key, value in _written_defaults(model).items():
            described[key]["default"] = value
    return schema


def _written_defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Written key -> default, of the settings that have one."""
    optional = {name: field for name, field in model.model_fields.items() if not field.is_required()}
    defaults = model.model_construct(**{name: field.default for name, field in optional.items()})
    written = defaults.model_dump(mode="json", by_alias=True, include=set(optional))
    return {field.alias or name: written[field.alias or name] for name, field in optional.items()}
