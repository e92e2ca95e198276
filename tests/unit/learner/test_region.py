"""Who is in a process group."""

from __future__ import annotations

import pytest
import torch

from wan_diloco.errors import ConfigError
from wan_diloco.learner.region import learner_group


def test_a_process_by_itself_is_a_group() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    with learner_group({}) as group:
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
    with pytest.raises(ConfigError, match=problem), learner_group(variables):
        pytest.fail("no group can be formed")
