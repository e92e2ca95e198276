"""Reads a configuration in layers: defaults, files, environment, flags; each value remembers its layer.

Tables merge key by key, left to right; a list, `[[regions]]` too, replaces the list before it. Single
regions are then reached by name: `--set regions.us-east.uplink=50mbit`, `WAN_DILOCO_REGIONS__US_EAST__UPLINK`.
"""

from __future__ import annotations

import json
import stat
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from wan_diloco.config.environment import PREFIX
from wan_diloco.config.explain import explain, region_label
from wan_diloco.config.names import SETTINGS, is_text, nearest, suggest
from wan_diloco.config.relations import ignored_settings
from wan_diloco.config.schema import RunConfig
from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

__all__ = ["LoadedConfig", "load_config", "load_stored", "parse_config", "read_table"]

DEFAULT_SOURCE: Final = "default"
COMPUTED_SOURCE: Final = "computed"
_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A configuration is a page of text; a model given by mistake is refused unread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration and where it came from.

    Attributes:
        config: What is in force.
        sources: Dotted key ("sync.quorum", "regions.us-east.uplink") -> "default", "computed" (from other
            settings), "file PATH", "env NAME" or "flag --set"; one entry for every setting.
        warnings: Settings without effect, one sentence each, for the caller to show.
    """

    config: RunConfig
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """A configuration from nested plain values, in the form that TOML has.

    Raises:
        ConfigError: A key is unknown, a value is refused, or a relation is broken.
    """
    return _validated(tree, {})


def load_config(paths: Sequence[Path], *, env: Mapping[str, str], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Merge all layers and check the result.

    Args:
        paths: TOML files, or JSON ones as `resolved_json` writes them; later ones win.
        env: Environment variables; those called `WAN_DILOCO_SECTION__KEY` count.
        overrides: `section.key=value`, as given to `--set`; the last one wins.

    Raises:
        ConfigError: A file can't be read, a key is unknown, a value is refused, or a relation is broken.
    """
    layers = _Layers()
    for path in paths:
        layers.merge(read_table(path), f"file {path}")
    for name, words, text in _environment_settings(env):
        layers.assign(words, text, f"env {name}")
    for override in overrides:
        name, equals, text = override.partition("=")
        words = name.strip().split(".")
        if not equals or len(words) < 2 or not all(words):
            raise ConfigError(f"{override!r} isn't section.key=value", where="--set")
        layers.assign(words, text.strip(), "flag --set")
    config = _validated(layers.tree, layers.sources)
    return LoadedConfig(
        config=config,
        sources=_all_sources(config, layers.sources),
        warnings=(*_near_misses(env), *ignored_settings(config)),
    )


def load_stored(path: Path) -> RunConfig:
    """The configuration that a process of a run wrote down for the others (`resolved_json`).

    Raises:
        ConfigError: It can't be read, or isn't one any more; the sentence names the file, which nobody gave.
    """
    table = read_table(path)
    try:
        return parse_config(table)
    except ConfigError as exc:
        raise ConfigError(
            f"what a run wrote here isn't a configuration any more: {exc}",
            where=str(path),
            hint="put back a copy of that file",
        ) from exc


