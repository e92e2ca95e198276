"""Objects on whatever fsspec reaches: a real S3 server, a folder, and memory."""

from __future__ import annotations

import errno
import os

import pytest

from tests.support.store import S3Server, s3_environment, s3_server
from wan_diloco.errors import ConfigError, StorageError, StoreError, StoreMissing
from wan_diloco.storage import ObjectStore


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture(params=["s3", "file", "memory"])
def store(request, s3, tmp_path):
    if request.param == "s3":
        return ObjectStore.open(s3.new_place(), s3.endpoint)
    return ObjectStore.open((tmp_path / "store").as_uri() if request.param == "file" else f"memory://{tmp_path.name}")


def test_what_was_put_is_there_whole(store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 1000)
    store.put_file(path, "a/b/c.bin")
    store.put_bytes(b"small", "a/d")
    assert store.get_file("a/b/c.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert store.get_bytes("a/d") == b"small"
    assert store.names() == ["a/b/c.bin", "a/d"]


def test_a_put_replaces_what_was_there(store):
    store.put_bytes(b"one", "x")
    store.put_bytes(b"two", "x")
    assert store.get_bytes("x") == b"two"
    assert store.names() == ["x"]


def test_what_is_not_there_is_none_and_no_error(store, tmp_path):
    assert store.names() == []
    assert store.get_bytes("x") is None
    assert not store.get_file("x", tmp_path / "back")
    assert store.read_versioned("x") is None
    store.remove("x")


def test_what_was_removed_is_gone(store):
    store.put_bytes(b"one", "a/x")
    store.put_bytes(b"two", "a/y")
    store.remove("a/x")
    assert store.names() == ["a/y"]
    assert store.get_bytes("a/x") is None


def test_a_folder_has_the_old_object_or_the_new_one_whole(tmp_path, monkeypatch):
    place = tmp_path / "store"
    store = ObjectStore.open(place.as_uri())
    store.put_bytes(b"old", "a/lock")
    (tmp_path / "file").write_bytes(b"new")

    def full(descriptor):
        seen.append(store.names())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for put in (lambda: store.put_bytes(b"new", "a/lock"), lambda: store.put_file(tmp_path / "file", "a/lock")):
            with pytest.raises(StoreError, match=r"can't write file://.*/a/lock: .*No space left"):
                put()
    # What is being written has no name yet.
    assert seen == [["a/lock"], ["a/lock"]]
    assert store.get_bytes("a/lock") == b"old"
    assert [path.name for path in (place / "a").iterdir()] == ["lock"]


def test_what_killed_writers_left_in_a_folder_is_no_object_and_is_removed(tmp_path):
    store = ObjectStore.open((tmp_path / "store").as_uri())
    store.put_bytes(b"one", "a/x")
    left = tmp_path / "store" / "a" / ".y.123.4.tmp"
    left.write_bytes(b"half")
    assert store.names() == ["a/x"]
    store.remove_leftovers()
    assert not left.exists()
    assert store.get_bytes("a/x") == b"one"


def test_a_disk_that_is_full_while_an_object_is_fetched_is_no_fault_of_the_store(store, tmp_path, monkeypatch):
    store.put_bytes(b"one", "x")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store._fs, "get_file", full)
    with pytest.raises(StorageError, match="/back: the disk or the quota is full") as caught:
        store.get_file("x", tmp_path / "back")
    assert not isinstance(caught.value, StoreError)


def test_only_one_of_two_writers_that_saw_the_same_version_succeeds(store):
    assert store.write_if("lock", b"first", None) is not None
    assert store.write_if("lock", b"late", None) is None
    seen = store.read_versioned("lock")
    assert seen is not None
    assert seen.data == b"first"
    tag = store.write_if("lock", b"mine", seen.tag)
    assert tag is not None
    assert store.write_if("lock", b"yours", seen.tag) is None
    again = store.read_versioned("lock")
    assert again is not None
    assert (again.data, again.tag) == (b"mine", tag)


def test_a_condition_on_an_object_that_is_gone_fails(store):
    tag = store.write_if("lock", b"first", None)
    store.remove("lock")
    assert store.write_if("lock", b"second", tag) is None
    assert store.read_versioned("lock") is None


def test_a_large_file_goes_in_parts_and_comes_back_whole(s3, tmp_path):
    store = ObjectStore.open(s3.new_place(), s3.endpoint)
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (110 * 4096))  # 110 MiB: more than two parts of 50
    store.put_file(path, "large")
    assert store.get_file("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_a_bucket_that_is_not_there_is_an_error_that_names_it_and_no_absence(s3, tmp_path):
    store = ObjectStore.open("s3://nobody-made-this/prefix", s3.endpoint)
    (tmp_path / "file").write_bytes(b"two")
    asked = {
        "read": (
            lambda: store.get_bytes("x"),
            lambda: store.get_file("x", tmp_path / "back"),
            lambda: store.read_versioned("x"),
        ),
        "write": (
            lambda: store.put_bytes(b"", "x"),
            lambda: store.put_file(tmp_path / "file", "x"),
            lambda: store.write_if("x", b"two", None),
            lambda: store.write_if("x", b"two", '"a tag"'),
        ),
        "remove": (lambda: store.remove("x"),),
    }
    for action, questions in asked.items():
        for ask in questions:
            with pytest.raises(
                StoreMissing, match=f"can't {action} {store.url}/x: there is no bucket nobody-made-this "
            ):
                ask()
    with pytest.raises(StoreMissing, match="there is no bucket nobody-made-this "):
        store.names()


def test_a_server_that_is_down_is_an_error_of_one_line_and_not_an_absence(tmp_path):
    with s3_environment():
        server = S3Server()
        store = ObjectStore.open(server.new_place(), server.endpoint)
        store.put_bytes(b"one", "x")
        server.stop()
        (tmp_path / "file").write_bytes(b"two")
        asked = (
            lambda: store.get_bytes("x"),
            lambda: store.get_file("x", tmp_path / "back"),
            lambda: store.put_bytes(b"two", "x"),
            lambda: store.put_file(tmp_path / "file", "x"),
            store.names,
            lambda: store.remove("x"),
            lambda: store.read_versioned("x"),
            lambda: store.write_if("x", b"two", None),
        )
        for ask in asked:
            with pytest.raises(StoreError) as caught:
                ask()
            assert "\n" not in str(caught.value)
            assert store.url in str(caught.value)
        server.start()
        assert store.get_bytes("x") == b"one"
        server.stop()


def test_an_address_that_nothing_knows_is_a_mistake_in_the_configuration():
    with pytest.raises(ConfigError, match=r"syncer\.store"):
        ObjectStore.open("gopher://hole/prefix")
