"""Learners that nobody listed, with real syncer, maths and bytes, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.learner.test_in_process import Learner, syncer, two_regions
from wan_diloco.clock import ManualClock
from wan_diloco.config import RunConfig
from wan_diloco.errors import EXIT_AUTH, EXIT_TEMPORARY
from wan_diloco.learner.setup import open_shard
from wan_diloco.simulation.virtual_loop import VirtualTimeLoop, run_virtual
from wan_diloco.syncer.service import SyncerService
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.units import LearnerId, ShardId

STEP_S = 0.5
LEASE_S = 3.0
PERIOD_S = 3.0


class World:
    """A run of two listed regions that others may join."""

    def __init__(
        self,
        config: RunConfig,
        network: MemoryNetwork,
        service: SyncerService,
        clock: ManualClock,
        group: asyncio.TaskGroup,
    ) -> None:
        self.config = config
        self.network = network
        self.service = service
        self.clock = clock
        self.group = group
        self.tasks: dict[str, list[asyncio.Task[None]]] = {}

    def start(self, name: str) -> Learner:
        self.network.restore(LearnerId(name))
        learner = Learner(self.config, 0, self.network, self.clock, name=name)
        self.tasks[name] = [
            self.group.create_task(learner.uplink.run()),
            self.group.create_task(learner.train(STEP_S)),
        ]
        return learner

    def kill(self, name: str) -> None:
        self.network.cut(LearnerId(name))
        for task in self.tasks[name]:
            task.cancel()

    async def until(self, holds: Callable[[], bool], limit_s: float = 120.0) -> None:
        async with asyncio.timeout(limit_s):
            while not holds():  # noqa: ASYNC110 - virtual time passes only so
                await asyncio.sleep(0.03)

    def merged(self, name: str) -> int:
        return self.service.state.participation[LearnerId(name)]

    def downlink_bytes(self, name: str) -> int:
        found: dict[str, Any] = self.service.status()["traffic"]  # type: ignore[assignment] # an object
        return int(found[name]["downlink_bytes"])

    def is_named(self, name: str) -> bool:
        """Whether a round was closed with work of this learner, fresh or late."""
        return any(
            note.learner_id == name
            for updates in self.service.state.updates
            for update in updates
            for note in update.merged
        )

    def learner(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.service.status()
        return next(one for one in found["learners"] if one["learner_id"] == name)


@contextlib.asynccontextmanager
async def world(
    folder: Path, *, spare_shards: int, learners_max: int, **tables: dict[str, Any]
) -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    config = two_regions(
        folder,
        run={"tokens": 10_000 * 64},
        data={"shards": 2 + spare_shards},
        unlisted={"learners_max": learners_max},
        sync={"membership_lease": f"{LEASE_S}s", **tables.pop("sync", {})},
        **tables,
    )
    async with (
        MemoryNetwork(link=Link(delay_s=0.02)) as network,
        syncer(config, folder / "run", network, loop.clock) as service,
        asyncio.TaskGroup() as group,
    ):
        serving = group.create_task(service.run())
        made = World(config, network, service, loop.clock, group)
        for name in ("east", "west"):
            made.start(name)
        await made.until(lambda: made.merged("east") >= 2 and made.merged("west") >= 2)
        yield made
        for name in made.tasks:
            made.kill(name)
        service.stop()
        await serving


def play(
    folder: Path,
    scene: Callable[[World], Coroutine[Any, Any, None]],
    *,
    spare_shards: int = 1,
    learners_max: int = 2,
    **tables: dict[str, Any],
) -> None:
    async def whole() -> None:
        async with world(folder, spare_shards=spare_shards, learners_max=learners_max, **tables) as made:
            await scene(made)
            status = made.service.status()
            assert status["balance"] == 0
            assert status["repeated_units"] == 0

    (folder / "run").mkdir()
    torch.set_num_threads(1)
    run_virtual(whole())


def test_who_joins_reads_data_of_its_own_and_is_merged_and_shown(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        first, second = made.start("spot-1"), made.start("spot-2")
        await made.until(lambda: made.merged("spot-1") >= 3 and made.merged("spot-2") >= 3)
        position = {name: learner.trainer.position for name, learner in (("spot-1", first), ("spot-2", second))}
        assert {one.shard for one in position.values()} == {2, 3}
        for name, learner in (("spot-1", first), ("spot-2", second)):
            shard = position[name].shard
            assert shard is not None
            read, own = learner.trainer._replica.units.batch(5), open_shard(made.config, shard).batch(5)
            assert all(map(torch.equal, read, own)), "the batches are those of its shard"
            assert made.learner(name)["shard"] == shard
        traffic: dict[str, Any] = made.service.status()["traffic"]  # type: ignore[assignment] # an object
        await made.until(lambda: made.merged("spot-1") >= 5)
        assert traffic["spot-1"]["uplink_bytes"] > 0
        assert made.service.status()["rejected"] == {}

    play(tmp_path, scene, spare_shards=2)


def test_who_is_one_too_many_or_finds_no_data_is_told_so_by_its_exit_code(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        made.start("spot-1")
        await made.until(lambda: made.merged("spot-1") >= 1)
        second = made.start("spot-2")
        await made.until(lambda: second.trainer.exit is not None)
        assert second.trainer.exit is not None
        assert second.trainer.exit.exit_code == EXIT_TEMPORARY
        made.kill("spot-1")
        await asyncio.sleep(2 * LEASE_S)
        again = made.start("spot-2")
        await made.until(lambda: made.merged("spot-2") >= 1)
        assert again.trainer.position.shard == 2
        third = made.start("spot-3")
        await made.until(lambda: third.trainer.exit is not None)
        assert third.trainer.exit is not None
        assert third.trainer.exit.exit_code == EXIT_AUTH
        traffic: dict[str, Any] = made.service.status()["traffic"]  # type: ignore[assignment] # an object
        assert {"spot-1", "spot-2"} <= traffic.keys(), "of those that took part"
        assert "spot-3" not in traffic, "a name that was only said is in no books"

    play(tmp_path, scene)


def test_who_was_cut_off_and_lost_its_data_goes_on_as_another_life_of_the_same_process(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        cut_off = made.start("spot-1")
        await made.until(lambda: made.merged("spot-1") >= 2)
        made.network.cut(LearnerId("spot-1"))
        await asyncio.sleep(2 * LEASE_S)
        trained = cut_off.trainer.local_step
        other = made.start("spot-2")
        await made.until(lambda: made.merged("spot-2") >= 1)
        committed = made.service.state.units[ShardId(2)]
        assert other.trainer.position.shard == 2
        made.kill("spot-2")
        await asyncio.sleep(2 * LEASE_S)
        assert cut_off.trainer.local_step > trained, "training never stops"
        made.network.restore(LearnerId("spot-1"))
        await made.until(lambda: made.learner("spot-1")["incarnation"] == 2)
        await made.until(lambda: all(one.resync > 0 for one in cut_off.trainer.position.fragments))
        assert cut_off.trainer.exit is None
        before = made.merged("spot-1")
        await made.until(lambda: made.merged("spot-1") >= before + 2)
        assert cut_off.trainer.position.incarnation == 2
        assert made.service.state.units[ShardId(2)] > committed

    play(tmp_path, scene)


def test_a_joiner_whose_downlink_is_under_the_rate_of_the_updates_keeps_near_the_head_and_is_merged(
    tmp_path: Path,
) -> None:
    share = 0.5

    async def scene(made: World) -> None:
        before, begun_s = made.downlink_bytes("east"), made.clock.now_s()
        await asyncio.sleep(PERIOD_S * 4)
        rate = (made.downlink_bytes("east") - before) / (made.clock.now_s() - begun_s)
        link = Link(delay_s=0.02, downlink_bytes_per_s=share * rate)
        made.network.set_link(LearnerId("spot-1"), link)
        joiner = made.start("spot-1")
        await made.until(lambda: joiner.trainer.local_step > 0)
        # What was published while it waited for its first values comes once more.
        await asyncio.sleep(2 * PERIOD_S / share)
        behind, installed = 0, made.downlink_bytes("spot-1")
        for _ in range(5):
            await asyncio.sleep(PERIOD_S)
            versions = [one.version.count for one in joiner.trainer.position.fragments]
            heads = [version.count for version in made.service.state.versions]
            behind = max(behind, *(head - count for head, count in zip(heads, versions, strict=True)))
        assert made.downlink_bytes("spot-1") - installed < 5 * PERIOD_S * rate, "it can't have had them all"
        # Each in its turn, every 1/share periods, and as new as it was when its sending began.
        assert behind <= 2 + 1 / share
        await made.until(lambda: made.is_named("spot-1"))
        made.kill("east")
        made.kill("west")
        # With one learner there is no quorum: the head stands still.
        await made.until(lambda: joiner.bases == made.service.state.digests)

    play(
        tmp_path,
        scene,
        spare_shards=1,
        sync={"fragments": 6, "period_steps": int(PERIOD_S / STEP_S), "quorum": 2},
        wire={"codec": "f32", "zstd": False},
    )


@pytest.mark.parametrize("learners_max", [0, 1])
def test_a_listed_regions_data_are_nobody_elses(tmp_path: Path, learners_max: int) -> None:
    async def scene(made: World) -> None:
        made.kill("west")
        await asyncio.sleep(2 * LEASE_S)
        for name in ("spot-1", "spot-2"):
            joiner = made.start(name)
            await asyncio.sleep(2 * LEASE_S)
            assert joiner.trainer.position.shard in {None, 2}
        state = made.service.state
        assert {name: lease.shard for name, lease in state.leases.items()}[LearnerId("west")] == 1

    play(tmp_path, scene, learners_max=learners_max)
