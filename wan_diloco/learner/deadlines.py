"""A learner's time limits, from a configuration and what is known of its link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.protocol.deadlines import LinkFacts, learner_deadlines
from wan_diloco.transport.pacer import chunk_bytes_for

if TYPE_CHECKING:
    from wan_diloco.config import RunConfig
    from wan_diloco.protocol.deadlines import Deadline

__all__ = ["deadlines_of"]


def deadlines_of(config: RunConfig, region: str, rtt_s: float = 0.0) -> tuple[Deadline, ...]:
    """All limits that the learner of a region goes by.

    Args:
        config: The run.
        region: The learner's name.
        rtt_s: Of a round trip; 0 as long as none was measured.
    """
    rate = config.region(region).uplink_bytes_per_s
    return learner_deadlines(
        lease_s=config.sync.membership_lease_s,
        overlap_steps=config.sync.overlap_steps,
        uplink=LinkFacts(
            rate_bytes_per_s=rate, message_bytes=chunk_bytes_for(rate, config.wire.chunk_bytes), rtt_s=rtt_s
        ),
    )
