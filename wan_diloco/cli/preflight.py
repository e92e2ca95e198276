"""Everything that can be known to be wrong with a run before anything of it is created.

Nothing here writes: a refused run leaves no trace.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    from wan_diloco.config import RunConfig

__all__ = ["check_baseline_folder", "check_data", "check_folder", "check_port", "check_regions", "holds_run"]

_PROCESSES: Final = frozenset({"syncer", "evaluator"})


def holds_run(run_folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    # Not config.json: it is there too when the syncer refused to start, and then nothing of worth is.
    return any((run_folder / name).exists() for name in ("state", "metrics.jsonl", "summary.json"))


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


def check_folder(config: RunConfig, run_folder: Path, *, resume: bool) -> None:
    """See that a run can begin, or go on, in a folder.

    Args:
        config: The run's.
        run_folder: May be missing.
        resume: Whether the run that is in it is to go on.

    Raises:
        ConfigError: It can't be written; or it holds a run, and `resume` is false; or it holds none, or one with
            other settings, and `resume` is true.
    """
    _check_writable(run_folder)
    if not resume:
        if holds_run(run_folder):
            raise ConfigError(
                "there is a run in this folder already",
                where=str(run_folder),
                hint="give --resume to go on with it, or another --run-folder",
            )
        return
    if not holds_run(run_folder):
        raise ConfigError(
            "there is no run in this folder to go on with", where=str(run_folder), hint="begin one without --resume"
        )
    _check_same(config, run_folder / "config.json")


def check_baseline_folder(folder: Path) -> None:
    """See that a baseline can be trained in a folder; what an unfinished one left there doesn't matter.

    Raises:
        ConfigError: It can't be written, or holds a run or a finished baseline.
    """
    _check_writable(folder)
    if (folder / "state").exists() or (folder / "summary.json").exists():
        raise ConfigError(
            "there is a result in this folder already", where=str(folder), hint="give another --run-folder"
        )


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
    for documents in shard_documents(training, len(config.regions), config.data.split):
        BatchReader(
            encode_documents(documents),
            sequence_length=config.model.sequence_length,
            batch_size=config.inner.batch_tokens // config.model.sequence_length,
            seed=config.run.seed,
        )


def _check_writable(run_folder: Path) -> None:
    """Whether the folder is, or could be made, writable; nothing is created to find out."""
    existing = run_folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError("it is a file, and a folder is needed", where=str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            "can't write into this folder", where=str(existing), hint="choose another folder or change its owner"
        )


def _check_same(config: RunConfig, stored: Path) -> None:
    from wan_diloco.config import load_config

    theirs = dict(load_config([stored], env={}).config.agreement())
    for key, value in config.agreement():
        if theirs.get(key) != value:
            raise ConfigError(
                f"is {value} now, and the run in {stored.parent} was begun with {theirs.get(key)}",
                where=key,
                hint="change it back, or begin another run in another --run-folder",
            )
