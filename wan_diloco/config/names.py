"""The names of all settings, and the nearest right name for a wrong one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from wan_diloco.config.schema import RegionSettings, RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic import BaseModel

__all__ = ["SETTINGS", "is_text", "nearest", "suggest"]


def _written_keys(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    section: _written_keys(RegionSettings if section == "regions" else field.annotation)  # type: ignore[arg-type]
    for section, field in RunConfig.model_fields.items()
}
"""Section -> written key -> type, in the order of the schema."""


def is_text(section: str, key: str) -> bool:
    """Whether the setting is text as it stands, so that `--set run.name=5` means the text "5"."""
    kind = SETTINGS.get(section, {}).get(key)
    return kind is str or (get_origin(kind) is Literal and all(isinstance(value, str) for value in get_args(kind)))


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that looks most like the word, or "" when none does."""
    matches = get_close_matches(word, list(names), n=1)
    return matches[0] if matches else ""


def suggest(section: str, key: str) -> str:
    """A hint for an unknown key; `section` is "" for a key outside all tables, or for an unknown table."""
    elsewhere = [f"{other}.{key}" for other, keys in SETTINGS.items() if other != section and key in keys]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}"
    if section in SETTINGS and (own := nearest(key, SETTINGS[section])):
        return f"did you mean {section}.{own}"
    everything = {f"{other}_{name}": f"{other}.{name}" for other, keys in SETTINGS.items() for name in keys}
    if section not in SETTINGS:
        everything |= {name: f"[{name}]" for name in SETTINGS}
    if near := nearest(key, everything):
        return f"did you mean {everything[near]}"
    if section in SETTINGS:
        return f"[{section}] knows {', '.join(SETTINGS[section])}"
    return f"sections are {', '.join(SETTINGS)}"
