"""A whole run in one process and in virtual time: real syncer, real learners, real maths, real bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.integration.learner.stub_syncer import read_config, write_config
from tests.support.syncer import close, maths_of, open_tiny
from wan_diloco.algorithm.publication import digest
from wan_diloco.clock import ManualClock
from wan_diloco.config import RunConfig, parse_config
from wan_diloco.learner.ipc import Command
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.moments import MomentsLayout
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import DataShards
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.state_area import StateArea
from wan_diloco.learner.uplink_plan import held_fragments, learner_machine, retry_rng
from wan_diloco.learner.uplink_rate import UplinkRate
from wan_diloco.learner.uplink_service import UplinkService
from wan_diloco.models import build_model, run_layout
from wan_diloco.simulation.virtual_loop import VirtualTimeLoop, run_virtual
from wan_diloco.syncer.main import build_service
from wan_diloco.syncer.service import SyncerService
from wan_diloco.syncer.workers import InlineExecutor, Workers
from wan_diloco.telemetry import METRICS_FILE, MetricsWriter
from wan_diloco.training import optimizer_tensors
from wan_diloco.transport.memory import Link, MemoryNetwork
from wan_diloco.transport.pacer import Pacer
from wan_diloco.units import LearnerId

T = TypeVar("T")
STEPS = 30


def two_regions(folder: Path, names: Sequence[str] = ("east", "west"), **tables: dict[str, Any]) -> RunConfig:
    source = read_config(write_config(folder)).data.source
    tree: dict[str, Any] = {
        "run": {"name": "whole", "tokens": STEPS * 64},
        "model": {"dim": 8, "layers": 1, "heads": 2, "sequence_length": 16},
        "data": {"source": source},
        "inner": {"batch_tokens": 32, "warmup_steps": 0},
        "sync": {"fragments": 3, "period_steps": 6, "overlap_steps": 2},
        "regions": [{"name": name} for name in names],
    }
    for section, table in tables.items():
        tree[section] = {**tree.get(section, {}), **table}
    return parse_config(tree)


class Learner:
    """Trainer and uplink of one region, joined by a list."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        network: MemoryNetwork,
        clock: ManualClock,
        uplink_bytes_per_s: float | None = None,
        *,
        name: str = "",
    ) -> None:
        name = name or config.regions[index].name
        self.layout = run_layout(config)
        shards = DataShards(config, name)
        replica = Replica(config, build_model(config), shards.units)
        state_bytes = MomentsLayout.of(optimizer_tensors(replica.optimizer, replica.model)).size_bytes
        self.slots = FragmentSlots.private([fragment.numel for fragment in self.layout.fragments], state_bytes)
        self.trainer = LocalTrainer(config, replica, self.layout, self.slots, read_shard=shards.read)
        self.commands: list[Command] = []
        position = self.trainer.position
        pacer = Pacer()
        self.area = StateArea(self.slots.state, self.slots.release_state)
        self.uplink = UplinkService(
            machine=learner_machine(config, self.layout, name, position, retry_rng(config, name, position)),
            connect=lambda: network.connection(LearnerId(name), pacer),
            clock=clock,
            worker=InlineExecutor(),
            rows=InlineExecutor(),
            sink=self,
            fragments=held_fragments(self.layout, position, self.slots),
            wire=config.wire,
            rate=UplinkRate(pacer, uplink_bytes_per_s),
            show=lambda _: None,
            state=self.area,
        )

    def send(self, command: Command) -> None:
        self.commands.append(command)

    async def train(self, step_time_s: float) -> None:
        while self.trainer.exit is None:
            commands, self.commands = self.commands, []
            self.uplink.passed(self.trainer.boundary(commands))
            if self.trainer.may_step:
                self.trainer.step()
                self.trainer.note_step_time(step_time_s)
            await asyncio.sleep(step_time_s)

    @property
    def bases(self) -> list[str]:
        """Digests of the published values that are installed."""
        return [
            digest(self.slots.published(index, standing.slot))
            for index, standing in enumerate(self.trainer.position.fragments)
        ]


@contextlib.asynccontextmanager
async def syncer(
    config: RunConfig, folder: Path, network: MemoryNetwork, clock: ManualClock, *, resume: bool = False
) -> AsyncIterator[SyncerService]:
    restored = open_tiny(folder / "state", config, resume=resume)
    with MetricsWriter(folder / METRICS_FILE, clock) as metrics:
        service = build_service(
            config,
            folder,
            restored,
            maths=maths_of(config),
            metrics=metrics,
            workers=Workers.inline(),
            clock=clock,
            evaluate=False,
            input_log=False,
        )
        server = network.server(service)
        await server.start()
        try:
            yield service
        finally:
            await server.stop(0.5)
            close(restored)


def whole_run(
    config: RunConfig, folder: Path, step_times_s: tuple[float, float]
) -> tuple[dict[str, object], list[Any]]:
    """The syncer's last word, and for each learner its bases and steps."""

    async def scene() -> tuple[dict[str, object], list[Any]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        link = Link(delay_s=0.05, uplink_bytes_per_s=1e6, downlink_bytes_per_s=1e6)
        async with MemoryNetwork(link=link) as network, syncer(config, folder, network, loop.clock) as service:
            learners = [Learner(config, index, network, loop.clock) for index in range(2)]
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(service.run())
                for learner, step_time_s in zip(learners, step_times_s, strict=True):
                    group.create_task(learner.uplink.run())
                    group.create_task(learner.train(step_time_s))
                await serving
            return service.status(), [(learner.bases, learner.trainer.local_step) for learner in learners]

    folder.mkdir()
    torch.set_num_threads(1)
    return run_virtual(scene())


@pytest.mark.parametrize("codec", ["int4", "f32"])
def test_a_run_ends_with_everything_accounted_for(tmp_path: Path, codec: str) -> None:
    config = two_regions(tmp_path, wire={"codec": codec})
    status, learners = whole_run(config, tmp_path / "run", (1.0, 1.3))
    assert status["balance"] == 0
    assert status["rejected"] == {}
    assert status["participation"] > 0.9  # type: ignore[operator]
    assert [steps >= 20 for _, steps in learners] == [True, True]


def test_the_same_run_gives_the_same_bits(tmp_path: Path) -> None:
    config = two_regions(tmp_path)
    first = whole_run(config, tmp_path / "first", (1.0, 1.3))
    second = whole_run(config, tmp_path / "second", (1.0, 1.3))
    assert first[1] == second[1]


@pytest.mark.parametrize("sync", [{"install": "rebase"}, {"alpha": 0.5}, {"overlap_steps": 0, "quorum": 2}])
def test_every_way_of_installing_lasts_a_run(tmp_path: Path, sync: dict[str, Any]) -> None:
    status, learners = whole_run(two_regions(tmp_path, sync=sync), tmp_path / "run", (1.0, 1.0))
    assert status["balance"] == 0
    assert status["rejected"] == {}
    if sync.get("overlap_steps") == 0:
        assert learners[0] == learners[1]
