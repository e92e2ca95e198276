"""Who may be heard, who is asked, and who counts: what must hold of everything that is said.

Books of their own of sessions, lives and leases, kept from what goes into the syncer's machine and what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wan_diloco.protocol.events import (
    AcceptUpload,
    CloseSession,
    LearnerDisconnected,
    LearnerSaid,
    Record,
    SendToLearner,
    SessionId,
    SyncerEffect,
    SyncerEvent,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    ContributionRefused,
    Declined,
    Goodbye,
    Hello,
    Pull,
    Report,
    Welcome,
)
from wan_diloco.protocol.rejoin_messages import Donate, DonationOver
from wan_diloco.protocol.tape import LearnerAdmitted, RoundClosed, TapeRecord
from wan_diloco.simulation.checkers import Invariants, must
from wan_diloco.simulation.donations import Donations
from wan_diloco.simulation.world_settings import WorldSettings
from wan_diloco.units import FragmentId, LearnerId, RoundId, Term

__all__ = ["Talk"]

# The machine's own: a learner in the middle of a long step isn't dead.
_LEASE_STEPS = 5
_TINY_S = 1e-6


@dataclass(slots=True)
class _Attempt:
    asked_s: float
    lives: dict[LearnerId, int] = field(default_factory=dict)
    # Who answered without a contribution, or with one that was refused.
    declined: set[LearnerId] = field(default_factory=set)


class Talk:
    """The books of one run.

    Args:
        settings: The run.
        invariants: The books of what is durable.

    Attributes:
        longest_s: The longest from a question to its answer in the journal.
    """

    def __init__(self, settings: WorldSettings, invariants: Invariants) -> None:
        """Nobody has said anything."""
        self._settings = settings
        self._invariants = invariants
        self.longest_s = 0.0
        self._donations = Donations(invariants, settings.joiners_max)
        self._hellos: dict[SessionId, Hello] = {}
        # Which process was given which life, of those that were given a new one last.
        self._born: dict[LearnerId, tuple[str, int]] = {}
        self._lives: dict[SessionId, tuple[LearnerId, int]] = {}
        self._standing: dict[LearnerId, SessionId] = {}
        self._ended: set[SessionId] = set()
        self._heard_s: dict[LearnerId, float] = {}
        self._step_s: dict[LearnerId, float] = {}
        self._reported: tuple[SessionId, LearnerId, float] | None = None
        self._left: set[LearnerId] = set()
        # Whom this process of the syncer has welcomed: only of them it knows for how long they have been silent.
        self._known: set[LearnerId] = set()
        self._measured: set[tuple[LearnerId, int]] = set()
        self._meant: dict[RoundId, tuple[FragmentId, Term]] = {}
        self._attempts: dict[tuple[RoundId, int], _Attempt] = {}
        # The contribution that is being judged.
        self._judged: ContributionHeader | None = None

    def restarted(self, now_s: float) -> None:
        """The syncer is another process: all sessions are gone; whoever was there has a lease to come back."""
        for books in (
            self._hellos,
            self._lives,
            self._standing,
            self._ended,
            self._measured,
            self._step_s,
            self._known,
        ):
            books.clear()
        self._donations.restarted()
        self._heard_s = dict.fromkeys(self._heard_s, now_s)

    def went_back(self, tape: Iterable[TapeRecord]) -> None:
        """A disk was lost: who was given which life is what the tape that is left says."""
        admitted = [record for record in tape if isinstance(record, LearnerAdmitted)]
        self._born = {record.learner_id: (record.life_id, record.incarnation) for record in admitted}

    # ---- what goes into the machine --------------------------------------------------------------

    def heard(self, event: SyncerEvent, now_s: float) -> None:
        """The machine is told something."""
        self._judged = event.header if isinstance(event, UploadOffered | UploadStored | UploadFailed) else None
        match event:
            case LearnerDisconnected():
                life = self._lives.pop(event.session, None)
                self._hellos.pop(event.session, None)
                self._ended.discard(event.session)
                self._donations.gone(event.session)
                if life is not None and self._standing.get(life[0]) == event.session:
                    del self._standing[life[0]]
            case LearnerSaid() if isinstance(event.message, Hello):
                self._hellos.setdefault(event.session, event.message)
            case UploadOffered(header=header) if self._lives.get(event.session) != _life_of(header):
                pass  # in another's name: nobody's sign of life
            case LearnerSaid() | UploadOffered() if self._stands(event.session):
                learner_id = self._lives[event.session][0]
                self._heard_s[learner_id] = now_s
                self._left.discard(learner_id)
                if isinstance(event, LearnerSaid):
                    self._listen(learner_id, event)
            case UploadStored():
                key = event.header.key
                self._measured.add((key.learner_id, int(key.incarnation)))
                asked = self._attempts.get((event.header.round_id, event.header.attempt))
                if asked is not None:
                    self.longest_s = max(self.longest_s, now_s - asked.asked_s)
            case _:
                pass

    def _listen(self, learner_id: LearnerId, event: LearnerSaid) -> None:
        match event.message:
            case Report() as report:
                self._reported = (event.session, learner_id, report.step_time_s)
            case Goodbye():
                self._left.add(learner_id)
            case Declined() as declined:
                attempt = self._attempts.get((declined.round_id, declined.attempt))
                if attempt is not None:
                    attempt.declined.add(learner_id)
            case _:
                pass

    # ---- what comes out of it --------------------------------------------------------------------

    def decided(self, effects: Iterable[SyncerEffect], now_s: float) -> None:
        """The machine has decided; nothing of it is done yet."""
        effects = tuple(effects)
        if self._reported is not None:
            # A report that can't be true ends its session, and nothing of it is believed.
            (session, reporter, step_s), self._reported = self._reported, None
            if not any(isinstance(effect, CloseSession) and effect.session == session for effect in effects):
                self._step_s[reporter] = step_s
        self._invariants.leases.decided(effects, lambda learner_id: self._is_here(learner_id, now_s))
        for effect in effects:
            match effect:
                case Record(record=RoundClosed() as closed):
                    self._closed(closed, now_s)
                case SendToLearner(message=Pull() as pull):
                    self._asked(effect.session, pull, now_s)
                case SendToLearner(message=Welcome() as welcome):
                    self._welcomed(effect.session, welcome, now_s)
                case SendToLearner(message=Donate() as donate):
                    self._donations.asked(effect.session, self._lives[effect.session], donate)
                case SendToLearner(message=DonationOver() as over):
                    self._donations.over(effect.session, over.transfer)
                case SendToLearner(message=ContributionRefused()):
                    self._refused()
                case AcceptUpload(header=header):
                    must(effect.session not in self._ended, f"an upload is taken on session {effect.session}, ended")
                    own = self._lives.get(effect.session) == _life_of(header)
                    must(own, f"{header.key} is taken from another")
                case CloseSession():
                    self._ended.add(effect.session)
                case _:
                    pass

    def _refused(self) -> None:
        """What was judged is no use: its sender is asked again, and not waited for."""
        header = self._judged
        attempt = None if header is None else self._attempts.get((header.round_id, header.attempt))
        if header is not None and attempt is not None:
            attempt.declined.add(header.key.learner_id)

    def said(self, effect: SendToLearner) -> None:
        """Something is said, and all before it is done."""
        message = effect.message
        if isinstance(message, Acknowledged) and effect.session in self._lives and self._settings.durable:
            place = (self._lives[effect.session][0], message.fragment_id, int(message.step_lo))
            durable = self._invariants.stored_hi.get(place, -1)
            must(durable >= message.step_hi, f"{place} is acknowledged up to {message.step_hi}, durable to {durable}")
        if isinstance(message, Welcome):
            learner_id, incarnation = self._lives[effect.session]
            standing = self._invariants.admitted.get(learner_id)
            must(standing is not None and incarnation <= standing, f"life {incarnation} isn't durable")

    def _welcomed(self, session: SessionId, welcome: Welcome, now_s: float) -> None:
        hello = self._hellos[session]
        learner_id, incarnation = hello.learner_id, int(welcome.incarnation)
        must(session not in self._ended, f"session {session} is welcomed after its end")
        standing = self._invariants.admitted.get(learner_id, 0)
        asked_again = self._born.get(learner_id) == (hello.life_id, standing)
        has_data = learner_id in self._invariants.leases.holders.values()
        # It was given on a disk that is lost.
        is_forgotten = self._invariants.disk_lost and hello.incarnation > standing
        if has_data and asked_again and not is_forgotten:
            must(incarnation == standing, f"who lives {standing} asked twice, and gets another: {incarnation}")
        elif has_data and hello.incarnation and not is_forgotten:
            must(incarnation == hello.incarnation == standing, f"life {incarnation} is welcomed, {standing} stands")
        else:
            is_own = hello.incarnation in (0, standing) or asked_again or is_forgotten
            must(is_own, f"life {hello.incarnation} of {learner_id} is over, and is welcomed as another")
            given = max(standing, int(hello.incarnation))
            must(incarnation > given, f"a new life gets the number {incarnation}, {given} was given before")
            self._born[learner_id] = (hello.life_id, incarnation)
            self._step_s.pop(learner_id, None)
        self._invariants.leases.welcomed((learner_id, incarnation), welcome)
        self._known.add(learner_id)
        self._lives[session] = (learner_id, incarnation)
        self._standing[learner_id] = session
        self._heard_s[learner_id] = now_s
        self._left.discard(learner_id)

    def _asked(self, session: SessionId, pull: Pull, now_s: float) -> None:
        must(session in self._lives, f"session {session} is asked and was never welcomed")
        learner_id, incarnation = self._lives[session]
        must(self._is_live(learner_id, now_s), f"{learner_id} is asked, and its lease is over")
        meant = (pull.fragment_id, self._invariants.term)
        must(self._meant.setdefault(pull.round_id, meant) == meant, f"there are two rounds {pull.round_id}")
        must(pull.round_id not in self._invariants.closed, f"round {pull.round_id} is asked for and closed")
        attempt = self._attempts.setdefault((pull.round_id, pull.attempt), _Attempt(now_s))
        must(learner_id not in attempt.lives, f"{learner_id} is asked twice in round {pull.round_id}")
        attempt.lives[learner_id] = incarnation

    def _closed(self, closed: RoundClosed, now_s: float) -> None:
        name, quorum = f"round {closed.round_id}", self._settings.quorum
        known = self._attempts.get((closed.round_id, closed.attempt))
        attempt = known or _Attempt(now_s)
        # When nobody had a connection nobody was told, and these books don't know when that was.
        for learner_id in closed.members if known is not None else ():
            silent_s = attempt.asked_s - self._heard_s.get(learner_id, float("-inf"))
            must(silent_s <= self._lease_s(learner_id) + _TINY_S, f"{name} names {learner_id}, silent {silent_s} s")
        fresh = {
            header.key.learner_id
            for header in (entry.header for entry in closed.entries)
            if header.round_id == closed.round_id
            and header.base == closed.from_version
            and (
                header.attempt == closed.attempt
                or not self._reachable(header.key.learner_id, header.key.incarnation, now_s)
            )
        }
        must(len(fresh) >= quorum, f"{name} closed with {len(fresh)} of {quorum}")
        awaited = {
            learner_id
            for learner_id, incarnation in attempt.lives.items()
            if learner_id not in fresh | attempt.declined and self._reachable(learner_id, incarnation, now_s)
        }
        self._graceful(name, closed.attempt, awaited, attempt, now_s)

    def _graceful(self, name: str, number: int, awaited: set[LearnerId], attempt: _Attempt, now_s: float) -> None:
        """Of whom it isn't known how long it takes, it is waited for up to the bound."""
        new = {learner for learner in awaited if (learner, attempt.lives[learner]) not in self._measured}
        steps = [step_s for step_s in self._step_s.values() if step_s > 0]
        if not new or not self._settings.safety:
            return
        must(bool(steps), f"{name} closed without {min(new)} before anything was known of steps")
        waited_s, due_s = now_s - attempt.asked_s, self._settings.bound_steps * min(steps)
        detail = f"attempt {number} of {name} waited {waited_s:.3f} of {due_s:.3f} s for {min(new)}"
        must(waited_s >= due_s - _TINY_S, detail)

    # ---- inside ----------------------------------------------------------------------------------

    def _stands(self, session: SessionId) -> bool:
        life = self._lives.get(session)
        return life is not None and session not in self._ended and self._standing.get(life[0]) == session

    def _lease_s(self, learner_id: LearnerId) -> float:
        return max(self._settings.lease_s, _LEASE_STEPS * self._step_s.get(learner_id, 0.0))

    def _is_live(self, learner_id: LearnerId, now_s: float) -> bool:
        silent_s = now_s - self._heard_s.get(learner_id, float("-inf"))
        return learner_id not in self._left and silent_s <= self._lease_s(learner_id) + _TINY_S

    def _is_here(self, learner_id: LearnerId, now_s: float) -> bool:
        """Beyond doubt."""
        return learner_id in self._known and self._is_live(learner_id, now_s + 2 * _TINY_S)

    def _reachable(self, learner_id: LearnerId, incarnation: int, now_s: float) -> bool:
        """Beyond doubt: whose lease ends in this instant isn't."""
        session = self._standing.get(learner_id)
        alive = session is not None and self._lives[session] == (learner_id, incarnation)
        return alive and self._is_live(learner_id, now_s + 2 * _TINY_S)


def _life_of(header: ContributionHeader) -> tuple[LearnerId, int]:
    return header.key.learner_id, int(header.key.incarnation)
