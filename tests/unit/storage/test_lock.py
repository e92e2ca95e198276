"""One owner a folder, also across processes, and a message that says who it is."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from wan_diloco.errors import EXIT_CONFIG, ConfigError, StateDamaged, StorageLocked, StorageUnusable
from wan_diloco.storage import FolderLock, owner_of

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = """
import sys
from pathlib import Path
from wan_diloco.storage.lock import FolderLock
with FolderLock(Path(sys.argv[1]), "syncer"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_owner_learns_who_the_first_is(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with FolderLock(folder, "syncer") as first:
        assert first.held is True
        with pytest.raises(StorageLocked) as caught:
            FolderLock(folder, "learner").acquire()
        message = str(caught.value)
        assert str(folder) in message
        assert f"the syncer with pid {os.getpid()} on {socket.gethostname()}" in message
    with FolderLock(folder, "learner"):
        pass


def test_who_asks_for_the_owner_takes_nothing_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert owner_of(folder) == ""
    lock = FolderLock(folder, "syncer")
    with lock:
        assert owner_of(folder) == f"the syncer with pid {os.getpid()} on {socket.gethostname()}"
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert owner_of(folder) == ""
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == left
    with FolderLock(folder, "syncer"):
        pass


def test_the_lock_holds_across_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(StorageLocked, match=f"pid {process.pid} "):
            FolderLock(tmp_path, "second").acquire()
        process.kill()
        process.wait()
    with FolderLock(tmp_path, "second") as lock:
        assert lock.held


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff"])
def test_an_unreadable_note_leaves_the_owner_unnamed(tmp_path: Path, note: bytes) -> None:
    with FolderLock(tmp_path, "syncer"):
        (tmp_path / "owner.lock").write_bytes(note)
        with pytest.raises(StorageLocked, match="in use by another process"):
            FolderLock(tmp_path, "second").acquire()


def test_an_unwritable_folder_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        FolderLock(tmp_path / "file" / "state", "syncer").acquire()
    assert str(tmp_path / "file" / "state") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "syncer")
    lock.acquire()
    lock.release()
    lock.release()
    assert not lock.held


def test_removing_the_lock_file_lets_no_second_owner_in(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "syncer"):
        (tmp_path / "owner.lock").unlink()
        with pytest.raises(StorageLocked, match="in use by another process"):
            FolderLock(tmp_path, "second").acquire()
        assert owner_of(tmp_path) == "another process"


def test_the_holder_puts_a_note_back_that_is_gone_and_holds_the_new_file(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "syncer") as lock:
        (tmp_path / "owner.lock").unlink()
        lock.require_there()
        with pytest.raises(StorageLocked, match=f"the syncer with pid {os.getpid()} "):
            FolderLock(tmp_path, "second").acquire()
    with FolderLock(tmp_path, "second"):
        pass


def test_a_note_that_can_not_be_put_back_ends_nobody_while_the_folder_is_locked(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "syncer") as lock:
        (tmp_path / "owner.lock").unlink()
        (tmp_path / "owner.lock").mkdir()
        lock.require_there()
        (tmp_path / "owner.lock").rmdir()
        lock.require_there()
        assert "syncer" in (tmp_path / "owner.lock").read_text()


@pytest.fixture
def no_folder_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that locks files only."""
    flock = fcntl.flock

    def files_only(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", files_only)


@pytest.mark.usefixtures("no_folder_locks")
def test_where_folders_can_not_be_locked_the_file_does_and_who_lost_it_learns_so(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "syncer") as lock:
        with pytest.raises(StorageLocked, match="the syncer with pid"):
            FolderLock(tmp_path, "second").acquire()
        assert owner_of(tmp_path).startswith("the syncer with pid")
        (tmp_path / "owner.lock").unlink()
        with FolderLock(tmp_path, "second"), pytest.raises(StateDamaged, match=r"owner\.lock was removed while"):
            lock.require_there()


def test_a_lock_file_that_is_replaced_while_it_is_locked_is_locked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, replaced = fcntl.flock, []

    def replacing(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) and not replaced:
            replaced.append(True)
            (tmp_path / "owner.lock").unlink()
            (tmp_path / "owner.lock").touch()

    monkeypatch.setattr(fcntl, "flock", replacing)
    with FolderLock(tmp_path, "syncer") as lock:
        assert replaced
        assert owner_of(tmp_path).startswith("the syncer with pid")
        lock.require_there()


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_is_not_the_one_that_was_locked_is_told(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "state"
    with FolderLock(folder, "syncer") as lock:
        lock.require_there()
        if how == "removed":
            shutil.rmtree(folder)
        else:
            folder.rename(tmp_path / "elsewhere")
        if how == "replaced":
            shutil.copytree(tmp_path / "elsewhere", folder)
        with pytest.raises(StateDamaged, match=r"state was removed, moved away or replaced while the syncer") as caught:
            lock.require_there()
        assert folder.exists() is (how == "replaced")
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize("what", ["folder", "link", "dangling link"])
def test_something_else_in_the_lock_files_place_is_no_passing_trouble(tmp_path: Path, what: str) -> None:
    path = tmp_path / "owner.lock"
    if what == "folder":
        path.mkdir()
    else:
        (tmp_path / "other").touch()
        path.symlink_to("other" if what == "link" else "nothing")
    with pytest.raises(StorageUnusable, match=r"can't open .*owner\.lock: it is a") as caught:
        FolderLock(tmp_path, "syncer").acquire()
    assert caught.value.exit_code == EXIT_CONFIG
