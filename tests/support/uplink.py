"""A learner's machine, its time and its training loop's counters, and short words for what happens to it."""

from __future__ import annotations

import random

from tests.support.protocol import BATCH_TOKENS, EAST, RULES, TERMS, version
from wan_diloco.protocol.events import (
    BoundaryPassed,
    Connected,
    Identity,
    Installed,
    LearnerEffect,
    LearnerEvent,
    SendToSyncer,
    SnapshotTaken,
    StartUpload,
    SyncerSaid,
    UpdateApplied,
)
from wan_diloco.protocol.learner_machine import FragmentState, LearnerMachine, LearnerSettings
from wan_diloco.protocol.messages import (
    ContributionHeader,
    MergedNote,
    Pull,
    SegmentKind,
    SyncerMessage,
    UpdateHeader,
    UpdateSegment,
    Welcome,
)
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Incarnation, LocalStep, RoundId, ShardId, Term, Version

__all__ = ["F0", "F1", "Uplink", "applied", "installed", "of", "pull", "said", "update"]


F0, F1 = FragmentId(0), FragmentId(1)


class Uplink:
    """A machine, its time and its training loop's counters."""

    def __init__(
        self,
        *,
        overlap_steps: int = 2,
        incarnation: int = 0,
        joined: bool | None = None,
        moments_step: int | None = None,
        told: bool = True,
    ) -> None:
        self.machine = LearnerMachine(
            LearnerSettings(
                schedule=Schedule(num_fragments=2, period_steps=4),
                overlap_steps=overlap_steps,
                codec="int4",
                sizes=RULES.fragments,
                heartbeat_s=3.0,
                retry=RetryPolicy(initial_s=1.0, jitter=0.0),
            ),
            Identity(
                run=TERMS.run,
                learner_id=EAST,
                incarnation=Incarnation(incarnation),
                layout=TERMS.layout,
                settings=TERMS.settings,
                initial_digests=TERMS.initial_digests,
            ),
            [FragmentState(version=version(0), resync=0, step_lo=LocalStep(0), tokens_lo=0)] * 2,
            local_step=LocalStep(0),
            tokens=0,
            unit=5 if incarnation and told else 0,
            rng=random.Random(1),
            joined=joined,
            moments_step=moments_step,
            shard=ShardId(0) if incarnation and told else None,
        )
        self.now_s = 0.0
        self.step = 0

    def tell(self, event: LearnerEvent, after_s: float = 0.0) -> list[LearnerEffect]:
        self.now_s += after_s
        return self.machine.handle(event, self.now_s)

    def hears(self, message: SyncerMessage, after_s: float = 0.0) -> list[LearnerEffect]:
        return self.tell(SyncerSaid(message=message), after_s)

    def joins(self, *versions: Version, started: bool = True, global_step: int = 0) -> list[LearnerEffect]:
        self.tell(Connected())
        return self.hears(
            Welcome(
                incarnation=Incarnation(1),
                term=Term(1),
                epoch=Epoch(0),
                global_step=GlobalStep(global_step),
                anchor=self.step - global_step,
                total_steps=GlobalStep(100),
                versions=versions or (version(0), version(0)),
                data_shard=ShardId(0),
                next_unit=5,
                shards=("", ""),
                started=started,
            )
        )

    def boundary(
        self,
        *snapshots: FragmentId,
        installed: tuple[Installed, ...] = (),
        steps: int = 1,
        after_s: float = 1.0,
        step_time_s: float = 1.0,
    ) -> list[LearnerEffect]:
        self.step += steps
        return self.tell(
            BoundaryPassed(
                local_step=LocalStep(self.step),
                tokens=self.step * BATCH_TOKENS,
                unit=self.step,
                step_time_s=step_time_s,
                loss=None,
                learning_rate=0.1,
                installed=installed,
                snapshots=tuple(SnapshotTaken(fragment_id=fragment) for fragment in snapshots),
            ),
            after_s,
        )

    def uploads(self, fragment_id: FragmentId = F0, attempt: int = 1, round_id: int = 1) -> ContributionHeader:
        """A pull, its snapshot at the next boundary, and its upload under way."""
        self.hears(pull(fragment_id, attempt, round_id))
        started = [effect for effect in self.boundary(fragment_id) if isinstance(effect, StartUpload)]
        assert len(started) == 1
        return started[0].header


def pull(fragment_id: FragmentId = F0, attempt: int = 1, round_id: int = 1, count: int = 0) -> Pull:
    return Pull(
        round_id=RoundId(round_id),
        attempt=attempt,
        fragment_id=fragment_id,
        version=version(count),
        window_s=4.0,
        upload_s=1.0,
    )


def update(
    to_count: int,
    *,
    from_count: int | None = None,
    fragment_id: FragmentId = F0,
    resync: int = 0,
    merged: tuple[MergedNote, ...] = (),
) -> UpdateHeader:
    segment = UpdateSegment(
        kind=SegmentKind.VALUE if from_count is None else SegmentKind.DIFFERENCE,
        from_version=version(to_count if from_count is None else from_count),
        to_version=version(to_count),
        digest="d",
        codec="int4",
        codes_bytes=500,
        scales_bytes=16,
        merged=merged,
    )
    return UpdateHeader(fragment_id=fragment_id, resync=resync, segments=(segment,))


def installed(to_count: int, step: int, *, fragment_id: FragmentId = F0, resync: int = 0) -> Installed:
    return Installed(
        fragment_id=fragment_id,
        version=version(to_count),
        resync=resync,
        step_lo=LocalStep(step),
        tokens_lo=step * BATCH_TOKENS,
    )


def applied(to_count: int, *, fragment_id: FragmentId = F0, resync: int = 0) -> UpdateApplied:
    return UpdateApplied(fragment_id=fragment_id, version=version(to_count), resync=resync)


def said(effects: list[LearnerEffect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendToSyncer)]


def of(kind: type, things: list[object] | list[LearnerEffect]) -> list[object]:
    return [thing for thing in things if isinstance(thing, kind)]
