"""A disk small enough to be filled: a tmpfs over a run's folder, or a small disk that somebody mounted there.

Nobody's own disk is ever filled. What was written to a tmpfs is moved into the folder when it is taken away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from wan_diloco.errors import StorageError

__all__ = ["Ballast", "DiskPlan", "SmallDisk", "plan_disk"]

_SMALL_BYTES: Final = 4 * 2**30
_COMMAND_S: Final = 60.0
_PIECES: Final = (4 * 2**20, 64 * 2**10, 4 * 2**10, 512)
# Others of a process that fills a disk want to be heard in between, and to stop it.
_FILL_BYTES_MAX: Final = 64 * 2**20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """How a full disk can be had for a folder.

    Attributes:
        mount: A tmpfs is put over it.
        how: In words; where `why_not` says something, empty.
        why_not: Why it can't; empty when it can.
    """

    mount: bool = False
    how: str = ""
    why_not: str = ""


def plan_disk(folder: Path) -> DiskPlan:
    """Find out how, without leaving anything behind.

    Args:
        folder: Of a run; it may be missing.
    """
    if folder.is_mount() and (total := shutil.disk_usage(folder).total) <= _SMALL_BYTES:
        return DiskPlan(how=f"a file of ballast on the disk that is mounted there, of {total >> 20} MiB")
    if os.geteuid() != 0:
        return DiskPlan(why_not="only root may mount a small disk, and the folder isn't one")
    if shutil.which("mount") is None or shutil.which("umount") is None:
        return DiskPlan(why_not="there is no mount command, and the folder isn't a small disk")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with SmallDisk(Path(scratch) / "tried", 2**20):
                pass
        except StorageError as exc:
            return DiskPlan(why_not=str(exc))
    return DiskPlan(mount=True, how="a file of ballast on a tmpfs of its own")


class SmallDisk:
    """A tmpfs over a folder, which is made where missing. A context; what was written stays in the folder afterwards.

    Args:
        folder: Empty or missing.
        size_bytes: Of the disk; it takes memory as it fills.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Mount nothing yet."""
        self._folder = folder.absolute()
        self._kept = self._folder.with_name(f".{self._folder.name}.kept")
        self._size_bytes = size_bytes

    def __enter__(self) -> Self:
        """Mount it.

        Raises:
            StorageError: The system refuses; or what an earlier disk held still waits to be moved.
        """
        if self._kept.exists():
            raise StorageError(f"{self._kept} holds what was on an earlier small disk: move it away first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"can't make {self._folder}: {exc.strerror}") from exc
        options = f"size={self._size_bytes},mode=755"
        _call("mount", "-t", "tmpfs", "-o", options, "wan-diloco-chaos", str(self._folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away.

        Raises:
            StorageError: What was written can't be kept, or somebody works there: the disk is still mounted then. Or it
                can't be moved into the folder; the text says where it is.
        """
        try:
            shutil.copytree(self._folder, self._kept, symlinks=True)
            _call("umount", str(self._folder))
        except (OSError, shutil.Error, StorageError) as exc:
            if self._folder.is_mount():
                shutil.rmtree(self._kept, ignore_errors=True)
                raise StorageError(f"the small disk {self._folder} is still mounted, with all of it: {exc}") from exc
        try:
            for path in self._kept.iterdir():
                path.rename(self._folder / path.name)
            self._kept.rmdir()
        except OSError as exc:
            raise StorageError(f"what was on the small disk is in {self._kept}, and can't be moved: {exc}") from exc


class Ballast:
    """Fills a small disk, and makes room again.

    Args:
        folder: On that disk.
    """

    def __init__(self, folder: Path) -> None:
        """Fill nothing yet."""
        self._path = folder / "ballast"

    def fill(self) -> int:
        """Write until nothing more fits, or for a while; to be called again, also when others made room.

        Returns:
            Bytes that were written now; 0 when the disk is full.

        Raises:
            OSError: It refuses for another reason.
        """
        written = 0
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        except OSError as exc:
            # Others have filled it to the last entry of its folder.
            return _unless_full(exc)
        try:
            for size in _PIECES:
                piece = bytes(size)
                try:
                    while written < _FILL_BYTES_MAX:
                        written += os.write(descriptor, piece)
                except OSError as exc:
                    _unless_full(exc)
        finally:
            os.close(descriptor)
        return written

    def empty(self) -> None:
        """Make room."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def _unless_full(problem: OSError) -> int:
    """Nothing was written, for want of room.

    Raises:
        OSError: It is another problem.
    """
    if problem.errno not in _FULL:
        raise problem
    return 0


def _call(*words: str) -> None:
    try:
        done = subprocess.run(
            [shutil.which(words[0]) or words[0], *words[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise StorageError(f"{' '.join(words)}: no end after {_COMMAND_S:.0f} s") from exc
    if done.returncode != 0:
        raise StorageError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
