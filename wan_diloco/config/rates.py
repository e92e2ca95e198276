"""Which settings can change while a run goes on: the caps of links, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.config.quantities import rate_text
from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wan_diloco.config.schema import RunConfig

__all__ = ["Adopted", "LiveConfig", "adopt_rates"]

# By section, the settings' names in the schema and in files.
_OF_SYNCER: Final = {"ingress_bytes_per_s": "ingress", "egress_bytes_per_s": "egress"}
_NO_CAP: Final = rate_text(0.0)
# Whoever goes on with a run finds out what these are; a file that doesn't give them differs in nothing.
_OF_THE_RUN: Final = {"data.shards": 0, "regions.shard": -1}
_OF_REGION: Final = {"uplink_bytes_per_s": "uplink", "downlink_bytes_per_s": "downlink"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What a newer configuration changes in one that is in force.

    Attributes:
        config: The one in force from now on.
        changed: One sentence a rate.
        ignored: One sentence a setting that differs and stays as it is: until the next start, or for good.
    """

    config: RunConfig
    changed: tuple[str, ...]
    ignored: tuple[str, ...]


def adopt_rates(current: RunConfig, newer: RunConfig) -> Adopted:
    """Take the rates of a newer configuration, and nothing else of it."""
    regions = {region.name: region for region in newer.regions}
    config = current.model_copy(
        update={
            "syncer": current.syncer.model_copy(update={key: getattr(newer.syncer, key) for key in _OF_SYNCER}),
            "regions": tuple(
                region.model_copy(update={key: getattr(regions[region.name], key) for key in _OF_REGION})
                if region.name in regions
                else region
                for region in current.regions
            ),
            "unlisted": current.unlisted.model_copy(update={key: getattr(newer.unlisted, key) for key in _OF_REGION}),
        }
    )
    before, now, wished = (dict(_written(one)) for one in (current, config, newer))
    return Adopted(
        config=config,
        changed=tuple(
            f"{key} is {_said(now[key])} now, was {_said(before[key])}" for key in now if now[key] != before[key]
        ),
        ignored=(*_other_regions(current, newer), *_other_settings(current, now, wished)),
    )


def _said(rate: str) -> str:
    return f"{rate} (no cap)" if rate == _NO_CAP else rate


def _other_regions(current: RunConfig, newer: RunConfig) -> Iterator[str]:
    before, after = ([region.name for region in config.regions] for config in (current, newer))
    for name in before:
        if name not in after:
            yield f"region {name} is missing in the configuration, and goes on as it is until the next start"
    for name in after:
        if name not in before:
            yield f"region {name} is new in the configuration, and doesn't take part before the next start"


def _other_settings(current: RunConfig, now: dict[str, Any], wished: dict[str, Any]) -> Iterator[str]:
    fixed = {key for key, _ in current.agreement()}
    for key, value in now.items():
        # Of a region that is in one of them only there is a sentence already.
        if key in wished and value != wished[key] and wished[key] != _OF_THE_RUN.get(_setting(key), value):
            until = "a run that was begun keeps it" if key in fixed else "it stays as it is until the next start"
            yield f"{key} differs in the configuration: {until}"


class LiveConfig:
    """A configuration whose rates may change, for whoever owns a process.

    Args:
        config: In force at the start.
        load: Reads it again.
        say: Told what changed, what is ignored, and why it can't be read; one sentence each.

    Attributes:
        config: In force now.
    """

    def __init__(self, config: RunConfig, load: Callable[[], RunConfig], say: Callable[[str], None]) -> None:
        """Nothing has changed."""
        self.config = config
        self._load = load
        self._say = say

    def reload(self) -> bool:
        """Read the configuration again; returns whether a rate changed."""
        try:
            adopted = adopt_rates(self.config, self._load())
        except ConfigError as exc:
            self._say(f"the configuration stays as it was: {exc}")
            return False
        for sentence in (*adopted.changed, *adopted.ignored):
            self._say(sentence)
        if not adopted.changed and not adopted.ignored:
            self._say("the configuration was read again; no rate differs")
        self.config = adopted.config
        return bool(adopted.changed)


def _setting(key: str) -> str:
    section, _, rest = key.partition(".")
    return f"{section}.{rest.rpartition('.')[2]}"


def _written(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Dotted key and written value of every setting."""
    for section, table in config.model_dump(mode="json", by_alias=True).items():
        entries = table if isinstance(table, list) else [table]
        for entry in entries:
            label = f"{section}.{entry['name']}" if isinstance(table, list) else section
            yield from ((f"{label}.{key}", value) for key, value in entry.items())
