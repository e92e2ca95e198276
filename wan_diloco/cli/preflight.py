"""What can be known to be wrong with a run on this machine before anything of it is created; folders are apart.

Nothing here writes: a refused run leaves no trace.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import ConfigError, DataError

if TYPE_CHECKING:
    from wan_diloco.config import RunConfig

__all__ = ["check_data", "check_memory", "check_port", "check_regions", "check_source"]

_PROCESSES: Final = frozenset({"syncer", "evaluator"})
# The least that a parameter takes, in f32: of a learner the weight, its gradient, two moments, and three slots that it
# shares with its uplink; of the syncer the exact and the published value and the outer momentum; of a baseline's
# replica what a learner has without the slots.
_LEARNER_BYTES: Final = 28
_SYNCER_BYTES: Final = 12
_REPLICA_BYTES: Final = 16
# Of a token in a forward and backward pass, for each entry of the vocabulary: a logit and its gradient.
_TOKEN_BYTES: Final = 8


def check_regions(config: RunConfig) -> None:
    """See that the regions can be told apart from other processes, and trained here.

    Raises:
        ConfigError: A region has the name of another process, or more ranks than a learner can have.
    """
    for region in config.regions:
        if region.name in _PROCESSES:
            raise ConfigError(
                "on one machine this is the name of another process", where=f"regions.{region.name}", hint="rename it"
            )
        if region.ranks > 1:
            raise ConfigError("a region trains with one rank", where=f"regions.{region.name}.ranks", hint="set it to 1")
    if config.unlisted.ranks > 1:
        raise ConfigError("a region trains with one rank", where="unlisted.ranks", hint="set it to 1")


def check_memory(config: RunConfig, *, learners: int = 0, syncers: int = 0, replicas: int = 0) -> None:
    """See that the model fits into the memory that this machine has to spare.

    What is counted is the least that is needed, so that nothing is refused which might just fit.

    Args:
        config: The run's.
        learners: That are to train on this machine.
        syncers: That are to merge on it.
        replicas: Of a baseline, that are to train on it.

    Raises:
        ConfigError: It doesn't fit.
    """
    import psutil

    from wan_diloco.units import format_count, format_size

    available_bytes = psutil.virtual_memory().available
    parameters = config.model.num_parameters
    model_bytes = parameters * (_LEARNER_BYTES * learners + _SYNCER_BYTES * syncers + _REPLICA_BYTES * replicas)
    if model_bytes > available_bytes:
        raise ConfigError(
            f"{format_count(parameters)} parameters need at least {format_size(model_bytes)} of memory here, and "
            f"{format_size(available_bytes)} are available",
            where="model",
            hint="make model.dim, model.layers or model.vocab smaller, or use fewer regions",
        )
    tokens = config.inner.batch_tokens // config.inner.accumulation
    pass_bytes = tokens * _TOKEN_BYTES * config.model.vocab * (learners + replicas)
    if model_bytes + pass_bytes > available_bytes:
        raise ConfigError(
            f"passes of {format_count(tokens)} tokens need at least {format_size(pass_bytes)} of memory here, and "
            f"{format_size(available_bytes - model_bytes)} are available",
            where="inner.batch_tokens",
            hint="make it smaller, or inner.accumulation larger",
        )


def check_source(config: RunConfig) -> None:
    """See that the text is there, without reading it.

    Raises:
        DataError: It isn't.
    """
    from wan_diloco.config import text_path

    path = text_path(config.data.source)
    if path is not None and not path.is_file() and not path.is_dir():
        raise DataError(f"there is no file or folder {path}", where="data.source", hint="check the path")


def check_port(config: RunConfig) -> None:
    """See that the syncer will be able to listen.

    Raises:
        ConfigError: The port is taken, or the address isn't this machine's.
    """
    host, _, port = config.syncer.listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port that is only waiting out old connections is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # Listening is what tells: an address bound for reuse can be bound again.
            probe.listen(1)
    except OSError as exc:
        raise ConfigError(
            f"can't listen on {config.syncer.listen}: {exc.strerror}",
            where="syncer.listen",
            hint="choose another port; 0 takes a free one",
        ) from exc


def check_data(config: RunConfig) -> None:
    """See that every region gets enough text.

    Raises:
        DataError: The corpus is missing, can't be read, or is too small.
        ConfigError: The model knows fewer tokens than the text has.
    """
    from wan_diloco.data import VOCAB_SIZE, BatchReader, encode_documents, load_corpus, shard_documents, split_corpus

    if config.model.vocab < VOCAB_SIZE:
        raise ConfigError(
            f"{config.model.vocab} tokens are too few for text read as bytes",
            where="model.vocab",
            hint=f"{VOCAB_SIZE} or more",
        )
    training = split_corpus(load_corpus(config.data.source)).training
    for documents in shard_documents(training, config.num_shards, config.data.split):
        BatchReader(
            encode_documents(documents),
            sequence_length=config.model.sequence_length,
            batch_size=config.inner.batch_tokens // config.model.sequence_length,
            seed=config.run.seed,
        )
