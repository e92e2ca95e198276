"""Who gives inner moments to whom: what must hold of it, in books of their own."""

from __future__ import annotations

from wan_diloco.protocol.events import SessionId
from wan_diloco.protocol.rejoin_messages import Donate
from wan_diloco.simulation.checkers import Invariants, must
from wan_diloco.units import LearnerId, TransferId

__all__ = ["Donations"]


class Donations:
    """Of one run.

    Args:
        invariants: The books of what was merged.
        joiners_max: To whom one donor may give at once.
    """

    def __init__(self, invariants: Invariants, joiners_max: int) -> None:
        """Nobody gives."""
        self._invariants = invariants
        self._joiners_max = joiners_max
        self._serving: dict[SessionId, set[TransferId]] = {}

    def asked(self, session: SessionId, life: tuple[LearnerId, int], donate: Donate) -> None:
        """A learner is asked to give: one whose own work was merged, in this very life, and that isn't busy."""
        learner_id, incarnation = life
        # What isn't durable yet these books don't know.
        known = not self._invariants.durable
        merged = known or any((learner, number) == life for learner, number, _ in self._invariants.covered)
        must(merged, f"life {incarnation} of {learner_id} is asked to give, and had nothing merged")
        must(donate.joiner != learner_id, f"{learner_id} is asked to give to itself")
        serving = self._serving.setdefault(session, set())
        serving.add(donate.transfer)
        must(len(serving) <= self._joiners_max, f"{learner_id} is asked to give to {len(serving)} at once")

    def over(self, session: SessionId, transfer: TransferId) -> None:
        """A donor is told to stop."""
        self._serving.get(session, set()).discard(transfer)

    def gone(self, session: SessionId) -> None:
        """With a session go the transfers on it."""
        self._serving.pop(session, None)

    def restarted(self) -> None:
        """Another process of the syncer knows of none."""
        self._serving.clear()
