"""Who reads which shard of the data: an owner for good, a joiner on loan.

Shards are numbered. Each configured region has one of its own for the whole run, also while nobody is there. Those
that are no region's are spare, and are lent one at a time to learners that nobody listed.
What is committed of a shard belongs to the shard: whoever reads it next goes on where that ends.

No timer ends a loan, however long its holder is away: it trains on through an outage, and its work is wanted when the
outage is over. A loan ends when another learner needs the shard, none is free, and its holder isn't live; then the
holder's life is fenced, durably, before anybody else is given the shard.

Pure functions; the syncer's machine does what follows (`syncer_leases`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wan_diloco.units import LearnerId, ShardId

__all__ = ["Lease", "Loan", "choose_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What a learner's standing life reads.

    Attributes:
        shard: No other life that stands has it.
        first_unit: Where this life began: nothing before it is its to bring.
    """

    shard: ShardId
    first_unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """What a new life is given.

    Attributes:
        fences: Whose life must end first; None when the shard is free.
    """

    shard: ShardId
    fences: LearnerId | None = None


def choose_shard(
    learner_id: LearnerId,
    *,
    owned: Mapping[LearnerId, ShardId],
    spare: Sequence[ShardId],
    leases: Mapping[LearnerId, Lease],
    units: Mapping[ShardId, int],
    silent_s: Mapping[LearnerId, float],
) -> Loan | None:
    """The shard for a new life.

    Whoever has a shard keeps it. Of those that nobody has, the one that was read least goes first, so that data which
    nobody has seen come before a second pass; of those whose holders aren't live, the one whose holder has been silent
    longest. Numbers and names decide among equals.

    Args:
        learner_id: Whose life.
        owned: The shards of the configured learners.
        spare: Those that are nobody's.
        leases: Of all lives that stand.
        units: Of each shard, the first unit that isn't committed; 0 where none is.
        silent_s: Of those that have a lease and aren't live, for how long nothing was heard of them.

    Returns:
        None when all spare shards are lent to live learners.
    """
    if learner_id in owned:
        return Loan(shard=owned[learner_id])
    if learner_id in leases:
        return Loan(shard=leases[learner_id].shard)
    holders = {lease.shard: holder for holder, lease in leases.items()}
    free = [shard for shard in spare if shard not in holders]
    if free:
        return Loan(shard=min(free, key=lambda shard: (units.get(shard, 0), shard)))
    gone = sorted(holders[shard] for shard in spare if holders[shard] in silent_s)
    if not gone:
        return None
    holder = max(gone, key=lambda name: silent_s[name])
    return Loan(shard=leases[holder].shard, fences=holder)
