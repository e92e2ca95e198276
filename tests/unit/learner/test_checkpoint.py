"""A learner's checkpoint: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wan_diloco.errors import CheckpointError, StorageError
from wan_diloco.learner.checkpoint import CheckpointWriter, LearnerCounters, load_checkpoint, save_checkpoint
from wan_diloco.units import LocalStep

COUNTERS = LearnerCounters(run="tiny", local_step=LocalStep(7), tokens=10_251_184_259, unit=9, global_step=6)


def moments() -> dict[str, torch.Tensor]:
    return {"exp_avg.w": torch.arange(6.0).view(2, 3), "step.w": torch.tensor(7.0)}


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a" / "b", COUNTERS, moments())
    found = load_checkpoint(tmp_path / "a" / "b", "tiny")
    assert found is not None
    assert found[0] == COUNTERS
    assert found[1].keys() == moments().keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in moments().items())


def test_there_is_none_in_an_empty_folder(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, "tiny") is None


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, COUNTERS, moments())
    with pytest.raises(CheckpointError, match="belongs to the run 'tiny', not 'other'"):
        load_checkpoint(tmp_path, "other")


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path, COUNTERS, moments())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-3]
    elif damage == "flip":
        data[-2] ^= 1
    else:
        data = bytearray(b"" if damage == "empty" else b"not a checkpoint")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(tmp_path, "tiny")


def test_values_are_those_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Training goes on in place while the disk is busy."""
    writer = CheckpointWriter(tmp_path, pytest.fail)
    tensors = moments()
    assert writer.save(COUNTERS, tensors)
    for tensor in tensors.values():
        tensor.fill_(-1)
    writer.close()
    found = load_checkpoint(tmp_path, "tiny")
    assert found is not None
    assert all(torch.equal(found[1][name], tensor) for name, tensor in moments().items())


def test_a_disk_that_refuses_is_told_and_the_last_one_stands(tmp_path: Path) -> None:
    reports: list[str] = []
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    writer = CheckpointWriter(blocked / "checkpoint", reports.append)
    writer.save(COUNTERS, moments())
    writer.close()
    assert len(reports) == 1
    assert "last one stands" in reports[0]
    with pytest.raises(StorageError):
        save_checkpoint(blocked / "checkpoint", COUNTERS, moments())
