"""What is in a run's folder, and whether a command may work there.

Nothing here writes: a command that is refused leaves no trace, least of all in the folder of a run that lives.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wan_diloco.cli.options import print_warning
from wan_diloco.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from wan_diloco.config import RunConfig

__all__ = [
    "Holding",
    "check_baseline_folder",
    "check_folder",
    "check_learner_folder",
    "check_syncer_folder",
    "what_is_in",
]

# The longest path below a run's folder, with room to spare.
_BELOW_BYTES: Final = 256
_PATH_BYTES_MAX: Final = 4096  # PATH_MAX on Linux
_CREATABLE: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


class Holding(Enum):
    """What a folder holds."""

    NOTHING = auto()
    RUN = auto()
    FINISHED_RUN = auto()
    BASELINE = auto()


def what_is_in(folder: Path) -> Holding:
    """What was begun in this folder, if anything.

    The syncer makes `state` before anything else and writes the report after everything else; a baseline has no state.
    `config.json` says nothing: it is there too when no process came to work.

    Raises:
        ConfigError: Something is there under the name of a run's state, and is none.
    """
    state = folder / "state"
    if not state.is_dir() and os.path.lexists(state):
        what = "a symbolic link that leads to no folder" if state.is_symlink() else "a file"
        raise ConfigError(
            f"it is {what}, and a run's state is a folder",
            where=str(state),
            hint="put the run's state back, or mount the disk that has it",
        )
    if state.is_dir():
        finished = _has_result(folder / "summary.json") and (folder / "report.html").exists()
        return Holding.FINISHED_RUN if finished else Holding.RUN
    if (folder / "summary.json").exists() or (folder / "metrics.jsonl").exists():
        return Holding.BASELINE
    return Holding.NOTHING


def _has_result(summary_path: Path) -> bool:
    """Whether a run's summary is the last word: an interrupted run has one too, and a final model may lack its score.

    Whoever goes on with such a run gets the rest of it.
    """
    try:
        summary = json.loads(summary_path.read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(summary, dict):
        return False
    return bool(summary.get("finished", True)) and summary.get("validation_nats_per_byte") is not None


def check_folder(
    config: RunConfig, run_folder: Path, *, resume: bool, refragment: bool = False
) -> tuple[RunConfig, Holding]:
    """See that a run can begin, or go on, in a folder.

    Args:
        config: The run's.
        run_folder: May be missing.
        resume: Whether the run that is in it is to go on; a finished one may be asked to.
        refragment: Whether it may be cut into another number of fragments then.

    Returns:
        The configuration to go on with, and what is in the folder: as of `check_syncer_folder`.

    Raises:
        ConfigError: It can't be written; or it holds a run, and `resume` is false; or it holds none, or one with
            other settings, and `resume` is true; or no shard is left for a region that is new; or it holds a
            baseline.
    """
    config, holding = check_syncer_folder(config, run_folder, resume=resume, refragment=refragment)
    # What isn't on this machine may be in the store.
    if resume and holding is Holding.NOTHING and not config.syncer.store:
        raise ConfigError(
            "there is no run in this folder to go on with", where=str(run_folder), hint="begin one without --resume"
        )
    return config, holding


def check_syncer_folder(
    config: RunConfig, run_folder: Path, *, resume: bool, refragment: bool = False
) -> tuple[RunConfig, Holding]:
    """See that a syncer can begin a run in a folder, or take one up.

    Args:
        config: The run's.
        run_folder: May be missing.
        resume: Whether a run that is in it may be taken up. There may be none, so that whoever starts a syncer again
            can always ask for it.
        refragment: Whether it may be cut into another number of fragments then.

    Returns:
        The configuration to go on with, in which shards that the given one leaves open are those that the run gave
        its regions; and what is in the folder.

    Raises:
        ConfigError: It can't be written; or it holds a run, and `resume` is false, or one with other settings; or no
            shard is left for a region that is new; or it holds a baseline.
    """
    _check_writable(run_folder)
    holding = _refuse_baseline(run_folder)
    if holding is Holding.NOTHING:
        return config, holding
    if not resume:
        finished = holding is Holding.FINISHED_RUN
        raise ConfigError(
            f"there is a {'finished run' if finished else 'run'} in this folder already",
            where=str(run_folder),
            hint="give another --run-folder" if finished else "give --resume to go on with it, or another --run-folder",
        )
    return _as_begun(config, run_folder, refragment=refragment), holding


def check_learner_folder(run_folder: Path, region: str, *, resume: bool) -> None:
    """See that a learner can keep its files in a folder, which may be its run's or its own.

    Args:
        run_folder: May be missing.
        region: The learner's.
        resume: Whether it may go on from the checkpoint that is there, if any.

    Raises:
        ConfigError: It can't be written; or it holds a baseline; or it holds a checkpoint of the region, and `resume`
            is false.
    """
    _check_writable(run_folder)
    _refuse_baseline(run_folder)
    if not resume and (run_folder / "learners" / region / "checkpoint").exists():
        raise ConfigError(
            f"there is a checkpoint of {region} in this folder",
            where=str(run_folder),
            hint="give --resume to go on from it, or another --run-folder",
        )


def check_baseline_folder(folder: Path) -> None:
    """See that a baseline can be trained in a folder; what an unfinished one left there doesn't matter.

    Raises:
        ConfigError: It can't be written, or holds a run or a finished baseline.
    """
    _check_writable(folder)
    if os.path.lexists(folder / "state") or (folder / "summary.json").exists():
        raise ConfigError(
            "there is a result in this folder already", where=str(folder), hint="give another --run-folder"
        )


def _refuse_baseline(folder: Path) -> Holding:
    """What else is in the folder."""
    holding = what_is_in(folder)
    if holding is Holding.BASELINE:
        raise ConfigError(
            "a baseline was trained in this folder, which is no run and can't be gone on with",
            where=str(folder),
            hint="give another --run-folder",
        )
    return holding


def _check_writable(folder: Path) -> None:
    """Whether the folder is, or could be made, writable; nothing is created to find out."""
    if "\0" in str(folder):
        raise ConfigError("no path holds a zero byte", where=repr(str(folder)))
    existing = folder.absolute()
    if len(os.fsencode(existing)) + _BELOW_BYTES > _PATH_BYTES_MAX:
        raise ConfigError("this path is too long", where=_short(folder), hint="choose another folder")
    missing: list[str] = []
    while not _is_there(existing):
        missing.append(existing.name)
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError("it is a file, and a folder is needed", where=str(existing))
    # Of names below what is missing the system would complain only after having made the others.
    if any(len(os.fsencode(name)) > os.pathconf(existing, "PC_NAME_MAX") for name in missing):
        raise ConfigError("a name in this path is too long", where=_short(folder), hint="choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            "can't write into this folder", where=str(existing), hint="choose another folder or change its owner"
        )


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as exc:
        if exc.errno in _CREATABLE or exc.errno == errno.ENAMETOOLONG:
            return False
        raise ConfigError(f"can't use this folder: {exc.strerror}", where=str(path)) from exc
    return True


def _short(folder: Path) -> str:
    text = str(folder)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-30:]}"


def _last_accepted(run_folder: Path) -> RunConfig | None:
    """The configuration that a syncer went on with last: it writes `config.json` when it has the run's state."""
    from wan_diloco.config import load_stored

    stored = run_folder / "config.json"
    return load_stored(stored) if stored.exists() else None


