"""The training process: steps, boundaries, pacing, checkpoints, and an uplink that is started again when it dies.

No call in the loop waits for the network or for the uplink; the only wait is for leave to take the next step.
"""

from __future__ import annotations

import random
import secrets
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from wan_diloco.config import LiveConfig
from wan_diloco.errors import EXIT_AUTH, EXIT_CONFIG, EXIT_OK, CheckpointError, ConfigError, StorageError
from wan_diloco.learner.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint
from wan_diloco.learner.ipc import UplinkStart
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.moments import MomentsLayout
from wan_diloco.learner.region import learner_group, torchrun_meeting, torchrun_variables
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.setup import DataShards, learner_region
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.stop_signals import StopSignals, stop_signals
from wan_diloco.learner.uplink_process import UplinkProcess
from wan_diloco.models import build_model, run_layout
from wan_diloco.storage import FolderLock
from wan_diloco.telemetry import Logger, get_logger
from wan_diloco.training import optimizer_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from wan_diloco.clock import Clock
    from wan_diloco.config import RunConfig

__all__ = ["TrainingLoop", "checkpoint_folder", "run_learner"]

_CHECKPOINT_EVERY_S: Final = 60.0
_PROGRESS_EVERY_S: Final = 10.0
_LOG: Final[Logger] = get_logger("learner")


def checkpoint_folder(run_folder: Path, region: str) -> Path:
    """Where a region's learner keeps its checkpoint."""
    return run_folder / "learners" / region / "checkpoint"


class TrainingLoop:
    """Takes steps for as long as it may.

    Args:
        trainer: What happens at and between boundaries.
        uplink: To the syncer.
        step_time_min_s: Each step is stretched to this.
        checkpoints: Where to; None writes none.
        clock: For step times.
        signals: That end it, or ask for `reload`.
        reload: Reads the configuration again.
    """

    def __init__(
        self,
        *,
        trainer: LocalTrainer,
        uplink: UplinkProcess,
        step_time_min_s: float,
        checkpoints: CheckpointWriter | None,
        clock: Clock,
        signals: StopSignals,
        reload: Callable[[], None],
    ) -> None:
        """Stand before the first boundary."""
        self._trainer = trainer
        self._uplink = uplink
        self._step_time_min_s = step_time_min_s
        self._checkpoints = checkpoints
        self._clock = clock
        self._signals = signals
        self._reload = reload
        self._reported_step = -1
        self._saved_s = self._told_s = clock.now_s()

    def run(self) -> int:
        """Train until the syncer ends it or a signal does.

        Returns:
            The exit code.

        Raises:
            TransportError: No uplink can be kept alive.
        """
        while True:
            self._boundary()
            if self._trainer.exit is not None:
                say = _LOG.info if self._trainer.exit.exit_code == EXIT_OK else _LOG.error
                say("learner_ends", reason=self._trainer.exit.reason, exit_code=self._trainer.exit.exit_code)
                return self._trainer.exit.exit_code
            if self._signals.received is not None:
                _LOG.info("learner_ends", reason=self._signals.received.name)
                return 128 + self._signals.received
            if self._trainer.may_step:
                self._step()
            else:
                self._wait()

    def _boundary(self) -> None:
        if self._signals.take_reload():
            self._reload()
        passed = self._trainer.boundary(self._uplink.receive())
        if passed.carries_more or passed.local_step != self._reported_step:
            self._reported_step = passed.local_step
            self._uplink.passed(passed)
        if (now_s := self._clock.now_s()) - self._told_s >= _PROGRESS_EVERY_S:
            self._told_s = now_s
            holds = not self._trainer.may_step
            _LOG.info(
                "holding" if holds else "training",
                **({"reason": self._trainer.reason or "waits for the syncer"} if holds else {}),
                global_step=self._trainer.global_step,
                total_steps=self._trainer.total_steps,
                local_step=passed.local_step,
                tokens=passed.tokens,
                loss=None if passed.loss is None else round(passed.loss, 4),
                step_time_s=round(passed.step_time_s, 4),
            )

    def _wait(self) -> None:
        """Until something comes, or there is something to do or to say."""
        times = (self._uplink.look_again_s, self._told_s + _PROGRESS_EVERY_S - self._clock.now_s())
        self._signals.wait(min(time_s for time_s in times if time_s is not None), *self._uplink.readable)

    def _step(self) -> None:
        started_s = self._clock.now_s()
        self._trainer.step()
        left_s = started_s + self._step_time_min_s - self._clock.now_s()
        if left_s > 0:
            self._signals.wait(left_s)
        now_s = self._clock.now_s()
        self._trainer.note_step_time(now_s - started_s)
        if self._checkpoints is not None and now_s - self._saved_s >= _CHECKPOINT_EVERY_S:
            self._saved_s = now_s
            self._checkpoints.save(self._trainer.counters, self._trainer.moments)


