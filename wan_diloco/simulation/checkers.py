"""What must hold at every moment of a run, whatever happens to it.

A checker is told of the syncer's records and merges as they come, and raises `Violation` at the first
that can't be right. It keeps its own books, apart from the machine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wan_diloco.protocol.events import SendToLearner, StartMerge
from wan_diloco.protocol.ledger import Amount
from wan_diloco.protocol.messages import ContributionKey, Pull
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.tape import FragmentPublished, RoundClosed, SyncerStarted, TapeRecord
from wan_diloco.units import FragmentId, LearnerId, RoundId, Term, Version

__all__ = ["Invariants", "Violation"]


_BALANCED_AT_ONCE = 4


class Violation(AssertionError):
    """An invariant doesn't hold: a bug of ours."""


@dataclass(slots=True)
class Invariants:
    """The books.

    Args:
        quorum: K.

    Attributes:
        merged: Keys of all contributions that were merged.
        fresh_in, fresh_at: Of each learner, its merges with staleness 0: fragment, and count of the version
            that they made, or own local step that they reached up to.
    """

    quorum: int
    merged: set[ContributionKey] = field(default_factory=set)
    covered: dict[tuple[LearnerId, int, FragmentId], int] = field(default_factory=dict)
    versions: dict[FragmentId, Version] = field(default_factory=dict)
    digests: dict[tuple[FragmentId, Version], str] = field(default_factory=dict)
    closed: set[RoundId] = field(default_factory=set)
    asked: dict[RoundId, tuple[FragmentId, Term]] = field(default_factory=dict)
    term: Term = field(default=Term(0))
    _turn: int = 0
    fresh_in: dict[LearnerId, list[tuple[FragmentId, int]]] = field(default_factory=dict)
    fresh_at: dict[LearnerId, list[tuple[FragmentId, int]]] = field(default_factory=dict)

    def recorded(self, record: TapeRecord) -> None:
        """A decision was put on the tape."""
        if isinstance(record, SyncerStarted):
            _must(record.term > self.term, f"term {self.term} is followed by {record.term}")
            self.term = record.term
        if isinstance(record, RoundClosed):
            self._closed(record)
        if isinstance(record, FragmentPublished):
            before = self.versions.get(record.fragment_id)
            _must(before is None or before < record.version, f"version {before} is followed by {record.version}")
            self.versions[record.fragment_id] = record.version
            self.saw(record.fragment_id, record.version, record.digest)

    def said(self, effect: SendToLearner) -> None:
        """The syncer says something; a round's number never stands for another round."""
        if isinstance(effect.message, Pull):
            pull, meant = effect.message, (effect.message.fragment_id, self.term)
            _must(self.asked.setdefault(pull.round_id, meant) == meant, f"there are two rounds {pull.round_id}")

    def saw(self, fragment_id: FragmentId, version: Version, digest: str) -> None:
        """Somebody holds a version of a fragment with that digest."""
        known = self.digests.setdefault((fragment_id, version), digest)
        _must(known == digest, f"fragment {fragment_id} at {version} has two digests")

    def merging(self, effect: StartMerge) -> None:
        """A merge begins; a closed round's may begin again after a failure, with the same entries."""
        _must(effect.round_id in self.closed, f"round {effect.round_id} is merged without a close record")

    def balanced(self, machine: SyncerMachine) -> None:
        """The ledger accounts for every step of every fragment."""
        ledger = machine.state.ledger
        # All of a few fragments each time; of many, a different few, since this is called at every event.
        first, self._turn = self._turn, self._turn + _BALANCED_AT_ONCE
        for index in {number % ledger.num_fragments for number in range(first, self._turn)}:
            balance = ledger.balance(FragmentId(index))
            _must(balance == Amount(0, 0), f"the ledger of fragment {index} is off by {balance}")
            outstanding = ledger.outstanding(FragmentId(index))
            _must(min(outstanding.steps, outstanding.tokens) >= 0, f"fragment {index} has negative work outstanding")

    def _closed(self, record: RoundClosed) -> None:
        _must(record.round_id not in self.closed, f"round {record.round_id} is closed twice")
        self.closed.add(record.round_id)
        answered = {
            entry.header.key.learner_id
            for entry in record.entries
            if entry.staleness == 0 and entry.header.round_id == record.round_id
        }
        _must(len(answered) >= self.quorum, f"round {record.round_id} closed with {len(answered)} of {self.quorum}")
        order = [(entry.header.key.learner_id, entry.header.key.step_lo) for entry in record.entries]
        _must(order == sorted(order), f"round {record.round_id} is merged out of order")
        for entry in record.entries:
            key = entry.header.key
            _must(key not in self.merged, f"{key} is merged twice")
            self.merged.add(key)
            # Also no step twice under different keys: the intervals of a life don't overlap.
            life = (key.learner_id, int(key.incarnation), key.fragment_id)
            _must(self.covered.get(life, 0) <= key.step_lo, f"{key} covers steps that were merged before")
            self.covered[life] = entry.header.step_hi
            if entry.staleness == 0:
                self.fresh_in.setdefault(key.learner_id, []).append((key.fragment_id, record.to_version.count))
                self.fresh_at.setdefault(key.learner_id, []).append((key.fragment_id, entry.header.step_hi))


def _must(holds: bool, problem: str) -> None:
    if not holds:
        raise Violation(problem)
