"""Learners that come back, with real syncer, maths and bytes, in virtual time: whose moments they begin with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.integration.learner.test_in_process import Learner, syncer, two_regions
from wan_diloco.algorithm.fragments import read_fragment
from wan_diloco.clock import ManualClock
from wan_diloco.learner.ipc import Command
from wan_diloco.learner.moments import MomentsLayout
from wan_diloco.protocol.events import BoundaryPassed, InstallMoments, PinState
from wan_diloco.simulation.virtual_loop import VirtualTimeLoop, run_virtual
from wan_diloco.training import learning_rate
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.units import LearnerId, ShardId

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wan_diloco.config import RunConfig
    from wan_diloco.syncer.service import SyncerService

# The tiny model's row has ten chunks at this rate, and takes two seconds.
UPLINK = 20e3
STEP_S = 0.5
NAMES = ("east", "north", "west")


class Watched(Learner):
    """One whose rows are kept: what it pinned, and its moments right after it took a peer's over."""

    pinned: NDArray[np.uint8] | None = None
    taken: NDArray[np.uint8] | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rates: dict[int, float] = {}

    def row(self) -> NDArray[np.uint8]:
        layout = MomentsLayout.of(self.trainer.moments)
        row = np.zeros(layout.size_bytes, np.uint8)
        layout.write(row, self.trainer.moments)
        return row

    def boundary(self, commands: list[Command]) -> BoundaryPassed:
        passed = self.trainer.boundary(commands)
        if any(isinstance(command, PinState) for command in commands):
            self.pinned = self.row()
        if any(isinstance(command, InstallMoments) for command in commands):
            self.taken = self.row()
        return passed

    async def train(self, step_time_s: float) -> None:
        while self.trainer.exit is None:
            commands, self.commands = self.commands, []
            passed = self.boundary(commands)
            self.uplink.passed(passed)
            if self.trainer.may_step:
                step = self.trainer.global_step
                self.trainer.step()
                self.trainer.note_step_time(step_time_s)
                self.rates.setdefault(step, self.trainer.boundary([]).learning_rate)
            await asyncio.sleep(step_time_s)

    @property
    def stands_on_its_bases(self) -> bool:
        """Whether local is base, as it must be before the first step."""
        return all(
            torch.equal(
                read_fragment(fragment, self.trainer._replica.parameters),
                self.slots.published(fragment.fragment_id, standing.slot),
            )
            for fragment, standing in zip(self.layout.fragments, self.trainer.position.fragments, strict=True)
        )


@dataclass
class World:
    config: RunConfig
    folder: Path
    network: MemoryNetwork
    clock: ManualClock
    group: asyncio.TaskGroup
    learners: dict[str, Watched] = field(default_factory=dict)
    tasks: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)

    def start(self, name: str) -> Watched:
        index = [region.name for region in self.config.regions].index(name)
        self.network.restore(LearnerId(name))
        learner = Watched(self.config, index, self.network, self.clock, UPLINK)
        self.learners[name] = learner
        self.tasks[name] = [
            self.group.create_task(learner.uplink.run()),
            self.group.create_task(learner.train(STEP_S)),
        ]
        return learner

    async def start_syncer(self, *, resume: bool = False) -> None:
        self._life = contextlib.AsyncExitStack()
        self.service: SyncerService = await self._life.enter_async_context(
            syncer(self.config, self.folder, self.network, self.clock, resume=resume)
        )
        self._serving = self.group.create_task(self.service.run())

    async def stop_syncer(self) -> None:
        self.service.stop()
        await self._serving
        await self._life.aclose()

    async def crash_syncer(self) -> None:
        """As SIGKILL does: all calls break, and nothing is written any more."""
        self.network.stop_listening(in_order=False)
        self._serving.cancel()
        await asyncio.wait([self._serving])
        await self._life.aclose()

    def kill(self, name: str) -> None:
        self.network.cut(LearnerId(name))
        for task in self.tasks[name]:
            task.cancel()

    async def until(self, holds: Callable[[], bool], limit_s: float = 120.0) -> None:
        async with asyncio.timeout(limit_s):
            while not holds():  # noqa: ASYNC110 - virtual time passes only so
                await asyncio.sleep(0.03)

    async def proven(self) -> None:
        """Until everybody has been merged."""
        participation = self.service.state.participation
        await self.until(lambda: all(participation[LearnerId(name)] >= 2 for name in self.learners))

    def moments(self, name: str) -> str:
        found: dict[str, Any] = self.service.status()
        return next(one["moments"] for one in found["learners"] if one["learner_id"] == name)


@contextlib.asynccontextmanager
async def world(folder: Path, names: tuple[str, ...] = NAMES) -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    config = two_regions(folder, names, run={"tokens": 10_000 * 64}, inner={"warmup_steps": 100})
    async with MemoryNetwork(link=Link(delay_s=0.02)) as network, asyncio.TaskGroup() as group:
        made = World(config, folder / "run", network, loop.clock, group)
        await made.start_syncer()
        for name in names:
            made.start(name)
        yield made
        for name in made.learners:
            made.kill(name)
        await made.stop_syncer()


