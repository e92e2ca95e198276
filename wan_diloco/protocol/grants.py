"""What each learner may send, so that the syncer's ingress stays under its cap.

A grant is a rate, not a time: it holds for all that a learner sends, whichever rounds that belongs to, whenever its
step boundary comes, and however often a stream breaks. So the sum of what is granted is the sum over all rounds in
flight, and it is at most the cap. Shares are fair by max-min: who can't send more than its own uplink leaves the rest
to the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wan_diloco.units import LearnerId

__all__ = ["Ingress", "fair_shares"]

# What a payload takes on the line: headers of ours, of HTTP/2, TCP, IP and Ethernet. Compression gives it back.
_LINE_FACTOR = 1.06


def fair_shares(total: float, wants: Mapping[LearnerId, float]) -> dict[LearnerId, float]:
    """Divide a total by max-min: nobody gets more than it wants, and nobody less than another unless it wants less.

    Args:
        total: To be divided, > 0.
        wants: What each would take; may be infinite.
    """
    shares: dict[LearnerId, float] = {}
    left = total
    for number, (learner_id, want) in enumerate(sorted(wants.items(), key=lambda item: (item[1], item[0]))):
        shares[learner_id] = min(want, max(0.0, left) / (len(wants) - number))
        left -= shares[learner_id]
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingress:
    """What the syncer takes in.

    Attributes:
        cap_bytes_per_s: Of all learners together, on the line; 0 for none.
        uplinks: The cap of each configured learner's own uplink, in bytes per second.
        unlisted_bytes_per_s: That of each other learner; 0 for none.
    """

    cap_bytes_per_s: float = 0.0
    uplinks: dict[LearnerId, float] = field(default_factory=dict)
    unlisted_bytes_per_s: float = 0.0

    def rates(self, senders: Iterable[LearnerId]) -> dict[LearnerId, float]:
        """What each may send in all, on the line; empty where there is no cap.

        Args:
            senders: All that may send.
        """
        wants = {learner_id: self._uplink(learner_id) for learner_id in senders}
        return fair_shares(self.cap_bytes_per_s, wants) if self.cap_bytes_per_s else {}

    def extras_s(self, senders: Iterable[LearnerId], payload_bytes: int, spread_s: float) -> dict[LearnerId, float]:
        """By how much the cap makes an upload that each of them is asked for later: no slowness of the learner's.

        Args:
            senders: All that may send.
            payload_bytes: Of the upload, before compression.
            spread_s: Over how long it is spread where no cap makes that longer.
        """
        extras_s = dict.fromkeys(senders, 0.0)
        line_bytes = _LINE_FACTOR * payload_bytes
        for learner_id, rate in self.rates(extras_s).items():
            own_s = max(spread_s, line_bytes / self._uplink(learner_id))
            extras_s[learner_id] = max(spread_s, line_bytes / rate) - own_s
        return extras_s

    def _uplink(self, learner_id: LearnerId) -> float:
        return self.uplinks.get(learner_id, self.unlisted_bytes_per_s or math.inf)
