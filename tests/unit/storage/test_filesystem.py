"""Which of the system's refusals another try may end otherwise, and which none does."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from wan_diloco.errors import EXIT_CONFIG, EXIT_TEMPORARY, ConfigError, StorageError
from wan_diloco.storage.filesystem import ensure_folder, is_still_at, translated

if TYPE_CHECKING:
    from pathlib import Path

FOR_GOOD = ["EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP"]
FOR_NOW = ["ENOSPC", "EDQUOT", "EIO", "EMFILE", "ENFILE", "EAGAIN", "ENOMEM", "ENOENT"]


@pytest.mark.parametrize(
    ("name", "exit_code"), [*((name, EXIT_CONFIG) for name in FOR_GOOD), *((name, EXIT_TEMPORARY) for name in FOR_NOW)]
)
def test_the_exit_code_says_whether_to_try_again(tmp_path: Path, name: str, exit_code: int) -> None:
    number = getattr(errno, name)
    with pytest.raises(StorageError) as caught, translated("can't open", tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.exit_code == exit_code
    assert str(caught.value).startswith(f"can't open {tmp_path}: ")


@pytest.mark.parametrize(("name", "kind"), [("EIO", StorageError), ("EMFILE", StorageError), ("EROFS", ConfigError)])
def test_a_folder_that_can_not_be_had_just_now_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception]
) -> None:
    number = getattr(errno, name)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind, match=os.strerror(number)):
        ensure_folder(tmp_path)


def test_a_link_that_leads_nowhere_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "logs").symlink_to("nothing")
    with pytest.raises(ConfigError, match="a symbolic link that leads nowhere, and a folder is needed"):
        ensure_folder(tmp_path / "logs")


def test_a_folder_whose_parent_is_gone_is_not_made_where_the_parent_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ensure_folder(tmp_path / "state" / "snapshots", parents=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_at_its_path_until_it_is_removed_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        assert is_still_at(file.fileno(), path)
        path.rename(tmp_path / "moved")
        assert not is_still_at(file.fileno(), path)
        path.touch()
        assert not is_still_at(file.fileno(), path)
        path.unlink()
        path.symlink_to(path)
        assert not is_still_at(file.fileno(), path)

        def fail(*_: object, **__: object) -> os.stat_result:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(type(path), "stat", fail)
        assert is_still_at(file.fileno(), path), "a disk that doesn't answer proves nothing"
