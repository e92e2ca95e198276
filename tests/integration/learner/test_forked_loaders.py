"""A training process whose uplink is open may fork as it likes: nothing of gRPC is in it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.integration.learner.stub_syncer import serving, write_config

ROOT = Path(__file__).resolve().parents[3]

# A learner's trainer with its uplink connected, and beside it a loader that forks its workers, as other people's
# training code does. It exits with 0 when all batches came.
TRAIN = """
import random, sys, threading
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from wan_diloco.clock import SystemClock
from wan_diloco.config import load_config
from wan_diloco.learner.ipc import Admitted, UplinkStart
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import open_shard
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.uplink_process import UplinkProcess
from wan_diloco.models import build_model, run_layout

folder, workers, runs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = load_config([folder / "run.toml"], env={}).config
layout = run_layout(config)
slots = FragmentSlots.create([fragment.numel for fragment in layout.fragments])
trainer = LocalTrainer(config, Replica(config, build_model(config), open_shard(config, 0)), layout, slots)
started = UplinkStart(
    config=config.resolved_json(), region="east", run_folder=str(folder / "run"), syncer="", position=trainer.position
)
with UplinkProcess(slots, lambda: started, SystemClock(), random.Random(0), print) as uplink:
    while not any(isinstance(command, Admitted) for command in uplink.receive()):
        threading.Event().wait(0.01)
    assert "grpc" not in sys.modules, "the transport lives in a process of its own"
    for _ in range(runs):
        data = TensorDataset(torch.arange(160).float())
        context = "fork" if workers else None
        loader = DataLoader(data, batch_size=8, num_workers=workers, multiprocessing_context=context)
        total = sum(float(batch.sum()) for (batch,) in loader)
        assert total == 159 * 160 / 2
        uplink.receive()
    assert uplink.pid is not None
print("done")
"""


@pytest.mark.parametrize("workers", [0, 4])
def test_a_loader_that_forks_works_beside_an_open_uplink(tmp_path: Path, workers: int) -> None:
    write_config(tmp_path)

    async def scene() -> tuple[int | None, bytes]:
        async with serving(tmp_path / "run"), asyncio.timeout(240.0):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", TRAIN, str(tmp_path), str(workers), "5"),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate()
            return process.returncode, output

    assert asyncio.run(scene()) == (0, b"done\n")
