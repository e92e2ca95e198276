"""Which data units are in the journal already, fragment by fragment: a unit that comes again is counted.

It proves what `leases` and `intake` promise, and decides nothing. A batch trains all fragments, so that a unit may be
in one contribution of each fragment, and in no second one. Units are committed in their order: a life begins where its
shard's committed units end, and takes one a step. So the last span of each fragment and shard is enough to know.

Owner: `SyncerState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wan_diloco.protocol.messages import ContributionHeader, ContributionKey
from wan_diloco.units import ShardId

__all__ = ["Span", "UnitBook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The units [lo, hi) of one contribution."""

    key: ContributionKey
    lo: int
    hi: int


@dataclass(slots=True)
class UnitBook:
    """The account of a run.

    Args:
        num_fragments: P.

    Attributes:
        last: Of each fragment and shard, the newest contribution's units.
        repeated: Units that came again, over all fragments.
    """

    num_fragments: int
    last: list[dict[ShardId, Span]] = field(default_factory=list)
    repeated: int = 0

    def __post_init__(self) -> None:
        """Begin with nothing."""
        if not self.last:
            self.last = [{} for _ in range(self.num_fragments)]

    def recut(self, num_fragments: int) -> None:
        """The parameters are cut into other fragments: work under way is lost, and new work begins behind it."""
        self.num_fragments = num_fragments
        self.last = [{} for _ in range(num_fragments)]

    def journalled(self, header: ContributionHeader, shard: ShardId) -> None:
        """A contribution is in the journal; a larger one of its key contains the smaller, and isn't a second one."""
        lasts = self.last[header.key.fragment_id]
        before, lo = lasts.get(shard), header.unit_hi - header.steps
        known_hi = 0 if before is None else before.lo if before.key == header.key else before.hi
        self.repeated += max(0, min(known_hi, header.unit_hi) - lo)
        lasts[shard] = Span(key=header.key, lo=lo, hi=max(known_hi, header.unit_hi))
