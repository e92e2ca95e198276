"""Atomic files: whole or not at all, and clear sentences when the system refuses."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from wan_diloco.errors import ConfigError, StorageError
from wan_diloco.storage import read_json, remove_leftovers, write_bytes, write_json, write_text
from wan_diloco.storage.filesystem import ensure_folder, write_all

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", memoryview(b"one"))
    write_text(tmp_path / "b", "zwei \u2713")
    write_json(tmp_path / "c", {"tokens": 10251184259, "list": [1, None, "x"]})
    assert (tmp_path / "a").read_bytes() == b"one"
    assert (tmp_path / "b").read_text(encoding="utf-8") == "zwei \u2713"
    assert read_json(tmp_path / "c") == {"tokens": 10251184259, "list": [1, None, "x"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_files_are_readable_for_others_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_bytes(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_bytes(path, b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match=r"can't write .*state: the disk or the quota is full"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["state"]


def test_the_file_is_flushed_before_its_name_and_the_name_before_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    target = tmp_path / "a"
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")  # noqa: PTH112
        seen.append(("folder" if is_folder else "file", target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write_bytes(target, b"x")
    assert seen == [("file", False), ("folder", True)]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"can't write .*nowhere/a: No such file"):
        write_bytes(tmp_path / "nowhere" / "a", b"x")
    with pytest.raises(StorageError, match=r"can't read .*nowhere"):
        read_json(tmp_path / "nowhere")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": 1} x'])
def test_what_is_no_json_object_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(StorageError, match=str(tmp_path)):
        read_json(tmp_path / "a")


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_swept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".state.123.0.tmp").write_bytes(b"half")
    staging = tmp_path / ".merge-1.123.1.tmp"
    staging.mkdir()
    (staging / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / "keep.tmp").write_bytes(b"mine")
    assert remove_leftovers(tmp_path) == [".merge-1.123.1.tmp", ".state.123.0.tmp"]
    assert [path.name for path in tmp_path.iterdir()] == ["keep.tmp"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev

    def stingy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return pwritev(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "pwritev", stingy)
    parts: list[bytes | memoryview] = [b"", b"abcdefg", memoryview(b"hi"), b"", b"jklmno"]
    descriptor = os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR)
    try:
        assert write_all(descriptor, parts, 2) == 15
    finally:
        os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"\0\0abcdefghijklmno"


def test_more_buffers_than_one_call_takes_are_written(tmp_path: Path) -> None:
    parts = [bytes([index % 256]) for index in range(3000)]
    descriptor = os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR)
    try:
        assert write_all(descriptor, parts, 0) == 3000
    finally:
        os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"".join(parts)


def test_a_folder_that_is_a_file_or_can_not_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="a folder is needed"):
        ensure_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="can't write into this folder"):
        ensure_folder(tmp_path / "file" / "below")
