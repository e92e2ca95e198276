"""What a configuration means for the syncer: its machine's settings, and the maths on fragments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.layout import Layout
from wan_diloco.config import RunConfig
from wan_diloco.protocol.admission import Terms
from wan_diloco.protocol.grants import Ingress
from wan_diloco.protocol.intake import FragmentSizes, IntakeRules
from wan_diloco.protocol.quorum import GracePolicy
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.protocol.syncer_machine import SyncerSettings
from wan_diloco.syncer.fragments_store import Maths, OuterRule
from wan_diloco.transport.options import ServerLimits
from wan_diloco.transport.pacer import chunk_bytes_for
from wan_diloco.units import FragmentId, GlobalStep, LearnerId

__all__ = ["LineRates", "line_rates", "machine_settings", "run_maths", "server_limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRates:
    """All caps as they are now, and what follows from them for the size of messages.

    Attributes:
        ingress_bytes_per_s, egress_bytes_per_s: Of the syncer as a whole; None for none.
        uplinks, downlinks: Of each configured learner, in bytes per second.
        unlisted_uplink_bytes_per_s, unlisted_downlink_bytes_per_s: Of each other learner.
        chunk_bytes_wished: Where no cap asks for less.
    """

    ingress_bytes_per_s: float | None
    egress_bytes_per_s: float | None
    uplinks: Mapping[LearnerId, float]
    downlinks: Mapping[LearnerId, float]
    chunk_bytes_wished: int
    unlisted_uplink_bytes_per_s: float
    unlisted_downlink_bytes_per_s: float

    @property
    def ingress(self) -> Ingress:
        """What may come in, as the machine knows it."""
        return Ingress(
            cap_bytes_per_s=self.ingress_bytes_per_s or 0.0,
            uplinks=dict(self.uplinks),
            unlisted_bytes_per_s=self.unlisted_uplink_bytes_per_s,
        )

    def downlink(self, learner_id: LearnerId) -> float:
        """The cap of a learner's own downlink."""
        return self.downlinks.get(learner_id, self.unlisted_downlink_bytes_per_s)

    def chunk_bytes(self, learner_id: LearnerId) -> int:
        """The chunk size of what is sent to a learner: a power of two, so that few are needed for many learners."""
        cap = min(self.downlink(learner_id), self.egress_bytes_per_s or math.inf)
        return 1 << (chunk_bytes_for(cap, self.chunk_bytes_wished).bit_length() - 1)

    @property
    def usual_chunk_bytes(self) -> int:
        """The chunk size that most learners need."""
        sizes = Counter(self.chunk_bytes(learner_id) for learner_id in self.downlinks)
        return max(sizes, key=lambda size: (sizes[size], size))


def line_rates(config: RunConfig) -> LineRates:
    """The caps that a configuration sets."""
    return LineRates(
        ingress_bytes_per_s=config.syncer.ingress_bytes_per_s or None,
        egress_bytes_per_s=config.syncer.egress_bytes_per_s or None,
        uplinks={LearnerId(region.name): region.uplink_bytes_per_s for region in config.regions},
        downlinks={LearnerId(region.name): region.downlink_bytes_per_s for region in config.regions},
        chunk_bytes_wished=config.wire.chunk_bytes,
        unlisted_uplink_bytes_per_s=config.unlisted.uplink_bytes_per_s,
        unlisted_downlink_bytes_per_s=config.unlisted.downlink_bytes_per_s,
    )


def run_maths(config: RunConfig, layout: Layout) -> Maths:
    """Codec and outer optimizer of the run."""
    outer = OuterRule(
        lr=config.outer.lr, momentum=config.outer.momentum, warmup_steps=config.outer.momentum_warmup_steps
    )
    return Maths(layout, codec_by_name(config.wire.codec), outer)


def server_limits(config: RunConfig) -> ServerLimits:
    """How much peers may make the syncer hold: never less than an honest learner needs."""
    # The layout may make fewer fragments, and then less is under way.
    schedule = Schedule(num_fragments=config.sync.fragments, period_steps=config.sync.period_steps)
    uploads = schedule.uploads_max(config.sync.overlap_steps)
    defaults = ServerLimits()
    return ServerLimits(
        # Each may be offered again before the end of its broken stream is noticed here.
        uploads_max=max(defaults.uploads_max, 2 * uploads),
        partials_max=max(defaults.partials_max, uploads),
    )


def machine_settings(config: RunConfig, maths: Maths, initial_digests: tuple[str, ...]) -> SyncerSettings:
    """What the syncer's machine is given.

    Args:
        config: The run's.
        maths: Of the run's layout.
        initial_digests: Of each fragment of the initial weights.
    """
    learners = tuple(LearnerId(region.name) for region in config.regions)
    layout = maths.layout
    sizes = [maths.codec.sizes(maths.table(FragmentId(index))) for index in range(layout.num_fragments)]
    fragments = tuple(
        FragmentSizes(parameters=fragment.numel, codes_bytes=size.codes_bytes, scales_bytes=size.scales_bytes)
        for fragment, size in zip(layout.fragments, sizes, strict=True)
    )
    return SyncerSettings(
        terms=Terms(
            run=config.run.name,
            learners=learners,
            layout=layout.lines(),
            settings=config.agreement(),
            initial_digests=initial_digests,
            unlisted_max=config.unlisted.learners_max,
        ),
        schedule=Schedule(num_fragments=layout.num_fragments, period_steps=config.sync.period_steps),
        policy=GracePolicy(
            quorum=config.sync.quorum,
            overlap_steps=config.sync.overlap_steps,
            safety=config.sync.grace_safety,
            bound_steps=config.sync.overwritten_steps_max,
        ),
        intake=IntakeRules(codec=config.wire.codec, fragments=fragments, batch_tokens=config.inner.batch_tokens),
        total_steps=GlobalStep(config.total_steps),
        lease_s=config.sync.membership_lease_s,
        start_timeout_s=config.run.start_timeout_s,
        shards=("",) * layout.num_fragments,
        lossless=maths.codec.lossless,
        ingress=line_rates(config).ingress,
        durable=config.syncer.durability == "every-merge",
        num_spare_shards=config.data.spare_shards,
    )
