"""What may differ between two starts of one run, and what a run keeps for good.

A run is one experiment: what shapes the model stays as it was at the start, and so does which text is whose, since
nobody may read a unit that was another's. For whom rounds wait, how bytes travel, and who takes part may change.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wan_diloco.config.schema import RunConfig

__all__ = ["FREE_KEYS", "check_shards", "keep_shards", "require_resumable"]

FRAGMENTS_KEY: Final = "sync.fragments"
_REGIONS_KEY: Final = "regions"
_SHARDS_KEY: Final = "data.shards"

FREE_KEYS: Final = frozenset(
    {
        "sync.grace_safety",
        "sync.membership_lease",
        "sync.overwritten_steps_max",
        "sync.quorum",
        "wire.chunk_bytes",
        "wire.zstd",
    }
)
"""Settings that all sides share at any time, and that may be others at the next start."""


def require_resumable(
    now: Iterable[tuple[str, str]], before: Mapping[str, str], *, refragment: bool, folder: str
) -> None:
    """See that a run can go on with other settings than it had.

    Args:
        now: The agreement of the configuration that it is to go on with.
        before: What it had.
        refragment: Whether it may be cut into another number of fragments.
        folder: Where the run is, for people.

    Raises:
        ConfigError: It can't; the text says what to do.
    """
    for key, mine in now:
        theirs = before.get(key)
        if theirs == mine or key in FREE_KEYS:
            continue
        if key == _REGIONS_KEY and theirs is not None:
            check_shards(json.loads(mine), json.loads(theirs))
        elif key == FRAGMENTS_KEY:
            if not refragment:
                raise ConfigError(
                    f"is {mine} now, and the run in {folder} has {theirs}",
                    where=key,
                    hint="change it back, or give --refragment to cut its values and momentum anew; work under way is "
                    "then discarded",
                )
        elif key == _SHARDS_KEY:
            raise ConfigError(
                f"is {mine} now, and the run in {folder} was begun with {theirs}, which is for good",
                where=key,
                hint=f"set it to {theirs}; a region that is added needs one that was spare, and one that goes keeps "
                "its own",
            )
        else:
            raise ConfigError(
                f"is {mine} now, and the run in {folder} was begun with {theirs}",
                where=key,
                hint="change it back, or begin another run in another --run-folder",
            )


def check_shards(now: Mapping[str, int], had: Mapping[str, int]) -> None:
    """See that nobody gets a shard that is or was another's, or another than it had.

    Args:
        now: Each region's.
        had: That of each region that ever took part, as far as it is known.

    Raises:
        ConfigError: Somebody does.
    """
    owners = {shard: name for name, shard in had.items()}
    for name, shard in now.items():
        if name in had and had[name] != shard:
            raise ConfigError(
                f"is {shard} now, and was {had[name]}: {name} would read anew, and skip, what it hasn't to",
                where=f"regions.{name}.shard",
                hint=f"set it to {had[name]}",
            )
        if name not in had and shard in owners:
            raise ConfigError(
                f"is {shard}, which is {owners[shard]}'s for good: its text would be read twice",
                where=f"regions.{name}.shard",
                hint=f"set it to one that nobody had, or call the region {owners[shard]}",
            )


def keep_shards(config: RunConfig, had: Mapping[str, int], num_shards: int) -> RunConfig:
    """A configuration in which shards that aren't given are those that the run has already, by the regions' names.

    Args:
        config: What the run is to go on with.
        had: The shard of each region that ever took part, as far as it is known.
        num_shards: Into how many the run's text was cut.

    Raises:
        ConfigError: No shard is left for a region that is new.
    """
    num_shards = config.data.shards or num_shards
    shards = {region.name: region.shard for region in config.regions if region.shard >= 0}
    for region in config.regions:
        if region.name in had:
            shards.setdefault(region.name, had[region.name])
    free = sorted(set(range(num_shards)) - {*had.values(), *shards.values()})
    for region in config.regions:
        if region.name in shards:
            continue
        if not free:
            raise ConfigError(
                f"no shard is left for it: the run's text was cut into {num_shards}, and each is a region's",
                where=f"regions.{region.name}",
                hint="leave it out, or call it like one that is gone; a run that may grow is begun with more "
                "data.shards than regions",
            )
        shards[region.name] = free.pop(0)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"shards": num_shards}),
            "regions": tuple(region.model_copy(update={"shard": shards[region.name]}) for region in config.regions),
        }
    )
