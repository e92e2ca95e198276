"""Whose sessions are open: names, caps and traffic, by what was said at Hello and by what the machine made of it.

A configured name is known at its Hello, so that a refusal can say whose it was. Any other is a stranger's until the
machine has welcomed it: nobody fills books with names by saying Hello.
"""

from __future__ import annotations

from wan_diloco.protocol.events import SessionId
from wan_diloco.syncer.plan import LineRates
from wan_diloco.transport.interface import Counters, Session
from wan_diloco.units import LearnerId

__all__ = ["NamedSessions"]


class NamedSessions:
    """All of them.

    Owner: the service's event loop.

    Args:
        rates: All caps at the start.
    """

    def __init__(self, rates: LineRates) -> None:
        """Nobody is there."""
        self.rates = rates
        self._sessions: dict[SessionId, tuple[LearnerId, Session]] = {}

    def __contains__(self, session_id: SessionId) -> bool:
        """Whether it is known whose session that is."""
        return session_id in self._sessions

    def learner(self, session_id: SessionId) -> LearnerId | None:
        """Whose session that is; None when it isn't known, or has ended."""
        known = self._sessions.get(session_id)
        return None if known is None else known[0]

    def said_hello(self, session: Session, learner_id: LearnerId) -> None:
        """Somebody says a name."""
        if learner_id in self.rates.downlinks:
            self.welcomed(session, learner_id)

    def welcomed(self, session: Session, learner_id: LearnerId | None) -> None:
        """It is that learner's session, and has that learner's cap; None when a newer one of it has taken its place."""
        if learner_id is not None:
            self._sessions[session.session] = (learner_id, session)
            session.set_downlink_rate(self.rates.downlink(learner_id))

    def ended(self, session_id: SessionId) -> LearnerId | None:
        """Forget a session; returns whose it was."""
        known = self._sessions.pop(session_id, None)
        return None if known is None else known[0]

    def set_rates(self, rates: LineRates) -> None:
        """Change the caps of all that are open, and of those to come."""
        self.rates = rates
        for learner_id, session in self._sessions.values():
            session.set_downlink_rate(rates.downlink(learner_id))

    def traffic(self) -> dict[LearnerId, Counters]:
        """What they have moved, by learner."""
        traffic: dict[LearnerId, Counters] = {}
        for learner_id, session in self._sessions.values():
            traffic.setdefault(learner_id, Counters()).add(session.counters)
        return traffic
