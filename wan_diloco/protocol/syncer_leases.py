"""Giving data to new lives, and taking them from those that another needs them of.

Part of the syncer's machine; `leases.choose_shard` says which shard, this says what follows from it.
"""

from __future__ import annotations

import math

from wan_diloco.protocol.leases import choose_shard
from wan_diloco.protocol.messages import RefusalReason, Refused
from wan_diloco.protocol.syncer_context import SyncerContext
from wan_diloco.protocol.tape import LeaseEnded
from wan_diloco.units import LearnerId, ShardId

__all__ = ["LeaseDesk"]


class LeaseDesk:
    """All loans of data.

    Args:
        context: Of the machine that this is a part of.
    """

    def __init__(self, context: SyncerContext) -> None:
        """What was lent before is in the state."""
        self.context = context

    def lend(self, learner_id: LearnerId, now_s: float) -> ShardId | Refused:
        """The shard that a new life reads; whoever had it before, and isn't live, is fenced.

        Args:
            learner_id: Who may take part, and is about to be admitted.
            now_s: For how long the others have been silent.
        """
        state, settings = self.context.state, self.context.settings
        # A region that was taken out of the run may come back to its own.
        spare = [shard for shard in settings.spare_shards if shard not in state.shards.values()]
        loan = choose_shard(
            learner_id,
            owned=dict(settings.data_shards),
            spare=spare,
            leases=state.leases,
            units=state.units,
            silent_s=self._silent_s(now_s),
        )
        if loan is None:
            holders = [holder for holder in sorted(state.leases) if holder not in settings.terms.learners]
            detail = f"all {len(spare)} spare shards are read by live learners: {', '.join(holders)}"
            return Refused(reason=RefusalReason.NO_SHARD, detail=detail[:500])
        if loan.fences is not None:
            self._end(loan.fences, learner_id)
        self.context.show(_topic(learner_id), "")
        return loan.shard

    def _silent_s(self, now_s: float) -> dict[LearnerId, float]:
        """For how long nothing was heard of those that aren't live."""
        members, began_s = self.context.membership.members, self.context.began_s
        silent_s = {}
        for holder in self.context.state.leases:
            member = members.get(holder)
            if member is None:
                # Whether it was there when the process before ended isn't known of everybody: before a run starts
                # nobody notes it. So it has as long to come back as who is known to have been there.
                if began_s is not None and now_s >= began_s + self.context.settings.lease_s:
                    silent_s[holder] = math.inf
            elif not member.live:
                silent_s[holder] = now_s - member.heard_s
        return silent_s

    def _end(self, holder: LearnerId, needed_by: LearnerId) -> None:
        """Fence a life for its data; what it had journalled still counts."""
        context = self.context
        shard = context.state.leases[holder].shard
        record = LeaseEnded(learner_id=holder, incarnation=context.state.incarnations[holder], shard=shard)
        context.record(record, durable=True)
        member = context.membership.members.get(holder)
        if member is not None and member.session is not None:
            context.close(member.session, "its data lease has ended")
            context.membership.disconnected(member.session)
        text = f"{holder} wasn't live, and {needed_by} reads its data: when it comes back it begins a new life"
        context.show(_topic(holder), text)


def _topic(learner_id: LearnerId) -> str:
    return f"lease:{learner_id}"
