"""What a file system holds at every call that changes it, as a kill and as a power cut would leave it.

A kill leaves what was written, flushed or not. A power cut may leave nothing but what was flushed: contents by a flush
of the file, names by one of their folder.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["FileSystemRecorder", "Image", "Moment", "lay_out"]

# Path below the root -> content; None for a folder.
Image = dict[str, bytes | None]
_CHANGES = ("open", "pwritev", "ftruncate", "fsync", "fdatasync", "rename", "replace", "unlink", "rmdir", "mkdir")
_CREATES = os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True, slots=True)
class Moment:
    """Right before or after a call.

    Attributes:
        call: Its name.
        mark: What `mark` said then.
        killed, cut: What a kill, and what a power cut would leave.
    """

    call: str
    mark: int
    killed: Image
    cut: Image


@dataclass
class FileSystemRecorder:
    """Takes down every distinct content of a folder while `recording`. For one thread at a time.

    Args:
        root: The folder; it exists.
        mark: How far whoever is observed has come.

    Attributes:
        moments: In order; a content that a kill and a power cut had left before with the same mark isn't repeated.
        calls: How often each was made.
    """

    root: Path
    mark: Callable[[], int]
    moments: list[Moment] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    _known: dict[bytes, bytes] = field(default_factory=dict)
    # A number of an inode may come again for another file.
    _lives: Counter[int] = field(default_factory=Counter)
    _contents: dict[tuple[int, int], bytes] = field(default_factory=dict)
    _names: dict[tuple[int, int], dict[str, tuple[int, int]]] = field(default_factory=dict)
    _short: bool = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Look on."""
        with contextlib.ExitStack() as patches:
            for name in _CHANGES:
                patches.enter_context(mock.patch.object(os, name, self._watched(name, getattr(os, name))))
            yield

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & _CREATES:
                return real(*args, **options)
            self.calls[name] += 1
            self._take(name)
            if name == "pwritev":
                args = self._cut_short(*args)
            fresh = name == "mkdir" or (name == "open" and not os.path.lexists(args[0]))
            result = real(*args, **options)
            if fresh:
                self._made(Path(args[0]))
            if name in {"fsync", "fdatasync"}:
                self._flushed(args[0])
            self._take(name)
            return result

        return call

    def _made(self, path: Path) -> None:
        inode = path.stat().st_ino
        self._lives[inode] += 1
        if path.is_dir():
            self._names[self._key(inode)] = {}

    def _cut_short(self, descriptor: int, buffers: list[Any], offset: int) -> tuple[Any, ...]:
        """Every other write takes only a half, as a system may; the writer has to come again."""
        self._short = not self._short
        joined = b"".join(buffers)
        return descriptor, [joined[: max(1, len(joined) // 2)] if self._short else joined], offset

    def _flushed(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}")
        key = self._key(os.fstat(descriptor).st_ino)
        if path.is_dir():
            with os.scandir(path) as entries:
                self._names[key] = {entry.name: self._key(entry.inode()) for entry in entries}
        else:
            self._contents[key] = self._kept(path.read_bytes())

    def _key(self, inode: int) -> tuple[int, int]:
        return inode, self._lives[inode]

    def _kept(self, data: bytes) -> bytes:
        return self._known.setdefault(data, data)

    def _take(self, call: str) -> None:
        killed: Image = {}
        for path in sorted(self.root.rglob("*")):
            killed[str(path.relative_to(self.root))] = None if path.is_dir() else self._kept(path.read_bytes())
        cut: Image = {}
        self._durable(self._key(self.root.stat().st_ino), "", cut)
        mark = self.mark()
        if self.moments:
            last = self.moments[-1]
            if (last.mark, last.killed, last.cut) == (mark, killed, cut):
                return
        self.moments.append(Moment(call, mark, killed, cut))

    def _durable(self, folder: tuple[int, int], prefix: str, image: Image) -> None:
        for name, key in sorted(self._names.get(folder, {}).items()):
            path = prefix + name
            if key in self._names:
                image[path] = None
                self._durable(key, f"{path}/", image)
            else:
                image[path] = self._contents.get(key, b"")


def lay_out(image: Image, folder: Path) -> None:
    """Make files and folders of an image."""
    folder.mkdir()
    for name, data in sorted(image.items()):
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)
