"""Snapshots: one moment, whole or invisible, and never the loss of the last good one."""

from __future__ import annotations

import errno
import json
import os
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.support.damage import flip
from tests.support.snapshots import save_snapshot
from wan_diloco.errors import CheckpointError, ConfigError, StorageError
from wan_diloco.storage import (
    Snapshot,
    keep_last,
    latest_snapshot,
    load_snapshot,
    newest_manifest,
    remove_leftovers,
    snapshot,
    tensor_file,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt


def test_tensors_and_manifest_come_back_to_the_bit(tmp_path: Path) -> None:
    exact = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    tensors: dict[str, torch.Tensor | npt.NDArray[np.generic]] = {
        "exact": exact,
        "transposed": exact.T,
        "tied": exact,
        "half": exact.to(torch.bfloat16),
        "counts": np.array([10251184259, -1], dtype=np.int64),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, requires_grad=True),
    }
    save_snapshot(tmp_path, "merge-1", tensors, {"tokens": 10251184259, "fragments": [{"version": [0, 3]}]})
    loaded = load_snapshot(tmp_path, "merge-1")
    assert set(loaded.tensors) == set(tensors)
    for name, tensor in loaded.tensors.items():
        expected = torch.as_tensor(tensors[name]).detach()
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    assert loaded.manifest == {"tokens": 10251184259, "fragments": [{"version": [0, 3]}]}
    assert sorted(path.name for path in (tmp_path / "merge-1").iterdir()) == ["manifest.json", "tensors.safetensors"]


