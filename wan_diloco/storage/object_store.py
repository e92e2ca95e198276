"""Whole objects under names, on whatever fsspec reaches: there is no rename, and an object is there when its put is.

A folder of this machine is written by ourselves: there an object gets its name when all of it is durable.

What must not happen here: a wait without an end, an error that isn't ours, or a bucket that doesn't exist taken for an
empty one. fsspec's file systems raise whatever their libraries do. fsspec and what it loads take a while to import, and
most runs have no store: it is imported where a store is opened.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import xxhash

from wan_diloco.errors import ConfigError, StorageError, StoreError, StoreMissing
from wan_diloco.storage.filesystem import (
    DISK_FULL,
    TEMPORARY_SUFFIX,
    fsync_folder,
    fsync_path,
    make_folder,
    temporary_name,
    translated,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ObjectStore", "Versioned"]

_CONDITIONAL: Final = frozenset({"s3", "s3a"})
_LOCAL: Final = frozenset({"file"})
# The library tries again by itself, each time with time limits of its own; whoever calls us tries again as well.
_ATTEMPTS: Final = 2
# Of a large file, 50 MiB each.
_PARTS_AT_ONCE: Final = 2
_CONNECT_S: Final = 5
_READ_S: Final = 15
_CONDITION_FAILED: Final = 412
_CONDITION_RACED: Final = 409
_MISSING: Final = 404
_NO_BUCKET: Final = "NoSuchBucket"
_WORDS_MAX: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Versioned:
    """An object, and what tells this version of it from every other."""

    data: bytes
    tag: str


class ObjectStore:
    """A place for objects, made by `open`.

    Thread: any.

    Where its bucket doesn't exist, every question is answered with `StoreMissing`, a kind of `StoreError`.

    Attributes:
        url: As it was given, for people.
        conditional: Whether `write_if` is one step for everybody, so that of two who write only one succeeds.
        folder: Where it is, when it is a folder of this machine; None otherwise.
    """

    def __init__(self, filesystem: Any, root: str, url: str, protocol: str, *, conditional: bool) -> None:
        """Not for callers: use `open`."""
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._has_folders = protocol not in _CONDITIONAL
        self.url = url.rstrip("/")
        self.conditional = conditional
        self.folder = Path(root) if protocol in _LOCAL else None

    @classmethod
    def open(cls, url: str, endpoint: str = "", *, unlocked: bool = False) -> Self:
        """A store at an address; nobody is asked anything yet.

        Args:
            url: "s3://bucket/prefix", "file:///folder", or what else fsspec knows.
            endpoint: Of an S3-compatible server, "http://127.0.0.1:9000"; empty for what the environment says.
            unlocked: Whether conditions aren't to be used, although the store may know them.

        Raises:
            ConfigError: The address makes no sense, or the package that knows such addresses isn't installed.
        """
        from fsspec.core import url_to_fs  # noqa: PLC0415 - see above

        protocol = urlsplit(url).scheme
        # Each store has an instance of its own, and what others write must be seen.
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if protocol in _CONDITIONAL:
            limits = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": {"max_attempts": _ATTEMPTS}}
            options |= {"config_kwargs": limits, "client_kwargs": {"endpoint_url": endpoint} if endpoint else {}}
        try:
            filesystem, root = url_to_fs(url, **options)
        except ImportError as exc:
            raise ConfigError(
                f"{protocol}:// needs a package that isn't installed: {_words(exc)}",
                where="syncer.store",
                hint='for s3:// install "wan-diloco[s3]"',
            ) from exc
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{url!r} can't be used: {_words(exc)}", where="syncer.store") from exc
        if protocol in _CONDITIONAL:
            filesystem.retries = _ATTEMPTS
            filesystem.max_concurrency = _PARTS_AT_ONCE
        return cls(filesystem, root, url, protocol, conditional=protocol in _CONDITIONAL and not unlocked)

    def put_file(self, path: Path, name: str) -> None:
        """Copy a local file to an object; what was there under this name is replaced.

        Raises:
            StoreError: It isn't there; a part of it may be, where the store isn't one of whole objects.
        """
        with self._asked("can't write", name):
            target = self._path(name)
            if self.folder is None:
                self._make_room(target)
                self._fs.put_file(str(path), target)
            else:
                with _replaced(Path(target)) as temporary:
                    shutil.copyfile(path, temporary)

    def put_bytes(self, data: bytes, name: str) -> None:
        """Write an object; what was there under this name is replaced.

        Raises:
            StoreError: It isn't there; a part of it may be, where the store isn't one of whole objects.
        """
        with self._asked("can't write", name):
            target = self._path(name)
            if self.folder is None:
                self._make_room(target)
                self._fs.pipe_file(target, data)
            else:
                with _replaced(Path(target)) as temporary:
                    temporary.write_bytes(data)

    def get_file(self, name: str, path: Path) -> bool:
        """Copy an object to a local file.

        Returns:
            False where there is no such object.

        Raises:
            StoreError: The store doesn't answer, or refuses.
            StorageError: The disk that the file is on is full.
        """
        with self._asked("can't read", name):
            try:
                self._fs.get_file(self._path(name), str(path))
            except FileNotFoundError as exc:
                _require_bucket(exc)
                return False
            except OSError as exc:
                if exc.errno in DISK_FULL:
                    # No store is full of what is read from it.
                    with translated("can't write", path):
                        raise
                raise
        return True

    def get_bytes(self, name: str) -> bytes | None:
        """An object's bytes; None where there is no such object.

        Raises:
            StoreError: The store doesn't answer, or refuses.
        """
        with self._asked("can't read", name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError as exc:
                _require_bucket(exc)
                return None

    def names(self) -> list[str]:
        """Names of all objects of the store, in order.

        Raises:
            StoreError: The store doesn't answer, or refuses.
        """
        with self._asked("can't list", ""):
            try:
                found = self._fs.find(self._root)
            except FileNotFoundError as exc:
                _require_bucket(exc)
                return []
        names = (str(path).removeprefix(self._root).lstrip("/") for path in found)
        return sorted(name for name in names if self.folder is None or not name.endswith(TEMPORARY_SUFFIX))

    def remove(self, name: str) -> None:
        """Remove an object; one that isn't there is no error.

        Raises:
            StoreError: The store doesn't answer, or refuses.
        """
        with self._asked("can't remove", name):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError as exc:
                _require_bucket(exc)
                return

    def remove_leftovers(self) -> None:
        """Remove what writers that were killed left unfinished; only a folder has such.

        Ordering: while the folder's lock is held, so that no writer is at work.

        Raises:
            StoreError: The folder can't be read or changed.
        """
        if self.folder is not None:
            with self._asked("can't tidy", ""):
                for path in sorted(self.folder.rglob(f".*{TEMPORARY_SUFFIX}")):
                    path.unlink()

    def read_versioned(self, name: str) -> Versioned | None:
        """A small object and its version; None where there is none.

        Raises:
            StoreError: The store doesn't answer, or refuses.
        """
        if not self.conditional:
            data = self.get_bytes(name)
            return None if data is None else Versioned(data=data, tag=_tag(data))
        with self._asked("can't read", name):
            bucket, key, _ = self._fs.split_path(self._path(name))
            try:
                answer = self._fs.call_s3("get_object", Bucket=bucket, Key=key)
            except FileNotFoundError as exc:
                _require_bucket(exc)
                return None
            return Versioned(data=self._body(answer), tag=str(answer["ETag"]))

    def write_if(self, name: str, data: bytes, expected: str | None) -> str | None:
        """Write a small object if its version is still the one that is expected.

        Args:
            name: Of the object.
            data: Its new bytes; not those that it has.
            expected: A tag that `read_versioned` or this method gave; None where there must be no such object yet.

        Returns:
            The new tag; None where another version is there, or none is and one should be.

        Raises:
            StoreError: The store doesn't answer, or refuses; it may have been written all the same.
        """
        if not self.conditional:
            there = self.read_versioned(name)
            if (None if there is None else there.tag) != expected:
                return None
            self.put_bytes(data, name)
            return _tag(data)
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        with self._asked("can't write", name):
            bucket, key, _ = self._fs.split_path(self._path(name))
            try:
                answer = self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
            except OSError as exc:
                _require_bucket(exc)
                status = _http_status(exc)
                # A condition on an object that is gone is answered with its absence.
                if status in (_CONDITION_FAILED, _CONDITION_RACED) or (status == _MISSING and expected is not None):
                    return None
                raise
        return str(answer["ETag"])

    def _body(self, answer: Any) -> bytes:
        from fsspec.asyn import sync  # noqa: PLC0415 - see above

        body = answer["Body"]
        try:
            return bytes(sync(self._fs.loop, body.read))
        finally:
            body.close()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_room(self, target: str) -> None:
        # Buckets have no folders; whatever else has, wants them made.
        if self._has_folders:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _asked(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as exc:
            where = f"{self.url}/{name}" if name else self.url
            if _is_without_bucket(exc):
                bucket = self._root.partition("/")[0]
                raise StoreMissing(
                    f"{action} {where}: there is no bucket {bucket} (make it, or correct syncer.store: buckets aren't "
                    "made by a run)"
                ) from exc
            raise StoreError(f"{action} {where}: {_words(exc)}") from exc


@contextmanager
def _replaced(target: Path) -> Iterator[Path]:
    """A name to write a file under, which takes the target's place then: whoever looks sees the old one or the new."""
    make_folder(target.parent)
    temporary = target.parent / temporary_name(target.name)
    try:
        yield temporary
        fsync_path(temporary)
        temporary.replace(target)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)


def _tag(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _response(error: BaseException) -> dict[str, Any]:
    """What the server answered, as the library's own error has it, which ours is made from."""
    response = getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def _http_status(error: OSError) -> int:
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_without_bucket(error: BaseException) -> bool:
    return bool(_response(error).get("Error", {}).get("Code") == _NO_BUCKET)


def _require_bucket(error: OSError) -> None:
    """What isn't there since nothing is must not look like an absence, which has a meaning."""
    if _is_without_bucket(error):
        raise error


def _words(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _WORDS_MAX else f"{text[:_WORDS_MAX]}..."