def _validated(tree: Mapping[str, Any], sources: Mapping[str, str]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise explain(error, tree, sources) from error


class _Layers:
    """The tree that grows layer by layer; this object owns it."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def merge(self, table: Mapping[str, Any], source: str) -> None:
        """Lay a file's tables over what is there."""
        for section, value in table.items():
            if isinstance(value, dict):
                old = self.tree.get(section)
                self.tree[section] = {**old, **value} if isinstance(old, dict) else dict(value)
                self.sources |= {f"{section}.{key}": source for key in value}
            else:
                self.tree[section] = value
                self.sources[section] = source
            if section == "regions" and isinstance(value, list):
                self._own_regions(value, source)

    def _own_regions(self, regions: list[Any], source: str) -> None:
        self.sources = {key: old for key, old in self.sources.items() if not key.startswith("regions")}
        self.tree["regions"] = [dict(region) if isinstance(region, dict) else region for region in regions]
        for index, region in enumerate(regions):
            if isinstance(region, dict):
                label = region_label(regions, index)
                self.sources |= {f"{label}.{key}": source for key in region}

    def assign(self, words: Sequence[str], text: str, source: str) -> None:
        """Set one value from text.

        Raises:
            ConfigError: The name has the wrong number of parts, or names a region that isn't there.
        """
        name = ".".join(words)
        match words:
            case ("regions", region, key):
                table = self._region(region, source)
            case (section, key) if section != "regions":
                table = self.tree.setdefault(section, {})
            case ("regions", *_):
                raise ConfigError("name the region", where=name, hint=f"like regions.us-east.uplink; set by {source}")
            case _:
                raise ConfigError("isn't a setting", where=name, hint=f"{suggest('', words[-1])}; set by {source}")
        if not isinstance(table, dict):
            raise ConfigError("isn't in a table", where=name, hint=f"a file gives {words[0]} another form")
        table[key] = _value(words[0], key, text)
        self.sources[name] = source

    def _region(self, wanted: str, source: str) -> dict[str, Any]:
        regions = self.tree.get("regions")
        tables = [region for region in regions if isinstance(region, dict)] if isinstance(regions, list) else []
        for table in tables:
            if table.get("name") == wanted:
                return table
        names = [str(table.get("name")) for table in tables]
        near = nearest(wanted, names)
        hint = f"did you mean {near}" if near else f"regions are {', '.join(names) or 'none'}"
        raise ConfigError("no such region", where=f"regions.{wanted}", hint=f"{hint}; set by {source}")


def _value(section: str, key: str, text: str) -> object:
    """What a flag or a variable means: TOML where it is that, else the text itself ("10M", us-east, a path)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # more keys mean that the text had lines of its own
    if set(parsed) != {"value"} or (is_text(section, key) and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _environment_settings(env: Mapping[str, str]) -> Iterator[tuple[str, list[str], str]]:
    """Name, dotted words and text of every variable that is a setting, in a fixed order."""
    for name in sorted(env):
        if name.startswith(PREFIX) and "__" in name:
            words = name.removeprefix(PREFIX).lower().split("__")
            if words[0] == "regions" and len(words) == 3:
                # names of regions have no underscore, names of variables no hyphen
                words[1] = words[1].replace("_", "-")
            yield name, words, env[name]


def _near_misses(env: Mapping[str, str]) -> Iterator[str]:
    """Variables with one underscore too few: ignored, since orchestrators make such names of their own, but said."""
    settings = {f"{section}_{key}".upper(): (section, key) for section, keys in SETTINGS.items() for key in keys}
    for name in sorted(env):
        if name.removeprefix(PREFIX) in settings and name.startswith(PREFIX):
            section, key = settings[name.removeprefix(PREFIX)]
            yield f"{name} is ignored: did you mean {PREFIX}{section.upper()}__{key.upper()}"


def read_table(path: Path) -> dict[str, Any]:
    """What a file of TOML, or of JSON by its name, says.

    Raises:
        ConfigError: It can't be read, or says something else than a table.
    """
    try:
        status = path.stat()
        # A pipe or a device could keep us waiting, or never end.
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ConfigError("isn't a regular file", where=str(path))
        if status.st_size > _FILE_BYTES_MAX:
            raise ConfigError("is too large to be a configuration", where=str(path))
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"isn't UTF-8 at byte {error.start}", where=str(path)) from error
    try:
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"isn't JSON: {error}", where=f"{path}:{error.lineno}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"isn't TOML: {error}", where=str(path)) from error
    if not isinstance(table, dict):
        raise ConfigError("must be a table", where=str(path))
    return table


def _all_sources(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """The layer of every setting, in the order of the schema."""
    tables: list[tuple[str, BaseModel]] = [
        (section, getattr(config, section)) for section in SETTINGS if section != "regions"
    ]
    tables += [(f"regions.{region.name}", region) for region in config.regions]
    sources = {}
    for label, table in tables:
        for name, field in type(table).model_fields.items():
            key = f"{label}.{field.alias or name}"
            sources[key] = given.get(key) or _unset(table, name, field)
    return sources


def _unset(table: BaseModel, name: str, field: FieldInfo) -> str:
    """Where the value of a setting that nobody gave comes from: `hidden` follows from `dim`, for instance."""
    return DEFAULT_SOURCE if getattr(table, name) == field.get_default() else COMPUTED_SOURCE
