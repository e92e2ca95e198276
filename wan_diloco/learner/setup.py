"""From a configuration to a learner's settings and data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.data import BatchReader, encode_documents, load_corpus, shard_documents, split_corpus
from wan_diloco.errors import ConfigError
from wan_diloco.units import ShardId

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from wan_diloco.config import RegionSettings, RunConfig

__all__ = ["DataShards", "held_out_tokens", "learner_region", "open_shard"]


def learner_region(config: RunConfig, name: str) -> RegionSettings:
    """The settings of a learner by its name; those of `[unlisted]` where it isn't listed and others may take part.

    Raises:
        ConfigError: It may not.
    """
    try:
        return config.region(name)
    except KeyError:
        names = ", ".join(region.name for region in config.regions)
        others = "" if config.unlisted.learners_max else "; unlisted.learners_max lets others take part"
        raise ConfigError(f"there is no region {name!r}", where="--region", hint=f"one of {names}{others}") from None


def open_shard(config: RunConfig, shard: int) -> BatchReader:
    """The batches of one shard; a unit is the batch of one step of the whole region that reads it.

    Args:
        config: The run.
        shard: Which.

    Raises:
        DataError: The corpus can't be read, or is too small for its shards.
    """
    documents = split_corpus(load_corpus(config.data.source)).training
    return BatchReader(
        encode_documents(shard_documents(documents, config.num_shards, config.data.split)[shard]),
        sequence_length=config.model.sequence_length,
        batch_size=config.inner.batch_tokens // config.model.sequence_length,
        seed=config.run.seed * config.num_shards + shard,
    )


class DataShards:
    """The shards of a run's data, one of them open.

    A listed region's is known from the start. Which of the spare ones another learner reads the syncer says, and may
    say anew; until then the first of them stands for it, so that data which can't be read are found out before anything
    else.

    Owner: the training thread.

    Args:
        config: The run.
        region: The learner's name.

    Raises:
        DataError: The corpus can't be read, or is too small for its shards.
    """

    def __init__(self, config: RunConfig, region: str) -> None:
        """Open the likeliest."""
        self._config = config
        self._shard = ShardId(config.shards[region] if region in config.shards else config.spare_shards[0])
        self._units = open_shard(config, self._shard)

    def read(self, shard: ShardId) -> BatchReader:
        """The batches of a shard, in place of the one that was open.

        Raises:
            DataError: The corpus can't be read any more.
        """
        if shard != self._shard:
            self._units, self._shard = open_shard(self._config, shard), shard
        return self._units

    @property
    def units(self) -> BatchReader:
        """The batches of the shard that is open."""
        return self._units


def held_out_tokens(config: RunConfig) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The validation and the test set, as tokens.

    Raises:
        DataError: The corpus can't be read, or is too small.
    """
    split = split_corpus(load_corpus(config.data.source))
    return encode_documents(split.validation), encode_documents(split.test)
