"""One owner for a folder, by the kernel's advisory lock: it ends with its process, however that ends.

The lock says nothing about other machines; a folder on a network file system is fenced by the term.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from typing import TYPE_CHECKING, Final, Self

from wan_diloco.errors import ConfigError, StorageLocked
from wan_diloco.storage.filesystem import ensure_folder, translated, write_all

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["FolderLock", "owner_of"]

_FILE: Final = "owner.lock"
_BUSY: Final = frozenset({errno.EAGAIN, errno.EACCES})
_OWNER_BYTES_MAX: Final = 4096


class FolderLock:
    """Holds a folder for one purpose, from `acquire` to `release`, or as a context manager.

    The lock file stays behind, since removing it would let two owners hold two different files.

    Args:
        path: The folder; created where missing.
        purpose: Who we are, for the other one's message: "syncer".
    """

    def __init__(self, path: Path, purpose: str) -> None:
        """Remember what to lock; nothing is touched yet."""
        self._folder = path
        self._purpose = purpose
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock now."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock or fail at once.

        Raises:
            StorageLocked: Somebody has it; the sentence names the folder and the process.
            ConfigError: The folder can't be created or written, or its file system has no locks.
            StorageError: The owner's note can't be written.
        """
        assert self._descriptor is None, "this lock is already held"
        ensure_folder(self._folder)
        path = self._folder / _FILE
        with translated("can't open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            self._lock(descriptor)
            note = {"pid": os.getpid(), "host": socket.gethostname(), "purpose": self._purpose}
            with translated("can't write", path):
                os.ftruncate(descriptor, 0)
                write_all(descriptor, [json.dumps(note).encode() + b"\n"], 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; does nothing where it isn't held."""
        if self._descriptor is not None:
            # Unlocked by hand, since a forked child may hold a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        """Take the lock."""
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back."""
        self.release()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in _BUSY:
                owner = _describe(descriptor)
                raise StorageLocked(f"{self._folder} is in use by {owner}; stop it or choose another folder") from exc
            raise ConfigError(f"can't lock this folder: {exc.strerror}", where=str(self._folder)) from exc


def owner_of(folder: Path) -> str:
    """Who holds a folder now, in words; empty when nobody does. Nothing is written.

    Who takes the folder in the very moment of the question is refused: the kernel tells only by the attempt.

    Raises:
        StorageError: The system refused.
    """
    path = folder / _FILE
    with translated("can't open", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return ""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in _BUSY:
                return _describe(descriptor)
            raise
        finally:
            # Closing gives it back, if it was got.
            os.close(descriptor)
    return ""


def _describe(descriptor: int) -> str:
    # The note is read without the lock, so it may be empty or half written: then the owner stays unnamed.
    with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
        note = json.loads(os.pread(descriptor, _OWNER_BYTES_MAX, 0))
        return f"the {note['purpose']} with pid {note['pid']} on {note['host']}"
    return "another process"
