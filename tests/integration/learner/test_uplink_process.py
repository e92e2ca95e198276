"""A real uplink process beside a training loop in this process: nothing that happens to it holds training up."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.integration.learner.stub_syncer import read_config, write_config
from wan_diloco.clock import ManualClock, SystemClock
from wan_diloco.errors import EXIT_TEMPORARY, TransportError
from wan_diloco.learner.ipc import UplinkStart
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import open_shard
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.stop_signals import StopSignals, stop_signals
from wan_diloco.learner.trainer import TrainingLoop
from wan_diloco.learner.uplink_process import UplinkProcess
from wan_diloco.models import build_model, run_layout
from wan_diloco.protocol.events import AllowSteps
from wan_diloco.units import LocalStep


class Beside:
    """A trainer with leave to step, its uplink, and the loop around both."""

    def __init__(self, folder: Path, signals: StopSignals, reports: list[str]) -> None:
        torch.set_num_threads(1)
        config = read_config(write_config(folder))
        layout = run_layout(config)
        slots = FragmentSlots.create([fragment.numel for fragment in layout.fragments])
        self.trainer = LocalTrainer(config, Replica(config, build_model(config), open_shard(config, 0)), layout, slots)
        self.signals = signals
        self.uplink = UplinkProcess(
            slots,
            lambda: UplinkStart(
                config=config.resolved_json(),
                region="east",
                run_folder=str(folder),
                syncer="",
                position=self.trainer.position,
            ),
            SystemClock(),
            random.Random(0),
            reports.append,
        )
        self._loop = TrainingLoop(
            trainer=self.trainer,
            uplink=self.uplink,
            step_time_min_s=0.0,
            checkpoints=None,
            clock=SystemClock(),
            signals=signals,
            reload=lambda: None,
        )

    def train(self, steps: int) -> None:
        """Exactly so many steps more; the loop ends at the boundary after the last."""
        until = LocalStep(self.trainer.local_step + steps)
        self.trainer.boundary([AllowSteps(until_step=until)])
        end = _AtStep(self.trainer, until)
        self._loop._signals = end  # type: ignore[assignment]
        assert self._loop.run() == 143
        assert self.trainer.local_step == until


class _AtStep:
    """Asks the loop to end once a step is reached; it would wait for ever for leave to go further."""

    def __init__(self, trainer: LocalTrainer, until: int) -> None:
        self._trainer = trainer
        self._until = until

    @property
    def received(self) -> signal.Signals | None:
        return signal.SIGTERM if self._trainer.local_step >= self._until else None

    def take_reload(self) -> bool:
        return False

    def wait(self, timeout_s: float | None, *readable: int) -> None:
        raise AssertionError(f"the loop waits ({timeout_s}, {readable}) although it may step")


def test_steps_are_taken_while_the_uplink_is_stopped_and_after_it_is_killed(tmp_path: Path) -> None:
    reports: list[str] = []
    with stop_signals() as signals:
        beside = Beside(tmp_path, signals, reports)
        with beside.uplink as uplink:
            beside.train(5)
            stopped = uplink.pid
            assert stopped is not None
            os.kill(stopped, signal.SIGSTOP)
            beside.train(400)
            assert uplink.pid == stopped
            assert psutil.Process(stopped).status() == psutil.STATUS_STOPPED
            os.kill(stopped, signal.SIGKILL)
            psutil.wait_procs([psutil.Process(stopped)], 0)
            while uplink.pid in (None, stopped):
                beside.train(1)
            assert len(reports) == 1
            assert "training goes on" in reports[0]


def test_an_uplink_that_never_lives_ends_the_learner_with_a_wish_to_be_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    config = read_config(write_config(tmp_path))
    layout = run_layout(config)
    slots = FragmentSlots.create([fragment.numel for fragment in layout.fragments])
    trainer = LocalTrainer(config, Replica(config, build_model(config), open_shard(config, 0)), layout, slots)
    clock, reports = ManualClock(), list[str]()
    with stop_signals() as signals:
        uplink = UplinkProcess(
            slots,
            lambda: UplinkStart(
                config="", region="east", run_folder=str(tmp_path), syncer="", position=trainer.position
            ),
            clock,
            random.Random(0),
            reports.append,
        )

        def look_for_ever() -> None:
            while True:
                uplink.receive()
                clock.advance(0.5)
                signals.wait(0.01)

        with pytest.raises(TransportError, match="died 10 times in a row, at last with code 1") as caught:
            look_for_ever()
    assert caught.value.exit_code == EXIT_TEMPORARY
    assert len(reports) == 9
