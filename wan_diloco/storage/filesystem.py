"""What the rest of `storage` asks of a local file system: clear errors, durable folders, whole writes.

Nothing here knows what is stored. An `OSError` doesn't leave this package: it becomes one sentence
that names the path and says what the operator can do.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "DISK_FULL",
    "TEMPORARY_SUFFIX",
    "ensure_folder",
    "fsync_folder",
    "fsync_path",
    "make_folder",
    "temporary_name",
    "translated",
    "usual_mode",
    "write_all",
]

TEMPORARY_SUFFIX: Final = ".tmp"

DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the errors that free space mends."""

_NUMBERS = itertools.count()
_BUFFERS_MAX: Final = 1024  # IOV_MAX on Linux
_NOT_OURS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


@contextmanager
def translated(action: str, path: Path) -> Iterator[None]:
    """Turn the operating system's errors into ours.

    Args:
        action: What is being done, as in "can't write"; the path follows it.
        path: What it is done to.

    Raises:
        StorageError: The system refused; the sentence says "disk full" where that is the reason.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in DISK_FULL:
            reason = "the disk or the quota is full; free some space"
        else:
            reason = exc.strerror or type(exc).__name__
        raise StorageError(f"{action} {path}: {reason}") from exc


def ensure_folder(folder: Path) -> None:
    """Create the folder and its parents where missing, and see that we may write into it.

    Raises:
        ConfigError: It can't be created, isn't a folder, or isn't writable.
    """
    try:
        make_folder(folder)
        # access(2) says yes on some read-only mounts, so a file is really made.
        probe = folder / temporary_name("probe")
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        probe.unlink()
    except FileExistsError as exc:
        raise ConfigError("it is a file, and a folder is needed", where=str(folder)) from exc
    except OSError as exc:
        if exc.errno in DISK_FULL:
            raise StorageError(f"can't write into {folder}: the disk or the quota is full; free some space") from exc
        hint = "choose another folder or change its owner" if exc.errno in _NOT_OURS else ""
        raise ConfigError(
            f"can't write into this folder: {exc.strerror or type(exc).__name__}", where=str(folder), hint=hint
        ) from exc


def make_folder(folder: Path) -> None:
    """Create the folder and its parents where missing; durable when this returns.

    Raises:
        OSError: The system refused.
    """
    missing: list[Path] = []
    each = folder
    while not each.exists() and each not in missing:
        missing.append(each)
        each = each.parent
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        # A folder whose name a power cut takes away takes all with it that was flushed inside.
        fsync_folder(made.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a rename isn't before this returns."""
    fsync_path(folder)


def fsync_path(path: Path) -> None:
    """Make what is in a file or folder durable, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(name: str) -> str:
    """A hidden name that no other thread or process uses, and that a start may sweep away."""
    return f".{name}.{os.getpid()}.{next(_NUMBERS)}{TEMPORARY_SUFFIX}"


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give a file that a library writes within the mode that a file of ours would have, which the umask decides.

    Some libraries make files that only their owner may read.

    Args:
        path: Of the file; it doesn't exist yet.

    Raises:
        OSError: The system refused.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def write_all(descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Write every byte of the buffers at the offset, however often the system stops short.

    Args:
        descriptor: An open file.
        buffers: Contiguous bytes.
        offset: Where the first byte goes.

    Returns:
        How many bytes were written: all of them.

    Raises:
        OSError: The system refused; some bytes may have been written.
    """
    left = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
    start = offset
    index = 0
    while index < len(left):
        written = os.pwritev(descriptor, left[index : index + _BUFFERS_MAX], offset)
        offset += written
        while index < len(left) and written >= left[index].nbytes:
            written -= left[index].nbytes
            index += 1
        if index < len(left) and written:
            left[index] = left[index][written:]
    return offset - start
