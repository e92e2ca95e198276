"""One owner a folder, also across processes, and a message that says who it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from wan_diloco.errors import ConfigError, StorageLocked
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
