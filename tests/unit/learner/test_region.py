"""Who is in a process group."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
import torch

from wan_diloco.errors import ConfigError, TransportError
from wan_diloco.learner import region
from wan_diloco.learner.region import file_group, learner_group, torchrun_meeting


def test_a_process_by_itself_is_a_group() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    assert torchrun_meeting({}) is None
    with learner_group(None) as group:
        assert (group.rank, group.world_size) == (0, 1)
        assert group.average([parameter], 2.0) == 2.0
    assert torch.equal(parameter.grad, torch.ones(2))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT isn't set, but RANK is"),
        (
            {"RANK": "first", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            "RANK, WORLD_SIZE and MASTER_PORT are numbers",
        ),
    ],
)
def test_variables_that_make_no_group_are_refused(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        torchrun_meeting(variables)


def test_a_group_with_a_rank_missing_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none of it takes a step which the others don't take."""
    monkeypatch.setattr(region, "_TIMEOUT", dt.timedelta(seconds=0.2))
    with (
        pytest.raises(TransportError, match="the group of 2 doesn't meet: "),
        file_group(tmp_path / "store", 0, 2),
    ):
        pytest.fail("one is missing")