def _shards_had(run_folder: Path, before: RunConfig) -> dict[str, int]:
    """Also of regions that are gone since long: the state remembers them."""
    from wan_diloco.errors import DecodeError
    from wan_diloco.protocol.state_json import state_from_json
    from wan_diloco.storage import newest_manifest

    had = before.shards
    # What can't be read here is for the syncer to say, which looks again.
    with contextlib.suppress(DecodeError, StorageError):
        if (manifest := newest_manifest(run_folder / "state" / "snapshots")) is not None:
            had |= {str(name): int(shard) for name, shard in state_from_json(manifest["state"]).shards.items()}
    return had


def _as_begun(config: RunConfig, run_folder: Path, *, refragment: bool) -> RunConfig:
    """The configuration to go on with, when it may; what the run has is read once, since a syncer's start waits."""
    from wan_diloco.config import check_shards, keep_shards, require_resumable

    if (before := _last_accepted(run_folder)) is None:
        return config
    had = _shards_had(run_folder, before)
    config = keep_shards(config, had, before.num_shards)
    require_resumable(config.agreement(), dict(before.agreement()), refragment=refragment, folder=str(run_folder))
    check_shards(config.shards, had)
    if config.data.source != before.data.source:
        # Paths differ between machines and may: that it is the same text, only the operator can know.
        print_warning(
            f"data.source is {config.data.source} now, and was {before.data.source}: it must be the very same text, "
            "which nobody compares"
        )
    return config
