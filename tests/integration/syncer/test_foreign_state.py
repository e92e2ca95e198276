"""A syncer is started with a folder in which its run isn't: it ends and says so, and the learners come to no harm."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.support.syncer import tiny_config
from tests.support.syncer_scene import Learner, advance, crash_after, learners, syncer
from wan_diloco.errors import EXIT_CONFIG, ConfigError
from wan_diloco.protocol.messages import Refused, Stop
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import LearnerId

CONFIG = tiny_config()


def test_learners_of_a_run_survive_a_syncer_that_knows_nothing_of_it(tmp_path):
    torch.set_num_threads(1)

    async def wrong(before):
        async with MemoryNetwork() as network, syncer(network, CONFIG, tmp_path / "wrong", resume=True) as made:
            east = Learner(network.connection(LearnerId(before[0].name)), CONFIG, before[0].name, before[0].values)
            east.go_on(before[0])
            lives = asyncio.get_running_loop().create_task(east.run())
            await asyncio.wait([made.task])
            await east.leave()
            await lives
            assert not [message for message in east.heard if isinstance(message, Refused | Stop)]
            with pytest.raises(ExceptionGroup) as caught:
                made.task.result()
        (problem,) = caught.value.exceptions
        assert isinstance(problem, ConfigError)
        assert problem.exit_code == EXIT_CONFIG
        assert f"it is at step {before[0].local_step}, and nothing is known of that here" in str(problem)
        return [east, *before[1:]]

    async def right(before):
        async with (
            MemoryNetwork() as network,
            syncer(network, CONFIG, tmp_path / "right", resume=True) as made,
            learners(CONFIG, network.connection, before) as group,
        ):
            assert {one.incarnation for one in group} == {1}, "lives stand"
            await advance(group, made, 3)
            assert made.service.status()["balance"] == 0

    before = asyncio.run(crash_after(CONFIG, tmp_path / "right", 5))
    asyncio.run(right(asyncio.run(wrong(before))))
