"""Bringing what a store has of a run into an empty state folder.

The newest manifest whose objects are all there and good is taken whole, and no other's beside it: what isn't named
together doesn't belong together. Nothing is written to the store here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from wan_diloco.errors import CheckpointError, StateDamaged
from wan_diloco.storage import Manifest, ObjectStore, ShippedFile, manifest_names
from wan_diloco.storage.filesystem import ensure_folder, fsync_folder, fsync_path, translated
from wan_diloco.storage.tensor_file import file_digest

__all__ = ["fetch_newest", "read_manifest"]

# What a manifest may put into a state folder: nothing else, whoever wrote it.
_PATH: Final = re.compile(r"journal/[0-9]{10,}\.journal|snapshots/state-[0-9]+/(manifest\.json|tensors\.safetensors)")


def read_manifest(store: ObjectStore, name: str) -> Manifest:
    """A manifest of a store.

    Raises:
        CheckpointError: It isn't there, or is damaged, or names what can't be in a state.
        StoreError: The store doesn't answer, or refuses.
    """
    data = store.get_bytes(name)
    if data is None:
        raise CheckpointError(f"{name} isn't there any more")
    manifest = Manifest.decode(data, name)
    for file in manifest.files:
        if not _PATH.fullmatch(file.path):
            raise CheckpointError(f"{name} names a file {file.path!r}, which no state has")
    return manifest


def fetch_newest(store: ObjectStore, folder: Path) -> tuple[Manifest | None, list[str]]:
    """Copy the files of the newest good manifest into a folder; durable when this returns.

    Args:
        store: Ours, so that nobody removes anything meanwhile.
        folder: `state/`, without a run in it.

    Returns:
        The manifest, None where the store has none at all; and what had to be passed over, one sentence each.

    Raises:
        StateDamaged: There are manifests, and none is good.
        StoreError: The store doesn't answer, or refuses.
        StorageError: The disk doesn't take it.
        ConfigError: The folder can't be written.
    """
    notes: list[str] = []
    for name in manifest_names(store.names()):
        try:
            manifest = read_manifest(store, name)
            _fetch(store, manifest, folder)
        except CheckpointError as exc:
            notes.append(f"what {name} names was passed over: {exc}")
        else:
            return manifest, notes
    if notes:
        raise StateDamaged(f"nothing that {store.url} has can be taken up: {'; '.join(notes)}")
    return None, notes


def _fetch(store: ObjectStore, manifest: Manifest, folder: Path) -> None:
    folders: list[Path] = []
    for file in manifest.files:
        path = folder / file.path
        if path.parent not in folders:
            ensure_folder(path.parent)
            folders.append(path.parent)
        if not _is_same(path, file):
            # Or it is there already, from a manifest that named it too and was passed over for another file.
            _fetch_file(store, file, path)
    _remove_others(folder, {file.path for file in manifest.files})
    with translated("can't flush", folder):
        for each in folders:
            fsync_folder(each)


def _fetch_file(store: ObjectStore, file: ShippedFile, path: Path) -> None:
    if not store.get_file(file.name, path):
        raise CheckpointError(f"{file.name} isn't there")
    if not _is_same(path, file):
        raise CheckpointError(f"{file.name} isn't what was shipped: its length or its digest is another")
    with translated("can't flush", path):
        fsync_path(path)


def _is_same(path: Path, file: ShippedFile) -> bool:
    with translated("can't read", path):
        if not path.exists() or path.stat().st_size != file.size_bytes:
            return False
        return file_digest(path) == file.digest


def _remove_others(folder: Path, wanted: set[str]) -> None:
    """Take away what belongs to a manifest that was passed over: a segment too much would be read as a part of this."""
    with translated("can't tidy", folder):
        for path in sorted((folder / "journal").glob("*.journal")):
            if _PATH.fullmatch(name := f"journal/{path.name}") and name not in wanted:
                path.unlink()
        for snapshot in sorted((folder / "snapshots").glob("state-*/")):
            # What has another name isn't a state's, and is left alone.
            place = f"snapshots/{snapshot.name}/"
            if _PATH.fullmatch(f"{place}manifest.json") and not any(each.startswith(place) for each in wanted):
                for path in snapshot.iterdir():
                    path.unlink()
                snapshot.rmdir()
