"""From a configuration to a learner's data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.data import BatchReader, encode_documents, load_corpus, shard_documents, split_corpus
from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from wan_diloco.config import RunConfig

__all__ = ["held_out_tokens", "open_shard", "region_index"]


def region_index(config: RunConfig, name: str) -> int:
    """The place of a region in the configured order.

    Raises:
        ConfigError: There is no such region.
    """
    names = [region.name for region in config.regions]
    if name not in names:
        raise ConfigError(f"there is no region {name!r}", where="--region", hint=f"one of {', '.join(names)}")
    return names.index(name)


def open_shard(config: RunConfig, index: int) -> BatchReader:
    """The batches of one region's shard; a unit is the batch of one step of the whole region.

    Args:
        config: The run.
        index: Of the region, in the configured order.

    Raises:
        DataError: The corpus can't be read, or is too small for its shards.
    """
    num_shards, shard = config.num_shards, config.shards[config.regions[index].name]
    documents = split_corpus(load_corpus(config.data.source)).training
    return BatchReader(
        encode_documents(shard_documents(documents, num_shards, config.data.split)[shard]),
        sequence_length=config.model.sequence_length,
        batch_size=config.inner.batch_tokens // config.model.sequence_length,
        seed=config.run.seed * num_shards + shard,
    )


def held_out_tokens(config: RunConfig) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The validation and the test set, as tokens.

    Raises:
        DataError: The corpus can't be read, or is too small.
    """
    split = split_corpus(load_corpus(config.data.source))
    return encode_documents(split.validation), encode_documents(split.test)