def play(folder: Path, scene: Callable[[World], Coroutine[Any, Any, None]], names: tuple[str, ...] = NAMES) -> None:
    async def main() -> None:
        async with world(folder, names) as made:
            await made.proven()
            await scene(made)

    (folder / "run").mkdir()
    torch.set_num_threads(1)
    run_virtual(main())


def test_who_comes_back_has_a_peers_moments_to_the_bit_and_the_learning_rate_of_now(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        made.kill("east")
        east = made.start("east")
        await made.until(lambda: east.taken is not None)
        assert east.trainer.local_step == 0
        await made.until(lambda: east.trainer.local_step >= 3)
        donor = made.learners[made.moments("east").removeprefix("peer of ")]
        assert donor.pinned is not None
        assert np.array_equal(east.taken, donor.pinned)
        assert np.count_nonzero(east.taken) > east.taken.size / 2
        inner = made.config.inner
        for step, rate in east.rates.items():
            assert step >= 6, "not where a schedule begins"
            due = learning_rate(
                step,
                peak=inner.lr,
                warmup_steps=inner.warmup_steps,
                total_steps=made.config.total_steps,
                final_fraction=inner.final_lr_fraction,
            )
            assert rate == pytest.approx(due, rel=1e-6)
            assert {learner.rates.get(step, rate) for learner in made.learners.values()} == {rate}
        before = made.service.state.participation[LearnerId("east")]
        await made.until(lambda: made.service.state.participation[LearnerId("east")] > before)

    play(tmp_path, scene)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_donor_that_is_killed_on_the_way_is_replaced(tmp_path: Path, share: float) -> None:
    async def scene(made: World) -> None:
        made.kill("east")
        east = made.start("east")
        await made.until(lambda: east.area.received_bytes > share * east.area.size_bytes)
        assert east.area.received_bytes < east.area.size_bytes
        assert not np.count_nonzero(east.row()), "nothing of a part is used"
        (giving,) = [name for name, learner in made.learners.items() if learner.pinned is not None]
        made.kill(giving)
        await made.until(lambda: east.taken is not None)
        (other,) = {"north", "west"} - {giving}
        assert np.array_equal(east.taken, made.learners[other].pinned)
        await made.until(lambda: east.trainer.has_trained)
        assert made.moments("east") == f"peer of {other}"

    play(tmp_path, scene)


def test_a_syncer_that_is_killed_on_the_way_is_asked_again_and_nothing_of_a_part_is_used(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        made.kill("east")
        east = made.start("east")
        await made.until(lambda: 2 * east.area.received_bytes > east.area.size_bytes)
        assert east.area.received_bytes < east.area.size_bytes
        await made.crash_syncer()
        others = [learner for name, learner in made.learners.items() if name != "east"]
        steps = [learner.trainer.local_step for learner in others]
        await asyncio.sleep(2.0)
        assert all(learner.trainer.local_step > before for learner, before in zip(others, steps, strict=True))
        await made.start_syncer(resume=True)

        def has_taken() -> bool:
            if east.taken is None:
                assert not east.trainer.has_trained
                assert not np.count_nonzero(east.row()), "nothing of a part is used"
            return east.taken is not None

        await made.until(has_taken)
        await made.until(lambda: east.trainer.has_trained)
        donor = made.learners[made.moments("east").removeprefix("peer of ")]
        assert np.array_equal(east.taken, donor.pinned)
        before = made.service.state.participation[LearnerId("east")]
        await made.until(lambda: made.service.state.participation[LearnerId("east")] > before)

    play(tmp_path, scene)


def test_with_its_only_donor_dead_it_begins_with_what_it_has(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        made.kill("east")
        east = made.start("east")
        await made.until(lambda: east.area.received_bytes > 0)
        made.kill("west")
        await made.until(lambda: east.trainer.has_trained)
        assert made.moments("east") == "none"
        assert east.taken is None

    play(tmp_path, scene, ("east", "west"))


def test_a_joiner_whose_connection_breaks_goes_on_where_it_stopped(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        made.kill("east")
        east = made.start("east")
        await made.until(lambda: 2 * east.area.received_bytes > east.area.size_bytes)
        part = east.area.received_bytes
        before = made.learners["west"].pinned
        made.network.cut(LearnerId("east"))
        await asyncio.sleep(0.5)
        made.network.restore(LearnerId("east"))
        await made.until(lambda: east.taken is not None)
        assert east.area.received_bytes == 0, "released"
        assert np.array_equal(east.taken, before)
        assert made.learners["west"].pinned is before, "the same row, and not pinned again"
        assert part > 0

    play(tmp_path, scene, ("east", "west"))


def test_before_its_first_step_a_life_stands_on_the_published_values_and_at_its_own_data(tmp_path: Path) -> None:
    async def scene(made: World) -> None:
        made.kill("east")
        units = made.service.state.units[ShardId(0)]
        assert units > 0
        east = made.start("east")
        await made.until(lambda: east.taken is not None)
        assert east.stands_on_its_bases
        assert east.trainer.position.unit == units, "accepted work isn't repeated, what wasn't accepted is read again"

    play(tmp_path, scene)
