"""A syncer's time limits, from a configuration: those of the protocol, of its store's lock and of its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.protocol.deadlines import EndBudget, LinkFacts, syncer_deadlines
from wan_diloco.storage.object_lock import RENEW_S, WATCH_S
from wan_diloco.telemetry.last_resort import WITHIN_S
from wan_diloco.transport.pacer import chunk_bytes_for

if TYPE_CHECKING:
    from wan_diloco.config import RunConfig
    from wan_diloco.protocol.deadlines import Deadline

__all__ = ["deadlines_of"]


def deadlines_of(config: RunConfig, end_within_s: float = WITHIN_S) -> tuple[Deadline, ...]:
    """All limits that the syncer of a run goes by, before it has met anybody.

    Args:
        config: The run.
        end_within_s: How long the process may last after a signal to end.
    """
    egress = config.syncer.egress_bytes_per_s
    rates = {
        region.name: min(region.downlink_bytes_per_s, egress) if egress else region.downlink_bytes_per_s
        for region in config.regions
    }
    return syncer_deadlines(
        lease_s=config.sync.membership_lease_s,
        start_timeout_s=config.run.start_timeout_s,
        overlap_steps=config.sync.overlap_steps,
        bound_steps=config.sync.overwritten_steps_max,
        downlinks={
            name: LinkFacts(rate_bytes_per_s=rate, message_bytes=chunk_bytes_for(rate, config.wire.chunk_bytes))
            for name, rate in rates.items()
        },
        end=EndBudget(within_s=end_within_s, renew_s=RENEW_S, watch_s=WATCH_S),
        has_store=bool(config.syncer.store),
    )
