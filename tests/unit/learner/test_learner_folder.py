"""A region's folder has one learner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.learner.conftest import MakeConfig
from wan_diloco.clock import SystemClock
from wan_diloco.errors import EXIT_CONFIG, StorageLocked
from wan_diloco.learner.trainer import checkpoint_folder, run_learner
from wan_diloco.storage import FolderLock


def test_a_second_learner_of_a_region_is_refused_before_it_says_a_word(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wan_diloco.learner.trainer.UplinkProcess", None)
    folder = tmp_path / "run"
    with (
        FolderLock(checkpoint_folder(folder, "east").parent, "learner of east"),
        pytest.raises(StorageLocked, match=f"in use by the learner of east with pid {os.getpid()}") as caught,
    ):
        run_learner(
            make_config(),
            region="east",
            run_folder=folder,
            resume=True,
            syncer="",
            threads=1,
            clock=SystemClock(),
            load=make_config,
        )
    assert caught.value.exit_code == EXIT_CONFIG
    assert [path.name for path in (folder / "learners").rglob("*")] == ["east", "owner.lock"]
