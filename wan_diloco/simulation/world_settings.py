"""What a simulated run is, and the settings of its machines that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from wan_diloco.protocol.admission import Terms
from wan_diloco.protocol.events import Identity
from wan_diloco.protocol.intake import FragmentSizes, IntakeRules
from wan_diloco.protocol.learner_machine import LearnerSettings
from wan_diloco.protocol.quorum import GracePolicy
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.protocol.syncer_machine import SyncerSettings
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.units import GlobalStep, Incarnation, LearnerId, ShardId

__all__ = ["BATCH_TOKENS", "PARAMETERS", "LinkProfile", "WorldSettings"]

BATCH_TOKENS = 100
PARAMETERS = 1000
_CODEC = "int4"
_RUN = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One learner's link and speed.

    Attributes:
        step_s: Duration of a step.
        delay_s: One way.
        jitter_s: Added at random, up to this; streams keep their order.
        upload_s: How long a contribution's bytes occupy the uplink; they go one after the other.
    """

    step_s: float = 1.0
    delay_s: float = 0.02
    jitter_s: float = 0.0
    upload_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """A run.

    Attributes:
        links: One a learner; their names are m0, m1, ...
        drop: Chance that a bulk transfer or an acknowledgement is lost while its stream lives on.
        repeat: Chance that a control message arrives twice.
        poison: Chance that a contribution turns out not to be finite, or an update not to decode.
        merge_fails: Chance that a merge can't be done, and is tried again.
        rot: Chance that a contribution can't be read any more when it is to be merged.
        echo: Chance that a control message of the syncer arrives twice.
        calm_s: From when on none of these chances exists any more.
        bulk_jitter_s: Added at random to each bulk transfer, up to this: they overtake each other, and control.
        keep_updates: Publications of a fragment that the syncer stores for those who lag.
        decode_s: How long an update takes to decode.
        skewed: Each process has a clock of its own, which begins anywhere.
        late: Learners that aren't there at the start.
        unlisted: Links of learners whose names nobody listed: u0, u1, ...; none is there at the start.
        unlisted_max: How many of those names may take part.
        num_spare_shards: Of the data, for them.
        durable: What is acknowledged and sent is durable before; otherwise it is so a little later.
        flush_s: Until then.
        joiners_max: That take moments of one donor at once.
    """

    links: tuple[LinkProfile, ...]
    num_fragments: int = 4
    period_steps: int = 4
    overlap_steps: int = 2
    quorum: int = 1
    safety: float = 0.9
    bound_steps: float = 4.0
    total_steps: int = 40
    lease_s: float = 10.0
    merge_s: float = 0.02
    drop: float = 0.0
    repeat: float = 0.0
    poison: float = 0.0
    merge_fails: float = 0.0
    rot: float = 0.0
    echo: float = 0.0
    calm_s: float = float("inf")
    bulk_jitter_s: float = 0.0
    keep_updates: int = 8
    decode_s: float = 0.0
    skewed: bool = False
    late: tuple[LearnerId, ...] = ()
    start_timeout_s: float = 60.0
    joiners_max: int = 2
    unlisted: tuple[LinkProfile, ...] = ()
    unlisted_max: int = 0
    num_spare_shards: int = 0
    durable: bool = True
    flush_s: float = 2.0

    @property
    def learners(self) -> tuple[LearnerId, ...]:
        """Names that are listed, in the order of `links`."""
        return tuple(LearnerId(f"m{index}") for index in range(len(self.links)))

    @property
    def joiners(self) -> tuple[LearnerId, ...]:
        """Names that nobody listed, in the order of `unlisted`."""
        return tuple(LearnerId(f"u{index}") for index in range(len(self.unlisted)))

    def link(self, learner_id: LearnerId) -> LinkProfile:
        """One learner's."""
        return dict(zip((*self.learners, *self.joiners), (*self.links, *self.unlisted), strict=True))[learner_id]

    @property
    def initial_digests(self) -> tuple[str, ...]:
        """Of each fragment; weights are symbols here."""
        return tuple(f"initial-{fragment}" for fragment in range(self.num_fragments))

    @property
    def schedule(self) -> Schedule:
        """The rhythm."""
        return Schedule(num_fragments=self.num_fragments, period_steps=self.period_steps)

    @property
    def uploads_max(self) -> int:
        """The most that a learner may have under way."""
        return self.schedule.uploads_max(self.overlap_steps)

    @property
    def sizes(self) -> tuple[FragmentSizes, ...]:
        """Of each fragment's contribution."""
        size = FragmentSizes(parameters=PARAMETERS, codes_bytes=PARAMETERS // 2, scales_bytes=16)
        return (size,) * self.num_fragments

    def fresh_state(self) -> SyncerState:
        """A syncer's state before the first step."""
        return SyncerState(
            parameters=(PARAMETERS,) * self.num_fragments,
            initial_digests=self.initial_digests,
            keep_updates=self.keep_updates,
        )

    def for_syncer(self, process: int = 0) -> SyncerSettings:
        """The settings of its machine.

        Args:
            process: How many there were before; no chance is needed where all are of one world.
        """
        return SyncerSettings(
            terms=Terms(
                run=_RUN,
                learners=self.learners,
                layout=("a layout",),
                settings=(("a", "setting"),),
                initial_digests=self.initial_digests,
                unlisted_max=self.unlisted_max,
            ),
            schedule=self.schedule,
            policy=GracePolicy(
                quorum=self.quorum,
                overlap_steps=self.overlap_steps,
                safety=self.safety,
                bound_steps=self.bound_steps,
            ),
            intake=IntakeRules(codec=_CODEC, fragments=self.sizes, batch_tokens=BATCH_TOKENS),
            total_steps=GlobalStep(self.total_steps),
            lease_s=self.lease_s,
            start_timeout_s=self.start_timeout_s,
            shards=("",) * self.num_fragments,
            lossless=False,
            joiners_max=self.joiners_max,
            durable=self.durable,
            data_shards=tuple((learner, ShardId(shard)) for shard, learner in enumerate(self.learners)),
            spare_shards=tuple(ShardId(len(self.learners) + number) for number in range(self.num_spare_shards)),
            term_id=f"{process:016x}",
        )

    def for_learner(self) -> LearnerSettings:
        """The settings of a learner's machine."""
        return LearnerSettings(
            schedule=self.schedule,
            overlap_steps=self.overlap_steps,
            codec=_CODEC,
            sizes=self.sizes,
            heartbeat_s=self.lease_s / 3,
            retry=RetryPolicy(),
        )

    def identity(self, learner_id: LearnerId) -> Identity:
        """Who a new life says it is."""
        terms = self.for_syncer().terms
        return Identity(
            run=_RUN,
            learner_id=learner_id,
            incarnation=Incarnation(0),
            layout=terms.layout,
            settings=terms.settings,
            initial_digests=terms.initial_digests,
        )
