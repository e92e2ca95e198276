"""Who is there: sessions, leases, and the pace that the live members set.

A membership lease ends liveness and nothing else: a learner that wakes after it is the same learner, with
its incarnation and its work. Only a higher incarnation fences a lower one, and that is durable.

Owner: the syncer's machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wan_diloco.protocol.deadlines import member_lease_s
from wan_diloco.protocol.events import SessionId
from wan_diloco.protocol.schedule import global_step_of
from wan_diloco.units import Incarnation, LearnerId, LocalStep

__all__ = ["Member", "Membership"]


@dataclass(slots=True)
class Member:
    """A learner that has been welcomed at least once by this process.

    Attributes:
        session: Its connection; None while it has none.
        anchor: local_step - global_step at the last change of membership.
        heard_s: When anything came from it last.
        live: Its lease stands.
        remembered: It belongs to an earlier process of the syncer, and hasn't come back yet.
        reported: Whether a report came on this session: only then is it known what it has installed.
        granted_bytes_per_s: What it was told on this session that it may send; 0 for no cap of the syncer's.
        moments: Where this life's inner moments came from, as it says; empty before it has any.
        rtt_s: A round trip, as it says; 0 before it has measured one.
    """

    learner_id: LearnerId
    incarnation: Incarnation
    session: SessionId | None
    local_step: LocalStep
    tokens: int
    heard_s: float
    anchor: int = 0
    live: bool = True
    remembered: bool = False
    reported: bool = False
    step_time_s: float = 0.0
    loss: float | None = None
    learning_rate: float = 0.0
    granted_bytes_per_s: float = 0.0
    moments: str = ""
    rtt_s: float = 0.0

    @property
    def progress(self) -> int:
        """Global step as this member alone would have it."""
        return self.local_step - self.anchor


@dataclass(slots=True)
class Membership:
    """All members and the global step.

    Args:
        quorum: K.
        lease_s: How long a silent member counts as live.
        global_step: t; never goes back.
        leap_steps: The most that the global step follows one member at once.
        changes: How often the membership changed.
    """

    quorum: int
    lease_s: float
    global_step: int
    leap_steps: int
    changes: int = 0
    members: dict[LearnerId, Member] = field(default_factory=dict)
    sessions: dict[SessionId, LearnerId] = field(default_factory=dict)

    def of(self, session: SessionId) -> Member | None:
        """The member whose current connection this is; None for a connection that lost its meaning."""
        learner_id = self.sessions.get(session)
        member = self.members.get(learner_id) if learner_id is not None else None
        return member if member is not None and member.session == session else None

    def remember(
        self, learner_id: LearnerId, incarnation: Incarnation, local_step: LocalStep, anchor: int, now_s: float
    ) -> None:
        """A member of an earlier process of the syncer: live for one lease, in which it may come back.

        A restart is no change of membership: whoever comes back in time counts on from its anchor, so that
        the global step doesn't go back.

        Args:
            learner_id: Who.
            incarnation: In which life.
            local_step: It is at least that far.
            anchor: From the last change of membership.
            now_s: When its lease begins.
        """
        self.members[learner_id] = Member(
            learner_id, incarnation, None, local_step, 0, now_s, anchor=anchor, remembered=True
        )

    def welcome(
        self,
        learner_id: LearnerId,
        incarnation: Incarnation,
        session: SessionId,
        local_step: LocalStep,
        tokens: int,
        now_s: float,
    ) -> SessionId | None:
        """Take a session in as the learner's only one.

        Returns:
            The learner's earlier session, to be closed; None when it had none.
        """
        member = self.members.get(learner_id)
        earlier = member.session if member is not None else None
        if member is None or member.incarnation != incarnation:
            member = Member(learner_id, incarnation, session, local_step, tokens, now_s, live=False)
            self.members[learner_id] = member
        if earlier is not None:
            self.sessions.pop(earlier, None)
        member.session, member.reported, member.heard_s = session, False, now_s
        member.remembered, member.granted_bytes_per_s = False, 0.0
        self.sessions[session] = learner_id
        if not member.live:
            member.live, member.local_step, member.tokens = True, local_step, tokens
            self._reanchor()
        else:
            # Also downwards: a life knows best where it stands, and one wrong number must not stay for good, neither
            # here nor in its anchor.
            self.progressed(member, local_step, tokens)
        return earlier

    def progressed(self, member: Member, local_step: LocalStep, tokens: int) -> bool:
        """A member says how far it is; the global step doesn't follow a leap.

        Who has trained for long without a word is where it is by steps that nobody merged: it goes on from the
        global step of now, like one whose lease was over.

        Returns:
            Whether it was a leap, forwards or back.
        """
        leap = not 0 <= local_step - member.local_step <= self.leap_steps
        member.local_step, member.tokens = local_step, tokens
        if leap:
            self._reanchor()
        return leap

    def disconnected(self, session: SessionId) -> Member | None:
        """A connection ended; its member stays live until the lease is over."""
        member = self.of(session)
        self.sessions.pop(session, None)
        if member is not None:
            member.session = None
        return member

    def leave(self, member: Member) -> None:
        """A member went on purpose: its lease ends now."""
        member.live = False
        self._reanchor()

    def heard(self, member: Member, now_s: float) -> bool:
        """Renew a lease.

        Returns:
            Whether the member was not live before: the membership changed.
        """
        member.heard_s = now_s
        if member.live:
            return False
        member.live = True
        self._reanchor()
        return True

    def expire(self, now_s: float) -> list[Member]:
        """End the leases of members that were silent too long; returns whose."""
        gone = [member for member in self.live() if now_s >= self.expires_s(member)]
        for member in gone:
            member.live = False
        if gone:
            self._reanchor()
        return gone

    def expires_s(self, member: Member) -> float:
        """When a member's lease ends unless it is heard before."""
        return member.heard_s + member_lease_s(self.lease_s, member.step_time_s)

    def live(self) -> list[Member]:
        """Members whose lease stands, in order of their names."""
        return [member for _, member in sorted(self.members.items()) if member.live]

    def senders(self) -> list[Member]:
        """Members that send, or may come back and send what was under way."""
        return [member for _, member in sorted(self.members.items()) if member.live or member.session is not None]

    def connected(self) -> list[Member]:
        """Members with a session, also those whose lease is over: they may wake and must know what was said."""
        return [member for _, member in sorted(self.members.items()) if member.session is not None]

    def reachable(self, learner_id: LearnerId, incarnation: Incarnation) -> bool:
        """Whether that life is live and has a connection now."""
        member = self.members.get(learner_id)
        return member is not None and member.live and member.session is not None and member.incarnation == incarnation

    def advance(self, limit: int | None = None) -> bool:
        """Bring the global step up to the members' progress, or to a limit; returns whether it moved."""
        step = global_step_of((member.progress for member in self.live()), self.quorum)
        if step is not None and limit is not None:
            step = min(step, limit)
        if step is None or step <= self.global_step:
            return False
        self.global_step = step
        return True

    def step_s(self) -> float | None:
        """Duration of a global step: the K-th shortest of the live members' steps; None before any is known."""
        times = sorted(member.step_time_s for member in self.live() if member.step_time_s > 0)
        return times[min(self.quorum, len(times)) - 1] if times else None

    def _reanchor(self) -> None:
        """The membership changed: from now on everybody counts from the same step."""
        self.changes += 1
        for member in self.live():
            # Of one that hasn't come back it isn't known how far it is; its own anchor is the better guess.
            if not member.remembered:
                member.anchor = member.local_step - self.global_step
