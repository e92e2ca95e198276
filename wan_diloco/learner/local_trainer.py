"""What happens at a step boundary: installs, then snapshots, then a report; and steps between them.

Deterministic: no socket, no clock, no waiting. The training process drives it, and so does the simulation.
Nothing of it ever waits for the uplink: commands are what has arrived, and the report is a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from wan_diloco.algorithm.fragments import read_fragment, write_fragment
from wan_diloco.algorithm.publication import digest, mix, rebase
from wan_diloco.learner.checkpoint import LearnerCounters
from wan_diloco.learner.ipc import Admitted, Command, FragmentPosition, InstallValue, LearnerPosition
from wan_diloco.learner.moments import MomentsLayout
from wan_diloco.protocol.events import (
    AllowSteps,
    BoundaryPassed,
    ExitLearner,
    Installed,
    InstallMoments,
    InstallUpdate,
    PinState,
    RequestSnapshot,
    SetPace,
    ShowReason,
    SnapshotTaken,
)
from wan_diloco.training import load_optimizer_tensors, optimizer_tensors, zero_nonfinite_moments
from wan_diloco.units import Epoch, FragmentId, Incarnation, LocalStep, Term, TransferId, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from wan_diloco.algorithm.layout import Fragment, Layout
    from wan_diloco.config import RunConfig
    from wan_diloco.learner.replica import Replica, UnitSource
    from wan_diloco.learner.slots import FragmentSlots
    from wan_diloco.protocol.leases import Lease
    from wan_diloco.units import ShardId

__all__ = ["LocalTrainer"]

# Weight of a new step in the smoothed step time, as TCP smooths round trips.
_SMOOTHING = 0.125


@dataclass(slots=True)
class _Standing:
    """Where one fragment stands; owned by the trainer.

    Attributes:
        slot: The published slot with the installed value.
        snapshot_step, snapshot_tokens: Counters of the snapshot in the outbox; None when there is none that the
            installed version came before.
    """

    version: Version
    resync: int
    step_lo: LocalStep
    tokens_lo: int
    slot: int
    snapshot_step: LocalStep | None
    snapshot_tokens: int


class LocalTrainer:
    """One region's training between boundaries and at them.

    Owner: the training thread.

    Args:
        config: The run.
        replica: What takes the steps; its weights are the initial ones, and become the base of every fragment.
        layout: The run's fragments.
        slots: For values; the initial ones are put into them.
        life_id: Drawn by chance for this process; see `Hello`.
        read_shard: Opens the data that the syncer lends; None where the replica has all that there are.
    """

    def __init__(
        self,
        config: RunConfig,
        replica: Replica,
        layout: Layout,
        slots: FragmentSlots,
        *,
        life_id: str = "",
        read_shard: Callable[[ShardId], UnitSource] | None = None,
    ) -> None:
        """Stand at step 0 of a first life, with no leave to take steps."""
        self._run = config.run.name
        self._sync = config.sync
        self._replica = replica
        self._read_shard = read_shard
        self._shard: ShardId | None = None
        self._layout = layout
        self._slots = slots
        self._fragments = [
            _Standing(Version(Epoch(0), 0), 0, LocalStep(0), 0, slot=0, snapshot_step=None, snapshot_tokens=0)
            for _ in layout.fragments
        ]
        for fragment in layout.fragments:
            read_fragment(fragment, replica.parameters, slots.published(fragment.fragment_id, 0))
        self._initial_digests = tuple(digest(slots.published(index, 0)) for index in range(slots.num_fragments))
        self._incarnation, self._life_id = Incarnation(0), life_id
        self._term, self._term_id = Term(0), ""
        self._local_step, self._tokens, self._unit = LocalStep(0), 0, 0
        self._anchor, self._total_steps = 0, config.total_steps
        self._until_step: LocalStep | None = LocalStep(0)
        self._steps_of_life = 0
        # The global step that the moments are of, which this life began with.
        self._moments_step: int | None = None
        self._moments = MomentsLayout.of(self.moments)
        self._loss: float | None = None
        self._learning_rate = 0.0
        self._step_time_s = 0.0
        self._reasons: dict[str, str] = {}
        self.exit: ExitLearner | None = None
        """Set once the learner's part is over."""

    @property
    def local_step(self) -> LocalStep:
        """Steps taken since the first life."""
        return self._local_step

    @property
    def has_trained(self) -> bool:
        """Whether this life has taken a step."""
        return self._steps_of_life > 0

    @property
    def global_step(self) -> int:
        """The run's step, as far as it is known here: what the learning rate follows."""
        return max(0, self._local_step - self._anchor)

    @property
    def total_steps(self) -> int:
        """Of the run."""
        return self._total_steps

    @property
    def may_step(self) -> bool:
        """Whether the next step may be taken."""
        return self.exit is None and (self._until_step is None or self._local_step < self._until_step)

    @property
    def reason(self) -> str:
        """Why no step may be taken, as the uplink says; empty where it says nothing."""
        # What is said of single fragments holds nobody up, and isn't withdrawn.
        return "; ".join(text for topic, text in sorted(self._reasons.items()) if text and ":" not in topic)

    @property
    def position(self) -> LearnerPosition:
        """What an uplink must know that is started now."""
        return LearnerPosition(
            incarnation=self._incarnation,
            term=self._term,
            term_id=self._term_id,
            life_id=self._life_id,
            local_step=self._local_step,
            tokens=self._tokens,
            unit=self._unit,
            initial_digests=self._initial_digests,
            fragments=tuple(
                FragmentPosition(
                    version=fragment.version,
                    resync=fragment.resync,
                    step_lo=fragment.step_lo,
                    tokens_lo=fragment.tokens_lo,
                    slot=fragment.slot,
                )
                for fragment in self._fragments
            ),
            has_trained=self.has_trained,
            moments_step=self.global_step if self.has_trained else self._moments_step,
            state_bytes=self._slots.state.size,
            state_layout=self._moments.fingerprint,
            shard=self._shard,
        )

    @property
    def counters(self) -> LearnerCounters:
        """For a checkpoint."""
        return LearnerCounters(
            run=self._run,
            local_step=self._local_step,
            tokens=self._tokens,
            unit=self._unit,
            global_step=self.global_step,
        )

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: the inner optimizer's state, not copied."""
        return optimizer_tensors(self._replica.optimizer, self._replica.model)

    def restore(self, counters: LearnerCounters, moments: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint of an earlier life; only before the first boundary.

        Raises:
            CheckpointError: The moments don't fit the model; nothing is changed then.
        """
        load_optimizer_tensors(self._replica.optimizer, self._replica.model, moments)
        self._local_step, self._tokens, self._unit = counters.local_step, counters.tokens, counters.unit
        self._until_step = counters.local_step
        self._moments_step = counters.global_step
        for fragment in self._fragments:
            fragment.step_lo, fragment.tokens_lo = counters.local_step, counters.tokens

    def boundary(self, commands: Sequence[Command]) -> BoundaryPassed:
        """Do between two steps what is asked for: installs first, snapshots after them.

        Args:
            commands: What arrived since the last boundary, in order.
        """
        installs: list[InstallValue] = []
        snapshots: dict[FragmentId, None] = {}
        pinned, moments_of = 0, TransferId(0)
        for command in commands:
            match command:
                case InstallValue():
                    installs.append(command)
                case RequestSnapshot(fragment_id=fragment_id):
                    snapshots[fragment_id] = None
                case PinState(number=number):
                    pinned = number
                case InstallMoments(transfer=transfer):
                    self._take_moments(command)
                    moments_of = transfer
                case AllowSteps(until_step=until_step):
                    self._until_step = until_step
                case SetPace(anchor=anchor, total_steps=total_steps, lease=lease):
                    self._anchor, self._total_steps = anchor, total_steps
                    if lease is not None:
                        self._take_data(lease)
                case Admitted(incarnation=incarnation, term=term, term_id=term_id):
                    self._incarnation, self._term, self._term_id = incarnation, term, term_id
                case ShowReason(topic=topic, text=text):
                    self._reasons[topic] = text
                case ExitLearner():
                    self.exit = command
                case _:
                    assert_never(command)
        installed = [done for command in installs if (done := self._install(command.install, command.slot)) is not None]
        for fragment_id in snapshots:
            self._take_snapshot(fragment_id)
        if pinned:
            self._moments.write(self._slots.state, self.moments)
        return BoundaryPassed(
            local_step=self._local_step,
            tokens=self._tokens,
            unit=self._unit,
            step_time_s=self._step_time_s,
            loss=self._loss,
            learning_rate=self._learning_rate,
            installed=tuple(installed),
            snapshots=tuple(SnapshotTaken(fragment_id=fragment_id) for fragment_id in snapshots),
            pinned=pinned,
            moments_of=moments_of,
        )

    def step(self) -> None:
        """Take one step on the next data unit."""
        outcome = self._replica.step(self._unit, global_step=self.global_step, total_steps=self._total_steps)
        self._local_step = LocalStep(self._local_step + 1)
        self._unit += 1
        self._tokens += outcome.tokens
        self._steps_of_life += 1
        self._loss = outcome.loss if math.isfinite(outcome.loss) else None
        self._learning_rate = outcome.learning_rate

    def note_step_time(self, duration_s: float) -> None:
        """Tell how long the last step took; the report says the smoothed time."""
        old_s = self._step_time_s
        self._step_time_s = old_s + _SMOOTHING * (duration_s - old_s) if old_s else duration_s

    def _install(self, install: InstallUpdate, slot: int) -> Installed | None:
        standing = self._fragments[install.fragment_id]
        forced = install.resync > standing.resync
        if install.version <= standing.version and not forced:
            return None
        fragment = self._layout.fragments[install.fragment_id]
        published_N = self._slots.published(install.fragment_id, slot)
        value_N, step_lo, tokens_lo = published_N, self._local_step, self._tokens
        # A resync, and a new life's first installs, bring weights that replace whatever is there.
        if self._steps_of_life and not forced:
            if self._sync.install == "rebase":
                if standing.snapshot_step is not None and install.merged_hi == standing.snapshot_step:
                    value_N = rebase(self._read(fragment), published_N, self._slots.outbox(install.fragment_id))
                    step_lo, tokens_lo = standing.snapshot_step, standing.snapshot_tokens
            elif self._sync.alpha:
                value_N = mix(self._read(fragment), published_N, self._sync.alpha)
        write_fragment(fragment, self._replica.parameters, value_N)
        if forced:
            zero_nonfinite_moments(self._replica.optimizer, self._replica.model)
            standing.resync = install.resync
        standing.version, standing.slot = install.version, slot
        standing.step_lo, standing.tokens_lo = step_lo, tokens_lo
        standing.snapshot_step = None
        return Installed(
            fragment_id=install.fragment_id,
            version=install.version,
            resync=install.resync,
            step_lo=step_lo,
            tokens_lo=tokens_lo,
        )

    def _take_data(self, lease: Lease) -> None:
        self._shard, self._unit = lease.shard, lease.first_unit
        if self._read_shard is not None:
            self._replica.units = self._read_shard(lease.shard)

    def _take_moments(self, command: InstallMoments) -> None:
        """Take over a peer's, which the uplink has checked."""
        tensors = self._moments.read(self._slots.state)
        load_optimizer_tensors(self._replica.optimizer, self._replica.model, tensors)
        self._moments_step = command.global_step

    def _take_snapshot(self, fragment_id: FragmentId) -> None:
        standing = self._fragments[fragment_id]
        fragment = self._layout.fragments[fragment_id]
        read_fragment(fragment, self._replica.parameters, self._slots.outbox(fragment_id))
        standing.snapshot_step, standing.snapshot_tokens = self._local_step, self._tokens

    def _read(self, fragment: Fragment) -> torch.Tensor:
        return read_fragment(fragment, self._replica.parameters)