def run_learner(
    config: RunConfig,
    *,
    region: str,
    run_folder: Path,
    resume: bool,
    syncer: str,
    threads: int,
    clock: Clock,
    load: Callable[[], RunConfig],
    refused: Callable[[str], None] = lambda _: None,
) -> int:
    """Be the learner of a region until the run ends.

    Args:
        config: The run.
        region: The learner's name: that of a listed region, or another where such may take part.
        run_folder: For the checkpoint, and the syncer's address when no other is known.
        resume: Go on from the checkpoint, if there is one.
        syncer: The syncer's address; empty for the region's own setting, else for what the run folder says.
        threads: Of torch, for each step; 0 takes one when the regions of a run share this machine, else what torch
            thinks best.
        clock: Of this machine.
        load: Reads the configuration again, at SIGHUP.
        refused: Told why, as the last word, when the syncer doesn't let us take part.

    Returns:
        The exit code: 0 at the run's end, 75, 77 or 78 when the syncer refuses us, 128 + number after a signal.

    Raises:
        TransportError: No uplink can be kept alive.
        ConfigError: No such region may take part, or it asks for more than one rank.
        StorageLocked: Another learner of the region has the folder.
        DataError: Its shard can't be read.
    """
    own = learner_region(config, region)
    meeting = torchrun_meeting(torchrun_variables())
    _require_one_rank(region, own.ranks, 1 if meeting is None else meeting.world_size)
    _set_threads(threads, shared=len(config.regions) > 1 and not syncer and not own.address)
    with stop_signals() as signals, learner_group(meeting):
        trainer, slots = _make_trainer(config, region)
        folder = checkpoint_folder(run_folder, region)
        # A second learner of the region would fence the first at the syncer: refused before it says a word.
        with FolderLock(folder.parent, f"learner of {region}"):
            if resume:
                _restore(trainer, folder, config.run.name)
            live = LiveConfig(config, load, lambda text: _LOG.info("configuration", detail=text))
            start = partial(_uplink_start, live, region, run_folder, syncer, trainer)
            with (
                closing(CheckpointWriter(folder, _checkpoint_failed)) as checkpoints,
                UplinkProcess(
                    slots, start, clock, random.Random(f"{config.run.seed}/{region}"), _uplink_died
                ) as uplink,
            ):
                code = TrainingLoop(
                    trainer=trainer,
                    uplink=uplink,
                    step_time_min_s=own.step_time_min_s,
                    checkpoints=checkpoints,
                    clock=clock,
                    signals=signals,
                    reload=partial(_reload, live, region, uplink),
                ).run()
            if trainer.has_trained and code not in {EXIT_AUTH, EXIT_CONFIG}:
                # One that was refused may be the old double of a learner that stands, and has the same folder.
                _save_last(trainer, folder)
        if trainer.exit is not None and code != EXIT_OK:
            refused(trainer.exit.reason)
        return code


def _make_trainer(config: RunConfig, region: str) -> tuple[LocalTrainer, FragmentSlots]:
    layout = run_layout(config)
    shards = DataShards(config, region)
    replica = Replica(config, build_model(config), shards.units)
    state_bytes = MomentsLayout.of(optimizer_tensors(replica.optimizer, replica.model)).size_bytes
    slots = FragmentSlots.create([fragment.numel for fragment in layout.fragments], state_bytes)
    trainer = LocalTrainer(config, replica, layout, slots, life_id=secrets.token_hex(16), read_shard=shards.read)
    return trainer, slots


def _require_one_rank(region: str, configured: int, started: int) -> None:
    """Before any of them waits for the others: one that never comes would hold up the rest for minutes.

    Raises:
        ConfigError: The region is to have several.
    """
    if configured > 1:
        where, hint = f"regions.{region}.ranks", "set it to 1"
    elif started > 1:
        where, hint = "WORLD_SIZE", "start one process, as with torchrun --nproc-per-node 1"
    else:
        return
    raise ConfigError(f"a region trains with one rank, not {max(configured, started)}", where=where, hint=hint)


def _reload(live: LiveConfig, region: str, uplink: UplinkProcess) -> None:
    if live.reload():
        uplink.set_rate(live.config.region(region).uplink_bytes_per_s)


def _uplink_start(live: LiveConfig, region: str, run_folder: Path, syncer: str, trainer: LocalTrainer) -> UplinkStart:
    return UplinkStart(
        config=live.config.resolved_json(),
        region=region,
        run_folder=str(run_folder.resolve()),
        syncer=syncer,
        position=trainer.position,
    )


def _set_threads(threads: int, *, shared: bool) -> None:
    if threads or shared:
        # More threads than cores make every region's steps slower, and small models gain nothing by them.
        torch.set_num_threads(threads or 1)


def _uplink_died(reason: str) -> None:
    _LOG.warning("uplink_died", reason=reason)


def _checkpoint_failed(reason: str) -> None:
    _LOG.warning("checkpoint_failed", reason=reason)


def _restore(trainer: LocalTrainer, folder: Path, run: str) -> None:
    try:
        found = load_checkpoint(folder, run)
        if found is not None:
            trainer.restore(*found)
            _LOG.info("checkpoint_restored", local_step=trainer.local_step)
    except CheckpointError as exc:
        _LOG.warning("checkpoint_unusable", reason=f"{exc}; the moments start anew")


def _save_last(trainer: LocalTrainer, folder: Path) -> None:
    try:
        save_checkpoint(folder, trainer.counters, trainer.moments)
    except StorageError as exc:
        _checkpoint_failed(str(exc))
