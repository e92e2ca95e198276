"""A syncer that is away for long and comes back: everybody trains on, and is there again soon, one after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from tests.integration.learner.test_in_process import Learner, syncer, two_regions
from wan_diloco.simulation.virtual_loop import VirtualTimeLoop, run_virtual
from wan_diloco.transport.interface import Session
from wan_diloco.transport.memory import Link, MemoryNetwork

NAMES = [f"region-{number}" for number in range(8)]
STEP_S = 1.0
AWAY_S = 90.0


def test_eight_learners_are_back_within_ten_seconds_and_not_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.set_num_threads(1)
    config = two_regions(tmp_path, NAMES, run={"tokens": 10_000 * 256})
    back_s: list[float] = []

    async def scene() -> tuple[list[int], list[int]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        async with (
            MemoryNetwork(link=Link(delay_s=0.02)) as network,
            syncer(config, tmp_path / "run", network, loop.clock) as service,
            asyncio.TaskGroup() as group,
        ):
            serving = group.create_task(service.run())
            learners = [Learner(config, index, network, loop.clock) for index in range(len(NAMES))]
            tasks = [group.create_task(learner.uplink.run()) for learner in learners]
            tasks += [group.create_task(learner.train(STEP_S)) for learner in learners]
            await asyncio.sleep(10.5 * STEP_S)
            network.stop_listening(in_order=False)
            before = [learner.trainer.local_step for learner in learners]
            await asyncio.sleep(AWAY_S)
            after = [learner.trainer.local_step for learner in learners]
            opened_s, connected = loop.time(), service.connected

            def noted(session: Session) -> None:
                back_s.append(loop.time() - opened_s)
                connected(session)

            service.connected = noted  # type: ignore[method-assign]
            again = network.server(service)
            await again.start()
            await asyncio.sleep(10.0)
            for task in tasks:
                task.cancel()
            service.stop()
            await serving
            return before, after

    before, after = run_virtual(scene())
    assert min(before) >= 5, "all of them trained"
    assert [late - early for early, late in zip(before, after, strict=True)] == [AWAY_S / STEP_S] * len(NAMES)
    assert len(back_s) == len(NAMES), "each is back within ten seconds, and stays"
    assert max(back_s) - min(back_s) > 0.1
