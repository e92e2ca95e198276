"""Snapshots of tensors: written at leisure, visible only when whole.

A snapshot is a folder with `tensors.safetensors` and `manifest.json`. It is staged under a hidden
name and renamed, and both files are covered by digests. Names sort naturally (`merge-9` before
`merge-10`), and the order of names is the order of age: no clock is asked.

torch takes seconds to import, and whoever locks a folder or reads a JSON file has no use for it: it is
imported where tensors are.

What must not happen here: pickle, or the loss of the last good snapshot, whatever was damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError

from wan_diloco.errors import CheckpointError, StorageError
from wan_diloco.storage.atomic import read_json, write_json
from wan_diloco.storage.filesystem import (
    ensure_folder,
    fsync_folder,
    temporary_name,
    translated,
)
from wan_diloco.storage.tensor_file import file_digest, write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping
    from pathlib import Path

    import torch

__all__ = [
    "LatestSnapshot",
    "SkippedSnapshot",
    "Snapshot",
    "good_snapshots",
    "keep_last",
    "latest_snapshot",
    "load_snapshot",
    "newest_manifest",
    "trusted_manifests",
]

FORMAT: Final = 2

_TENSORS: Final = "tensors.safetensors"
_MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGITS: Final = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Tensors and what is known about them; to be written once.

    Attributes:
        tensors: On the CPU; nobody changes them any more.
        manifest: JSON values of the caller, without a NaN or an infinity.
    """

    tensors: dict[str, torch.Tensor]
    manifest: Mapping[str, Any]

    def write(self, folder: Path, name: str, written: Callable[[str], None] | None = None) -> Path:
        """Make the snapshot durable under a name. Its tensors are let go of one by one, as they are written.

        Thread: any; several at once are fine under different names.

        Args:
            folder: Created where missing, in one that is there.
            name: Letters, digits, dots, dashes, underscores.
            written: Told each tensor's name when it may be changed again.

        Returns:
            The snapshot's folder.

        Raises:
            CheckpointError: A good snapshot has this name already.
            StorageError: The disk is full or the system refused; earlier snapshots stand.
            ConfigError: The folder can't be created or written.
            ValueError: The name isn't one, or the manifest holds a NaN or an infinity.
            TypeError: The manifest holds something that JSON doesn't know.
        """
        target = folder / _checked(name)
        ensure_folder(folder, parents=False)
        staging = folder / temporary_name(name)
        try:
            with translated("can't write", target):
                staging.mkdir()
                tensors_digest = write_tensors(staging / _TENSORS, self.tensors, written)
                write_json(staging / _MANIFEST, _manifest(name, self.manifest, tensors_digest))
                _make_way(folder, name)
                staging.rename(target)
                fsync_folder(folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSnapshot:
    """A snapshot that was passed over, and why."""

    name: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestSnapshot:
    """The newest good snapshot of a folder.

    Attributes:
        name: Its name.
        snapshot: What it holds.
        skipped: Newer ones that are damaged, newest first.
    """

    name: str
    snapshot: Snapshot
    skipped: tuple[SkippedSnapshot, ...]


def load_snapshot(folder: Path, name: str) -> Snapshot:
    """Read a snapshot, checked by its digests.

    Raises:
        CheckpointError: It is missing, incomplete, damaged, or of a newer format.
        ValueError: The name isn't one.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - see above

    path = folder / _checked(name)
    manifest = _verified_manifest(path)
    try:
        tensors = load_file(path / _TENSORS)
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"the tensors of snapshot {path} can't be read: {exc}") from exc
    return Snapshot(tensors=tensors, manifest=manifest)


def latest_snapshot(folder: Path, ours: re.Pattern[str] = _NAME) -> LatestSnapshot | None:
    """The newest snapshot whose digests are right, with a report of what had to be skipped.

    Args:
        folder: Where the snapshots are.
        ours: What their names are like; others are none.

    Returns:
        None where the folder has no snapshot at all.

    Raises:
        CheckpointError: There are snapshots and none is good; starting afresh would lose the run.
        StorageError: The folder can't be listed.
    """
    skipped: list[SkippedSnapshot] = []
    for name in reversed(_names(folder, ours)):
        try:
            snapshot = load_snapshot(folder, name)
        except CheckpointError as exc:
            skipped.append(SkippedSnapshot(name=name, problem=str(exc)))
        else:
            return LatestSnapshot(name=name, snapshot=snapshot, skipped=tuple(skipped))
    if skipped:
        problems = "; ".join(item.problem for item in skipped)
        raise CheckpointError(f"none of the {len(skipped)} snapshots in {folder} is good: {problems}")
    return None


def good_snapshots(
    folder: Path, passed_over: Callable[[SkippedSnapshot], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Names and manifests of the snapshots whose digests are right, oldest first.

    Args:
        folder: Where the snapshots are.
        passed_over: Told of each of the others.

    Raises:
        StorageError: The folder can't be listed.
    """
    good = {}
    for name in _names(folder):
        try:
            good[name] = _verified_manifest(folder / name)
        except CheckpointError as exc:
            if passed_over is not None:
                passed_over(SkippedSnapshot(name=name, problem=str(exc)))
    return good


def trusted_manifests(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names of snapshots and what they say beside their tensors, which aren't looked at, newest first.

    Raises:
        StorageError: The folder can't be listed.
    """
    for name in reversed(_names(folder)):
        with contextlib.suppress(CheckpointError):
            yield name, _trusted_manifest(folder / name)["values"]


def newest_manifest(folder: Path) -> Mapping[str, Any] | None:
    """What the newest snapshot says beside its tensors, which aren't looked at: for whom it is enough.

    Returns:
        None where no snapshot says anything that can be trusted.

    Raises:
        StorageError: The folder can't be listed.
    """
    return next((manifest for _, manifest in trusted_manifests(folder)), None)


def keep_last(folder: Path, k: int, known: Container[str] = (), ours: re.Pattern[str] = _NAME) -> list[str]:
    """Remove all snapshots older than the k newest good ones; damaged ones don't count and newer ones stay.

    Ordering: from the thread that writes snapshots.

    Args:
        folder: Where the snapshots are.
        k: At least 1.
        known: Names that are taken as good without reading them again.
        ours: What the names of snapshots are like; others stay.

    Returns:
        The names that were removed, newest first.

    Raises:
        StorageError: The folder can't be listed or changed.
        ValueError: `k` is below 1.
    """
    if k < 1:
        raise ValueError(f"at least one snapshot is kept, not {k}")
    removed = []
    good = 0
    for name in reversed(_names(folder, ours)):
        path = folder / name
        if good >= k:
            _remove(folder, name)
            removed.append(name)
            continue
        with contextlib.suppress(CheckpointError):
            if name not in known:
                _verified_manifest(path)
            good += 1
    return removed


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} can't be the name of a snapshot")
    return name


def _names(folder: Path, ours: re.Pattern[str] = _NAME) -> list[str]:
    if not folder.exists():
        return []
    with translated("can't list the snapshots in", folder):
        names = [path.name for path in folder.iterdir() if path.is_dir() and ours.fullmatch(path.name)]
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    # "merge-10" becomes ("merge-"), 10: numbers compare as numbers, and text never meets a number.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


def _manifest(name: str, values: Mapping[str, Any], tensors_digest: str) -> dict[str, Any]:
    manifest = {"format": FORMAT, "name": name, "tensors_xxh3": tensors_digest, "values": values}
    return {**manifest, "manifest_sha256": _digest(manifest)}


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _verified_manifest(path: Path) -> dict[str, Any]:
    manifest = _trusted_manifest(path)
    try:
        with translated("can't read", path / _TENSORS):
            tensors_digest = file_digest(path / _TENSORS)
    except StorageError as exc:
        raise CheckpointError(f"snapshot {path} is incomplete: {exc}") from exc
    if tensors_digest != manifest.get("tensors_xxh3"):
        raise CheckpointError(f"the tensors of snapshot {path} don't match their digest")
    values: dict[str, Any] = manifest["values"]
    return values


def _trusted_manifest(path: Path) -> dict[str, Any]:
    """The file, with what is in it about the tensors."""
    try:
        manifest: dict[str, Any] = read_json(path / _MANIFEST)
    except StorageError as exc:
        raise CheckpointError(f"snapshot {path} is incomplete: {exc}") from exc
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"snapshot {path} has format {manifest.get('format')!r}, this version reads {FORMAT}")
    claimed = manifest.pop("manifest_sha256", None)
    named = manifest.get("name") == path.name and isinstance(manifest.get("values"), dict)
    if claimed != _digest(manifest) or not named:
        raise CheckpointError(f"the manifest of snapshot {path} doesn't match its digest or its name")
    return manifest


def _make_way(folder: Path, name: str) -> None:
    # Only a damaged snapshot is ever replaced, so that a good one exists under its name at every moment.
    path = folder / name
    if not path.exists():
        return
    try:
        _verified_manifest(path)
    except CheckpointError:
        _remove(folder, name)
    else:
        raise CheckpointError(f"snapshot {path} exists already and is good")


def _remove(folder: Path, name: str) -> None:
    # Renamed first, so that a crash in the middle leaves a leftover and not half a snapshot.
    doomed = folder / temporary_name(name)
    with translated("can't remove", folder / name):
        (folder / name).rename(doomed)
        fsync_folder(folder)
        shutil.rmtree(doomed)
