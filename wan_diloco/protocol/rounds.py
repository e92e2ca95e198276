"""Open rounds: whom an attempt asked, who answered, what may be merged.

A round belongs to one fragment and is open until a close record names its contributions; there is at most
one a fragment. An *attempt* freezes the members and asks them all; when it leads to no quorum in its window, a
new one asks the members of then, again all of them. What earlier attempts brought stays in the journal, but
counts towards the quorum only while its sender can't be reached: a sender that can is asked for a newer snapshot.

Owner: the syncer's machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from wan_diloco.protocol.messages import ContributionHeader, DeclineReason
from wan_diloco.protocol.syncer_state import Journalled
from wan_diloco.protocol.tape import MergeEntry, Missing
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LearnerId, RoundId, Version

__all__ = ["REMEMBERED_ATTEMPTS", "Candidates", "OpenRound", "RoundQueue", "answers", "candidates", "missing"]

# After a refusal a learner takes the published value anew, and the next it gives may well be good; where that fails
# again and again, training itself makes it so.
_SPOILED_MAX = 3
# Answers of a learner that has nothing to give yet: what it lacks is steps, not time.
_WORKLESS = frozenset({DeclineReason.ZERO_STEPS, DeclineReason.NO_TOKENS})

# Answers to older ones say nothing of how long a learner takes now.
REMEMBERED_ATTEMPTS = 16

Reachable = Callable[[LearnerId, Incarnation], bool]


@dataclass(slots=True)
class OpenRound:
    """A round between its opening and its close.

    Attributes:
        due_step: The newest step at which it was due.
        attempt: Counts from 1.
        opened_s: When the round opened.
        asked_s: When the current attempt asked its members.
        patience_s: After which an attempt without a quorum is given up, if all that is missing is work: a
            learner had no steps to give, or none that were any use.
        window_s: After which it is given up in any case.
        asked: Members of the current attempt.
        declined: Those of them that answered without a contribution.
        declined_before: The same of the attempt before; what a member said there is believed until it answers again.
        refused: Those of them whose contributions were refused: what they give instead needs another question.
        spoiled: How often, since one was taken, a learner's contributions to this round weren't finite.
        attempts: When each of the last attempts asked, and how much later each member's grant makes its answer. A round
            may stay open for days, attempt after attempt.
        unmeasured: (learner, attempt) whose answers say nothing of the learner: they stood in its own queue, or the
            syncer's cap changed while they were on their way.
        quorate_s: When the current attempt had its quorum; None before.
    """

    round_id: RoundId
    fragment_id: FragmentId
    due_step: GlobalStep
    opened_s: float
    attempt: int = 0
    asked_s: float = 0.0
    patience_s: float = 0.0
    window_s: float = 0.0
    asked: dict[LearnerId, Incarnation] = field(default_factory=dict)
    declined: dict[LearnerId, DeclineReason] = field(default_factory=dict)
    declined_before: dict[LearnerId, DeclineReason] = field(default_factory=dict)
    refused: set[LearnerId] = field(default_factory=set)
    spoiled: dict[LearnerId, int] = field(default_factory=dict)
    attempts: dict[int, tuple[float, dict[LearnerId, float]]] = field(default_factory=dict)
    unmeasured: set[tuple[LearnerId, int]] = field(default_factory=set)
    quorate_s: float | None = None

    def ask(
        self,
        members: dict[LearnerId, Incarnation],
        now_s: float,
        *,
        patience_s: float,
        window_s: float,
        extra_s: dict[LearnerId, float],
    ) -> None:
        """Begin a new attempt with these members."""
        self.attempt += 1
        self.asked, self.declined_before, self.declined, self.refused = dict(members), self.declined, {}, set()
        self.asked_s, self.patience_s, self.window_s = now_s, patience_s, window_s
        self.attempts[self.attempt] = (now_s, extra_s)
        oldest = self.attempt - REMEMBERED_ATTEMPTS
        self.attempts.pop(oldest, None)
        self.unmeasured = {entry for entry in self.unmeasured if entry[1] > oldest}
        self.quorate_s = None

    def grant_anew(self, *, window_s: float, extra_s: dict[LearnerId, float]) -> None:
        """The syncer's cap changed: so do the times that follow from it, of the current attempt."""
        self.window_s, self.attempts[self.attempt] = window_s, (self.asked_s, extra_s)
        self.unmeasured |= {(learner, attempt) for attempt in self.attempts for learner in self.asked}

    def decline(self, learner_id: LearnerId, reason: DeclineReason) -> None:
        """A member of the current attempt answered without a contribution."""
        self.declined[learner_id] = reason
        self.unmeasured.add((learner_id, self.attempt))

    def refuse(self, header: ContributionHeader, *, finite: bool = True) -> None:
        """A contribution was refused. If it was an answer to the current attempt, nothing more comes for that.

        Args:
            header: Its.
            finite: Whether its values were numbers.
        """
        key = header.key
        if not finite and header.round_id == self.round_id:
            self.spoil(key.learner_id)
        if (header.round_id, header.attempt, self.asked.get(key.learner_id)) == (
            self.round_id,
            self.attempt,
            key.incarnation,
        ):
            self.refused.add(key.learner_id)

    def contributes(self, learner_id: LearnerId) -> None:
        """A learner's contribution is here or on its way: what it lacked before it lacks no more."""
        self.declined_before.pop(learner_id, None)
        self.refused.discard(learner_id)

    def spoil(self, learner_id: LearnerId) -> None:
        """What a learner has to give isn't finite."""
        self.spoiled[learner_id] = self.spoiled.get(learner_id, 0) + 1

    def taken(self, learner_id: LearnerId) -> None:
        """A learner's contribution is here, and is good."""
        self.contributes(learner_id)
        self.spoiled.pop(learner_id, None)

    @property
    def extra_s(self) -> dict[LearnerId, float]:
        """How much later each member's grant makes its answer to the current attempt."""
        return self.attempts[self.attempt][1]

    @property
    def gives_up_s(self) -> float:
        """When the current attempt is given up unless it reaches its quorum before."""
        lacks_work = not _WORKLESS.isdisjoint(self.declined.values())
        return self.asked_s + (self.patience_s if lacks_work or self.refused else self.window_s)

    def is_barren(self, quorum: int) -> bool:
        """Whether there would be a quorum, if the losses of enough members were finite."""
        if self.quorate_s is not None:
            return False
        # Members answer at different times, and rounds are asked at different times: all that are open need never have
        # all their answers in one instant.
        said = self.declined_before | self.declined
        able = sum(
            said.get(learner) is not DeclineReason.NO_TOKENS and self.spoiled.get(learner, 0) < _SPOILED_MAX
            for learner in self.asked
        )
        return able < quorum <= len(self.asked)

    def response_s(self, learner_id: LearnerId, attempt: int, now_s: float) -> float | None:
        """How long after its question an answer to an attempt comes; None if that says nothing of its sender.

        What the syncer's own cap made of it doesn't count: that is in the question, not in the learner.
        """
        if attempt not in self.attempts or (learner_id, attempt) in self.unmeasured:
            return None
        asked_s, extra_s = self.attempts[attempt]
        return max(0.0, now_s - asked_s - extra_s.get(learner_id, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What a round could merge now.

    Attributes:
        fresh: Learners that count towards the quorum.
        entries: All that would be merged, in the order of merging: (learner id, step_lo).
        too_old: Journalled contributions whose base is more than one version behind.
    """

    fresh: frozenset[LearnerId]
    entries: tuple[MergeEntry, ...]
    too_old: tuple[Journalled, ...]


def candidates(round_: OpenRound, pool: list[Journalled], version: Version, reachable: Reachable) -> Candidates:
    """Sort a fragment's journalled contributions for a round.

    Fresh is what answers this very attempt on the current version; or any attempt of the round, once its
    sender can't be reached. All others with a base current or one behind ride along: they are merged, and
    count neither towards the quorum nor as "in".
    """
    fresh: set[LearnerId] = set()
    entries: list[MergeEntry] = []
    too_old: list[Journalled] = []
    for item in pool:
        header = item.header
        staleness = version.count - header.base.count if header.base.epoch == version.epoch else -1
        if staleness not in (0, 1):
            too_old.append(item)
            continue
        entries.append(MergeEntry(header=header, ref=item.ref, payload_bytes=item.payload_bytes, staleness=staleness))
        if staleness == 0 and answers(header, round_.round_id, round_.attempt, reachable):
            fresh.add(header.key.learner_id)
    entries.sort(key=lambda entry: (entry.header.key.learner_id, entry.header.key.step_lo))
    return Candidates(fresh=frozenset(fresh), entries=tuple(entries), too_old=tuple(too_old))


def answers(header: ContributionHeader, round_id: RoundId, attempt: int, reachable: Reachable) -> bool:
    """Whether a contribution is an answer that counts towards a round's quorum, if its base is current."""
    key = header.key
    return header.round_id == round_id and (header.attempt == attempt or not reachable(key.learner_id, key.incarnation))


def missing(round_: OpenRound, entries: tuple[MergeEntry, ...], reachable: Reachable) -> tuple[Missing, ...]:
    """Members that are not fresh in a round that closes, and why."""
    fresh = {entry.header.key.learner_id for entry in entries if entry.staleness == 0}
    result = []
    for learner_id, incarnation in sorted(round_.asked.items()):
        if learner_id in fresh:
            continue
        silent = "late" if reachable(learner_id, incarnation) else "away"
        silent = "refused" if learner_id in round_.refused else silent
        reason = round_.declined.get(learner_id, silent)
        result.append(Missing(learner_id=learner_id, reason=str(reason)))
    return tuple(result)


@dataclass(slots=True)
class RoundQueue:
    """Rounds that are due and not open yet, oldest first; a fragment is in it at most once."""

    _due: dict[FragmentId, GlobalStep] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many rounds lag behind their due time."""
        return len(self._due)

    def add(self, fragment_id: FragmentId, due_step: GlobalStep) -> None:
        """A fragment is due; one that waits already keeps its place and takes the newer step."""
        self._due[fragment_id] = max(due_step, self._due.get(fragment_id, due_step))

    def pop(self, is_free: Callable[[FragmentId], bool]) -> tuple[FragmentId, GlobalStep] | None:
        """The oldest whose fragment has no round in progress."""
        for fragment_id, due_step in self._due.items():
            if is_free(fragment_id):
                del self._due[fragment_id]
                return fragment_id, due_step
        return None
