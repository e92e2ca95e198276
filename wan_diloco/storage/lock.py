"""One owner for a folder, by the kernel's advisory lock: it ends with its process, however that ends.

Locked are the folder itself and a file in it that names the owner. The file alone would do for two processes that
leave it where it is; who removes it must not let a second owner in. Some file systems lock no folders: there the file
is all there is.

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

from wan_diloco.errors import ConfigError, StateDamaged, StorageError, StorageLocked
from wan_diloco.storage.filesystem import ensure_folder, is_still_at, translated, write_all

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["FolderLock", "owner_of"]

_FILE: Final = "owner.lock"
_BUSY: Final = frozenset({errno.EAGAIN, errno.EACCES})
_OWNER_BYTES_MAX: Final = 4096
_UNNAMED: Final = "another process"
# Between opening and locking somebody may put another file, or another folder, in the place.
_TRIES: Final = 10


class FolderLock:
    """Holds a folder for one purpose, from `acquire` to `release`, or as a context manager.

    The lock file stays behind: where folders can't be locked, removing it would let two owners hold two files.

    Args:
        path: The folder; created where missing.
        purpose: Who we are, for the other one's message: "syncer".
    """

    def __init__(self, path: Path, purpose: str) -> None:
        """Remember what to lock; nothing is touched yet."""
        self._folder = path
        self._path = path / _FILE
        self._purpose = purpose
        self._descriptor: int | None = None
        self._folder_descriptor = -1
        self._folder_locked = False

    @property
    def held(self) -> bool:
        """Whether this object holds the lock now."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock or fail at once.

        Raises:
            StorageLocked: Somebody has it; the sentence names the folder and the process.
            ConfigError: The folder can't be created or written, or its file system has no locks.
            StorageUnusable: Something else is where the lock file should be.
            StorageError: The owner's note can't be written.
        """
        assert self._descriptor is None, "this lock is already held"
        for _ in range(_TRIES):
            ensure_folder(self._folder)
            with contextlib.ExitStack() as opened:
                with translated("can't open", self._folder):
                    folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                opened.callback(os.close, folder)
                folder_locked = self._lock_folder(folder)
                file = self._locked_file()
                opened.callback(os.close, file)
                if not is_still_at(folder, self._folder) or not is_still_at(file, self._path):
                    continue
                self._write_note(file)
                opened.pop_all()
            self._descriptor, self._folder_descriptor, self._folder_locked = file, folder, folder_locked
            return
        raise StorageError(f"can't lock {self._folder}: somebody replaces it, or {_FILE} in it, again and again")

    def require_there(self) -> None:
        """See that the folder at its path is still the one that is held, and put the note back where it is gone.

        Thread: any but an event loop's, one at a time, since a disk may not answer; not while `release` is called.

        Raises:
            StateDamaged: The folder is gone, or another one is there; or another process has it.
        """
        assert self._descriptor is not None, "the lock is held"
        if not is_still_at(self._folder_descriptor, self._folder):
            raise StateDamaged(
                f"the folder {self._folder} was removed, moved away or replaced while the {self._purpose} worked in "
                "it; unless it was only moved, and is put back, what was acknowledged since the newest snapshot that "
                "is elsewhere (in syncer.store, or in a copy of the folder) is lost"
            )
        if not is_still_at(self._descriptor, self._path):
            self._put_back()

    def release(self) -> None:
        """Give the lock back; does nothing where it isn't held."""
        if self._descriptor is not None:
            # Unlocked by hand, since a forked child may hold a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            if self._folder_locked:
                fcntl.flock(self._folder_descriptor, fcntl.LOCK_UN)
            os.close(self._folder_descriptor)
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

    def _put_back(self) -> None:
        """Lock, and write, the file that is at the path now instead of the one that was."""
        try:
            file = self._locked_file()
        except StorageLocked as exc:
            if not self._folder_locked:
                raise StateDamaged(
                    f"{self._path} was removed while the {self._purpose} worked in {self._folder}, and another process "
                    "took the folder: both have written into it since, and what was acknowledged meanwhile may be lost"
                ) from exc
            return  # who asks for the owner holds it for a moment
        except (StorageError, ConfigError):
            return  # the folder is locked all the same, and the next look tries again
        try:
            self._write_note(file)
        except StorageError:
            os.close(file)
            return
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = file

    def _lock_folder(self, descriptor: int) -> bool:
        """Whether the file system locks folders."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in _BUSY:
                raise self._in_use(_noted(self._path)) from exc
            return False
        return True

    def _locked_file(self) -> int:
        with translated("can't open", self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner = _describe(descriptor)
            os.close(descriptor)
            if exc.errno in _BUSY:
                raise self._in_use(owner) from exc
            raise ConfigError(f"can't lock this folder: {exc.strerror}", where=str(self._folder)) from exc
        return descriptor

    def _write_note(self, descriptor: int) -> None:
        note = {"pid": os.getpid(), "host": socket.gethostname(), "purpose": self._purpose}
        with translated("can't write", self._path):
            os.ftruncate(descriptor, 0)
            write_all(descriptor, [json.dumps(note).encode() + b"\n"], 0)

    def _in_use(self, owner: str) -> StorageLocked:
        return StorageLocked(f"{self._folder} is in use by {owner}; stop it or choose another folder")


def owner_of(folder: Path) -> str:
    """Who holds a folder now, in words; empty when nobody does. Nothing is written.

    Who takes the folder in the very moment of the question is refused: the kernel tells only by the attempt.

    Raises:
        StorageError: The system refused.
    """
    path = folder / _FILE
    if _is_busy(folder, os.O_RDONLY | os.O_DIRECTORY, unlocked=True) or _is_busy(path, os.O_RDONLY | os.O_NOFOLLOW):
        return _noted(path)
    return ""


def _is_busy(path: Path, flags: int, *, unlocked: bool = False) -> bool:
    """Whether somebody has locked what is at the path, if anything is; `unlocked` where it may be that nobody can."""
    with translated("can't open", path):
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in _BUSY:
                return True
            if not unlocked:
                raise
        finally:
            # Closing gives it back, if it was got.
            os.close(descriptor)
    return False


def _noted(path: Path) -> str:
    """The owner that the note at a path names."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return _UNNAMED
    try:
        return _describe(descriptor)
    finally:
        os.close(descriptor)


def _describe(descriptor: int) -> str:
    # The note is read without the lock, so it may be empty or half written: then the owner stays unnamed.
    with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
        note = json.loads(os.pread(descriptor, _OWNER_BYTES_MAX, 0))
        return f"the {note['purpose']} with pid {note['pid']} on {note['host']}"
    return _UNNAMED