def test_two_writes_of_one_name_at_once_leave_one_whole_snapshot(tmp_path: Path) -> None:
    errors: list[CheckpointError | StorageError] = []

    def write(value: float) -> None:
        try:
            save_snapshot(tmp_path, "merge-1", {"x": torch.full((10_000,), value)}, {"value": value})
        except (CheckpointError, StorageError) as exc:
            errors.append(exc)

    threads = [threading.Thread(target=write, args=(float(index),)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    loaded = load_snapshot(tmp_path, "merge-1")
    assert torch.equal(loaded.tensors["x"], torch.full((10_000,), loaded.manifest["value"]))
    assert [path.name for path in tmp_path.iterdir()] == ["merge-1"]


def test_the_newest_is_found_by_number_and_not_by_letters(tmp_path: Path) -> None:
    assert latest_snapshot(tmp_path / "nowhere") is None
    assert latest_snapshot(tmp_path) is None
    for number in (9, 10, 2):
        save_snapshot(tmp_path, f"merge-{number}", {"x": torch.zeros(1)}, {"number": number})
    latest = latest_snapshot(tmp_path)
    assert latest is not None
    assert (latest.name, latest.snapshot.manifest, latest.skipped) == ("merge-10", {"number": 10}, ())


@pytest.mark.parametrize(
    "damage", ["tensors", "manifest", "cut", "no tensors", "no manifest", "garbage", "newer format"]
)
def test_an_older_snapshot_stands_in_for_a_damaged_one_and_it_is_reported(tmp_path: Path, damage: str) -> None:
    for number in (1, 2):
        save_snapshot(tmp_path, f"merge-{number}", {"x": torch.full((8,), float(number))}, {"number": number})
    tensors = tmp_path / "merge-2" / "tensors.safetensors"
    manifest = tmp_path / "merge-2" / "manifest.json"
    match damage:
        case "tensors":
            flip(tensors, tensors.stat().st_size - 1)
        case "manifest":
            manifest.write_text(manifest.read_text().replace('"number": 2', '"number": 7'))
        case "cut":
            os.truncate(tensors, 10)
        case "no tensors":
            tensors.unlink()
        case "no manifest":
            manifest.unlink()
        case "garbage":
            manifest.write_bytes(b"\xff{[")
        case _:
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    latest = latest_snapshot(tmp_path)
    assert latest is not None
    assert latest.name == "merge-1"
    assert torch.equal(latest.snapshot.tensors["x"], torch.ones(8))
    # What it says of itself is trusted where its manifest is whole.
    assert newest_manifest(tmp_path) == {"number": 2 if damage in {"tensors", "cut", "no tensors"} else 1}
    (skipped,) = latest.skipped
    assert skipped.name == "merge-2"
    assert str(tmp_path / "merge-2") in skipped.problem


def test_only_damaged_snapshots_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    save_snapshot(tmp_path, "merge-1", {"x": torch.zeros(1)}, {})
    (tmp_path / "merge-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 snapshots"):
        latest_snapshot(tmp_path)
    assert newest_manifest(tmp_path) is None


def test_a_good_snapshot_is_never_replaced_and_a_damaged_one_is(tmp_path: Path) -> None:
    save_snapshot(tmp_path, "merge-1", {"x": torch.zeros(1)}, {"try": 1})
    with pytest.raises(CheckpointError, match="exists already and is good"):
        save_snapshot(tmp_path, "merge-1", {"x": torch.ones(1)}, {"try": 2})
    assert load_snapshot(tmp_path, "merge-1").manifest == {"try": 1}
    (tmp_path / "merge-1" / "tensors.safetensors").unlink()
    save_snapshot(tmp_path, "merge-1", {"x": torch.ones(1)}, {"try": 2})
    assert load_snapshot(tmp_path, "merge-1").manifest == {"try": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["merge-1"]


def test_a_full_disk_leaves_earlier_snapshots_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_snapshot(tmp_path, "merge-1", {"x": torch.zeros(1)}, {})

    def full(descriptor: int, buffers: list[bytes], offset: int) -> int:
        os.pwrite(descriptor, b"half", offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_file, "write_all", full)
    with pytest.raises(StorageError, match=r"can't write .*merge-2: the disk or the quota is full"):
        save_snapshot(tmp_path, "merge-2", {"x": torch.zeros(1)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["merge-1"]


def test_what_a_killed_writer_left_is_invisible_and_swept(tmp_path: Path) -> None:
    save_snapshot(tmp_path, "merge-1", {"x": torch.zeros(1)}, {})
    (tmp_path / "merge-1").rename(tmp_path / ".merge-2.99.0.tmp")
    assert latest_snapshot(tmp_path) is None
    assert remove_leftovers(tmp_path) == [".merge-2.99.0.tmp"]


def test_keeping_counts_good_snapshots_only(tmp_path: Path) -> None:
    for number in range(1, 6):
        save_snapshot(tmp_path, f"merge-{number}", {"x": torch.zeros(1)}, {})
    (tmp_path / "merge-5" / "tensors.safetensors").unlink()
    (tmp_path / "notes.txt").write_text("mine")
    assert keep_last(tmp_path, 2) == ["merge-2", "merge-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merge-3", "merge-4", "merge-5", "notes.txt"]
    assert keep_last(tmp_path, 2) == []
    with pytest.raises(ValueError, match="at least one"):
        keep_last(tmp_path, 0)


def test_what_is_known_to_be_good_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 4):
        save_snapshot(tmp_path, f"merge-{number}", {"x": torch.zeros(1)}, {})
    read = []
    file_digest = tensor_file.file_digest
    monkeypatch.setattr(snapshot, "file_digest", lambda path: read.append(path.parent.name) or file_digest(path))
    assert keep_last(tmp_path, 2, ["merge-3"]) == ["merge-1"]
    assert read == ["merge-2"]


def test_each_tensor_is_let_go_of_as_soon_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"part-{index}": torch.full((1000,), float(index)) for index in range(5)}
    watched = [weakref.ref(tensor) for tensor in tensors.values()]
    alive = []
    write_all = tensor_file.write_all

    def watching(descriptor: int, buffers: list[bytes], offset: int) -> int:
        alive.append(sum(reference() is not None for reference in watched))
        return write_all(descriptor, buffers, offset)

    monkeypatch.setattr(tensor_file, "write_all", watching)
    Snapshot(tensors=tensors, manifest={}).write(tmp_path, "merge-1")
    # The header, then one tensor less each time.
    assert alive[0] == 5
    assert alive[1:] == sorted(alive[1:], reverse=True)
    assert alive[-1] <= 1
    assert torch.equal(load_snapshot(tmp_path, "merge-1").tensors["part-3"], torch.full((1000,), 3.0))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a\n", "x" * 300])
def test_names_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="can't be the name"):
        save_snapshot(tmp_path, name, {"x": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match="can't be the name"):
        load_snapshot(tmp_path, name)


def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save_snapshot(tmp_path, "merge-1", {}, {"loss": float("inf")})
    with pytest.raises(TypeError):
        save_snapshot(tmp_path, "merge-1", {}, {"path": object()})
    assert not list(tmp_path.iterdir())


def test_others_may_read_a_snapshot_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save_snapshot(tmp_path, "state-1", {"a": torch.ones(3)}, {})
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_a_snapshot_makes_no_folder_anew_whose_parent_was_removed(tmp_path: Path) -> None:
    save_snapshot(tmp_path / "snapshots", "state-1", {"x": torch.zeros(1)}, {})
    with pytest.raises(ConfigError):
        save_snapshot(tmp_path / "state" / "snapshots", "state-1", {"x": torch.zeros(1)}, {})
    assert not (tmp_path / "state").exists()
