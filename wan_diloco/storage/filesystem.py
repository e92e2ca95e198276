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

from wan_diloco.errors import ConfigError, StorageError, StorageUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "DISK_FULL",
    "TEMPORARY_SUFFIX",
    "ensure_folder",
    "fsync_folder",
    "fsync_path",
    "is_still_at",
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
# What no waiting mends: whoever laid the path out, or owns it, must do something.
_NOT_OURS: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
# What may be over at the next try.
_PASSING: Final = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
# Where the system's own words lead nowhere.
_WORDS: Final = {
    errno.EISDIR: "it is a folder, and a file is needed",
    errno.ELOOP: "it is a symbolic link that can't be followed",
}


@contextmanager
def translated(action: str, path: Path) -> Iterator[None]:
    """Turn the operating system's errors into ours.

    Args:
        action: What is being done, as in "can't write"; the path follows it.
        path: What it is done to.

    Raises:
        StorageUnusable: The path can't be that, or we have no right to it: the next try would end the same way.
        StorageError: The system refused; the sentence says "disk full" where that is the reason.
    """
    try:
        yield
    except OSError as exc:
        kind = StorageUnusable if exc.errno in _NOT_OURS else StorageError
        raise kind(f"{action} {path}: {_reason(exc)}") from exc


def _reason(exc: OSError) -> str:
    if exc.errno in DISK_FULL:
        return "the disk or the quota is full; free some space"
    return _WORDS.get(exc.errno or 0) or exc.strerror or type(exc).__name__


def is_still_at(descriptor: int, path: Path) -> bool:
    """Whether an open file or folder is what its path leads to; also where the system can't tell just now.

    Thread: any but an event loop's: a disk may not answer.
    """
    own = os.fstat(descriptor)
    try:
        there = path.stat()
    except OSError as exc:
        return exc.errno not in _GONE
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def ensure_folder(folder: Path, *, parents: bool = True) -> None:
    """Create the folder where missing, and see that we may write into it.

    Args:
        folder: The folder.
        parents: Whether those above it are created too. Where they must be there already, a folder that somebody
            removed isn't made anew, empty.

    Raises:
        ConfigError: It can't be created, isn't a folder, or isn't writable.
        StorageError: The disk is full, or the system refused for now.
    """
    try:
        make_folder(folder, parents=parents)
        # access(2) says yes on some read-only mounts, so a file is really made.
        probe = folder / temporary_name("probe")
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        probe.unlink()
    except FileExistsError as exc:
        what = "a symbolic link that leads nowhere" if folder.is_symlink() and not folder.exists() else "a file"
        raise ConfigError(f"it is {what}, and a folder is needed", where=str(folder)) from exc
    except OSError as exc:
        if exc.errno in DISK_FULL or exc.errno in _PASSING:
            raise StorageError(f"can't write into {folder}: {_reason(exc)}") from exc
        hint = "choose another folder or change its owner" if exc.errno in _NOT_OURS else ""
        raise ConfigError(
            f"can't write into this folder: {exc.strerror or type(exc).__name__}", where=str(folder), hint=hint
        ) from exc


def make_folder(folder: Path, *, parents: bool = True) -> None:
    """Create the folder and, if so asked, its parents where missing; durable when this returns.

    Raises:
        OSError: The system refused.
    """
    missing: list[Path] = []
    each = folder
    while not each.exists() and each not in missing:
        missing.append(each)
        each = each.parent
    folder.mkdir(parents=parents, exist_ok=True)
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
