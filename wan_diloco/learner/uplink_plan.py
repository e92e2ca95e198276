"""What an uplink is made of, from a configuration and where its trainer stands; the simulation builds the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.learner.held import HeldFragment
from wan_diloco.protocol.deadlines import heartbeat_s, reconnects
from wan_diloco.protocol.events import Identity
from wan_diloco.protocol.intake import FragmentSizes
from wan_diloco.protocol.learner_machine import FragmentState, LearnerMachine, LearnerSettings
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.units import LearnerId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wan_diloco.algorithm.layout import Layout
    from wan_diloco.config import RunConfig
    from wan_diloco.learner.ipc import LearnerPosition
    from wan_diloco.learner.slots import FragmentSlots

__all__ = ["held_fragments", "learner_machine", "retry_rng"]


def learner_machine(
    config: RunConfig, layout: Layout, region: str, position: LearnerPosition, rng: random.Random
) -> LearnerMachine:
    """The machine that speaks for a region's trainer.

    Args:
        config: The run.
        layout: The run's fragments.
        region: The learner's name.
        position: Where its trainer stands.
        rng: For the jitter of reconnects.
    """
    codec = codec_by_name(config.wire.codec)
    sizes = [(fragment.numel, codec.sizes(build_block_table(fragment))) for fragment in layout.fragments]
    settings = LearnerSettings(
        schedule=Schedule(num_fragments=layout.num_fragments, period_steps=config.sync.period_steps),
        overlap_steps=config.sync.overlap_steps,
        codec=config.wire.codec,
        sizes=tuple(
            FragmentSizes(parameters=numel, codes_bytes=size.codes_bytes, scales_bytes=size.scales_bytes)
            for numel, size in sizes
        ),
        heartbeat_s=heartbeat_s(config.sync.membership_lease_s),
        retry=reconnects(config.sync.membership_lease_s),
        state_layout=position.state_layout,
    )
    identity = Identity(
        run=config.run.name,
        learner_id=LearnerId(region),
        incarnation=position.incarnation,
        layout=layout.lines(),
        settings=config.agreement(),
        initial_digests=position.initial_digests,
        life_id=position.life_id,
        term=position.term,
        term_id=position.term_id,
    )
    fragments = [
        FragmentState(
            version=fragment.version, resync=fragment.resync, step_lo=fragment.step_lo, tokens_lo=fragment.tokens_lo
        )
        for fragment in position.fragments
    ]
    return LearnerMachine(
        settings,
        identity,
        fragments,
        local_step=position.local_step,
        tokens=position.tokens,
        unit=position.unit,
        rng=rng,
        joined=position.has_trained,
        moments_step=position.moments_step,
        shard=position.shard,
    )


def retry_rng(config: RunConfig, region: str, position: LearnerPosition) -> random.Random:
    """For the jitter of a learner's reconnects: no two regions that lost their syncer together come back in step.

    Args:
        config: The run.
        region: The learner's name.
        position: Where its trainer stands.
    """
    return random.Random(f"{config.run.seed}/{region}/{position.local_step}")


def held_fragments(layout: Layout, position: LearnerPosition, slots: FragmentSlots) -> Sequence[HeldFragment]:
    """The values that the uplink starts from."""
    return [
        HeldFragment(fragment, standing, slots)
        for fragment, standing in zip(layout.fragments, position.fragments, strict=True)
    ]
