"""How long does training stand still for the exchange? Installs and snapshots at step boundaries, over the steps.

    python bench/stall.py [--quick] [--json] [--periods 6]

A learner's `LocalTrainer` trains 0.47M parameters (dim 96, 4 layers, sequences of 128) on one thread, on the demo's
data. With P = H = 24, at every boundary one fragment's snapshot is taken, and another's, of two steps before, is
installed. What comes in is what was taken, so the model learns. Times are processor time.

- `stall_over_step`: all boundaries of a period over all its steps; `stall_over_step_rebase`: with installs that keep
  what was learned during the overlap, which is more work.
- `boundary_us`, `step_ms`: of one.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from machine import machine
from real_deltas import DEMO
from rounds import note, processor_s, show

from wan_diloco.config import load_config
from wan_diloco.learner.ipc import Command, InstallValue
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import open_shard
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.models import build_model, num_parameters, run_layout
from wan_diloco.protocol.events import AllowSteps, InstallUpdate, RequestSnapshot
from wan_diloco.units import Epoch, FragmentId, LocalStep, Version

PERIOD = 24
OVERLAP = 2
OVERRIDES = ("model.dim=96", "model.layers=4", "model.sequence_length=128", f"sync.fragments={PERIOD}")


class Learner:
    """A trainer, and what an uplink would ask of it."""

    def __init__(self, install: str) -> None:
        """Build the model and let it train without end."""
        config = load_config([DEMO], env={}, overrides=[*OVERRIDES, f"sync.install={install}"]).config
        layout = run_layout(config)
        model = build_model(config)
        self.num_parameters, self.num_fragments = num_parameters(model), layout.num_fragments
        self._slots = FragmentSlots.private([fragment.numel for fragment in layout.fragments])
        self._trainer = LocalTrainer(config, Replica(config, model, open_shard(config, 0)), layout, self._slots)
        self.installed = 0
        self._trainer.boundary([AllowSteps(until_step=None)])

    def period(self) -> tuple[float, float]:
        """Processor time of all boundaries of a period, and of all its steps."""
        boundaries_s = steps_s = 0.0
        for _ in range(PERIOD):
            steps_s += processor_s(self._trainer.step)
            commands = self._commands()
            began_s = time.process_time()
            report = self._trainer.boundary(commands)
            boundaries_s += time.process_time() - began_s
            self.installed += len(report.installed)
        return boundaries_s, steps_s

    def _commands(self) -> list[Command]:
        """What falls due now, with the value to be installed in its slot: the snapshot of `OVERLAP` steps before."""
        step = self._trainer.local_step
        commands: list[Command] = []
        if step > OVERLAP:
            count, index = divmod(step - OVERLAP, self.num_fragments)
            # The other slot is the base.
            slot = (count + 1) % 2
            self._slots.published(index, slot).copy_(self._slots.outbox(index))
            install = InstallUpdate(
                fragment_id=FragmentId(index),
                version=Version(Epoch(0), count + 1),
                resync=0,
                merged_hi=LocalStep(step - OVERLAP),
            )
            commands.append(InstallValue(install=install, slot=slot))
        commands.append(RequestSnapshot(fragment_id=FragmentId(step % self.num_fragments)))
        return commands


def measure(periods: int) -> dict[str, Any]:
    """Both kinds of install, in turn."""
    result: dict[str, Any] = {"machine": machine()}
    learners = {"stall_over_step": Learner("overwrite"), "stall_over_step_rebase": Learner("rebase")}
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in learners}
    for learner in learners.values():  # some things happen once only
        learner.period()
    for _ in range(periods):
        for key, learner in learners.items():
            times[key].append(learner.period())
    for key, pairs in times.items():
        note(result, key, [boundaries_s / steps_s for boundaries_s, steps_s in pairs])
    first = learners["stall_over_step"]
    result |= {"parameters": first.num_parameters, "fragments": first.num_fragments, "installs": first.installed}
    plain = times["stall_over_step"]
    note(result, "boundary_us", [1e6 * boundaries_s / PERIOD for boundaries_s, _ in plain])
    note(result, "step_ms", [1e3 * steps_s / PERIOD for _, steps_s in plain])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer periods")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--periods", type=int, default=6)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    show(measure(2 if chosen.quick else chosen.periods), as_json=chosen.json)


if __name__ == "__main__":
    main()
