"""Files that are either the old one or the new one, whole, after any crash.

Temporary file in the same folder, fsync of the file, rename, fsync of the folder. Must not be used
for what grows: that is the journal's work.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

from wan_diloco.errors import StorageError
from wan_diloco.storage.filesystem import TEMPORARY_SUFFIX, fsync_folder, temporary_name, translated, write_all

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["read_json", "remove_leftovers", "write_bytes", "write_json", "write_text"]


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Put the bytes at the path; a reader sees the old file or the new one, also after a power cut.

    Raises:
        StorageError: The folder is missing, the disk is full, or the system refused; the old file stands.
    """
    temporary = path.parent / temporary_name(path.name)
    with translated("can't write", path):
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
            try:
                write_all(descriptor, [data], 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Like `write_bytes`, for text in UTF-8.

    Raises:
        StorageError: As `write_bytes`.
    """
    write_bytes(path, text.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Like `write_bytes`, for a JSON object with sorted keys.

    Raises:
        StorageError: As `write_bytes`.
        ValueError: The value holds a NaN or an infinity, which JSON can't say.
        TypeError: The value holds something that JSON doesn't know.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        StorageError: The file is missing, can't be read, or doesn't hold one JSON object.
    """
    with translated("can't read", path):
        data = path.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise StorageError(f"{path} isn't JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise StorageError(f"{path} should hold a JSON object, and holds a {type(value).__name__}")
    return value


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what writers that were killed left unfinished in a folder.

    Ordering: only at a start, while the folder's lock is held, so that no writer is at work.

    Returns:
        The names that were removed.

    Raises:
        StorageError: The folder can't be read or changed.
    """
    removed = []
    with translated("can't tidy", folder):
        for path in sorted(folder.glob(f".*{TEMPORARY_SUFFIX}")):
            if path.is_dir() and not path.is_symlink():
                for inner in path.iterdir():
                    inner.unlink()
                path.rmdir()
            else:
                path.unlink()
            removed.append(path.name)
    return removed
