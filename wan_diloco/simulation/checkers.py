"""What must hold at every moment of a run, whatever happens to it: what is on the tape, and what is merged.

A checker is told of the syncer's decisions, of what has become durable, and of what the learners hold, and raises
`Violation` at the first that can't be right. It keeps its own books, apart from the machine's; who may be heard, and
who is named in a round, is in `talk`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from wan_diloco.protocol.events import Record, StartMerge, SyncerEffect
from wan_diloco.protocol.ledger import Amount
from wan_diloco.protocol.messages import ContributionHeader, ContributionKey
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import (
    ContributionDiscarded,
    ContributionJournalled,
    ContributionsLost,
    FragmentPublished,
    LearnerAdmitted,
    LeaseEnded,
    MergeEntry,
    RoundClosed,
    RunEnded,
    SyncerStarted,
    TapeRecord,
)
from wan_diloco.simulation.lease_book import LeaseBook
from wan_diloco.simulation.violations import Violation, must
from wan_diloco.units import Epoch, FragmentId, LearnerId, RoundId, Term, Version

__all__ = ["Invariants", "Violation", "must"]


_BALANCED_AT_ONCE = 4
# What another disk knows nothing of. Terms and epochs never go back, and no version is ever two values.
_GOES_BACK = (
    "merged",
    "covered",
    "journalled",
    "stored_hi",
    "admitted",
    "leases",
    "versions",
    "closed",
    "merging_now",
    "merged_work",
    "ended",
    "fresh_in",
    "fresh_at",
)


@dataclass(slots=True)
class Invariants:
    """The books.

    Args:
        quorum: K.
        durable: Nothing may be done before what it rests on is durable.
        leases: The books of who reads which data.

    Attributes:
        merged: Keys of all contributions that were merged.
        journalled: Durable contributions without a fate.
        written: The same as the process that runs knows it: some of it may not be durable yet.
        named: What its close records name, while they aren't published.
        stored_hi: Up to which step contributions are durable, by learner, fragment and first step; also those that
            have their fate.
        admitted: The life that stands of each learner.
        fresh_in, fresh_at: Of each learner, its merges with staleness 0: fragment, and count of the version
            that they made, or own local step that they reached up to.
        merging_now: Closed rounds that aren't published, by fragment.
        disk_lost: Whether what was durable was lost once, with its disk.
        published: How many versions there ever were, also on disks that are lost.
    """

    quorum: int
    durable: bool = True
    leases: LeaseBook = field(default_factory=LeaseBook)
    merged: set[ContributionKey] = field(default_factory=set)
    covered: dict[tuple[LearnerId, int, FragmentId], int] = field(default_factory=dict)
    journalled: dict[ContributionKey, ContributionHeader] = field(default_factory=dict)
    written: dict[ContributionKey, ContributionHeader] = field(default_factory=dict)
    named: dict[RoundId, dict[ContributionKey, ContributionHeader]] = field(default_factory=dict)
    stored_hi: dict[tuple[LearnerId, FragmentId, int], int] = field(default_factory=dict)
    admitted: dict[LearnerId, int] = field(default_factory=dict)
    versions: dict[FragmentId, Version] = field(default_factory=dict)
    digests: dict[tuple[FragmentId, Version], str] = field(default_factory=dict)
    closed: set[RoundId] = field(default_factory=set)
    merging_now: dict[FragmentId, RoundClosed] = field(default_factory=dict)
    merged_work: dict[FragmentId, Amount] = field(default_factory=dict)
    term: Term = field(default=Term(0))
    epoch: Epoch = field(default=Epoch(0))
    ended: bool = False
    disk_lost: bool = False
    published: int = 0
    _turn: int = 0
    _is_lost: bool = False
    fresh_in: dict[LearnerId, list[tuple[FragmentId, int]]] = field(default_factory=dict)
    fresh_at: dict[LearnerId, list[tuple[FragmentId, int]]] = field(default_factory=dict)

    def decided(self, effect: SyncerEffect) -> None:
        """The machine wants something; whether it will be durable isn't known yet."""
        if isinstance(effect, Record):
            match effect.record:
                case ContributionJournalled(header=header):
                    self.written[header.key] = header
                case ContributionDiscarded(header=header):
                    self.written.pop(header.key, None)
                case RunEnded():
                    self.written.clear()
                case SyncerStarted(epoch=epoch) if epoch > self.epoch:
                    self.written.clear()
                    self.named.clear()
                case RoundClosed():
                    self.named[effect.record.round_id] = {
                        entry.header.key: entry.header for entry in effect.record.entries
                    }
                    for entry in effect.record.entries:
                        known = self.written.pop(entry.header.key, None)
                        must(known == entry.header, f"{entry.header.key} is merged and not in the journal")
                case ContributionsLost() as lost:
                    named = self.named[lost.round_id]
                    for key in lost.keys:
                        named.pop(key, None)
                    if lost.opened_anew:
                        self.written |= self.named.pop(lost.round_id)
                case FragmentPublished():
                    self.named.pop(effect.record.round_id, None)
                case _:
                    pass

    def recorded(self, record: TapeRecord) -> None:
        """A decision is durable."""
        match record:
            case SyncerStarted():
                must(record.term > self.term, f"term {self.term} is followed by {record.term}")
                self.term = record.term
                begins = record.epoch > self.epoch or not self._is_lost
                must(begins, f"epoch {self.epoch} goes on after a disk was lost")
                if record.epoch != self.epoch:
                    self._anew(record.epoch)
            case LearnerAdmitted():
                before = self.admitted.get(record.learner_id, 0)
                # Numbers that were given on a disk that is lost aren't given again to who says so.
                follows = record.incarnation == before + 1 or (self.disk_lost and record.incarnation > before)
                must(follows, f"life {before} is followed by {record.incarnation}")
                self.admitted[record.learner_id] = record.incarnation
                self.leases.admitted(record)
            case LeaseEnded():
                standing = self.admitted.get(record.learner_id)
                must(standing == record.incarnation, f"the lease of life {record.incarnation} ends, {standing} stands")
                self.leases.lease_ended(record)
            case ContributionJournalled():
                self._journalled(record.header)
            case ContributionDiscarded():
                gone = self.journalled.pop(record.header.key, None)
                must(gone == record.header, f"{record.header.key} is discarded and not in the journal")
            case RoundClosed():
                self._closed(record)
            case ContributionsLost():
                self._lost(record)
            case FragmentPublished():
                self._published(record)
            case RunEnded():
                must(not self.merging_now, "the run ends while rounds are merged")
                self.ended = True
                self.journalled.clear()
            case _:
                pass

    def restarted(self, state: SyncerState) -> None:
        """A new process knows what is durable, and all of it."""
        self.written = dict(self.journalled)
        self.named = {
            closed.round_id: {entry.header.key: entry.header for entry in closed.entries}
            for closed in self.merging_now.values()
        }
        pool = {key: item.header for held in state.pool for key, item in held.items()}
        must(pool == self.journalled, "a restart loses what was acknowledged, or finds what was not")
        must(state.closed == self.merging_now, "a restart forgets rounds that are closed")
        must(dict(state.incarnations) == self.admitted, "a restart forgets who was admitted")
        holders = {lease.shard: learner_id for learner_id, lease in state.leases.items()}
        must(holders == self.leases.holders, "a restart forgets who reads which data")

    def went_back(self, tape: Sequence[TapeRecord]) -> None:
        """A disk was lost: these books go on from the tape that is left, and another epoch must begin.

        What was published keeps its digest: no version may ever be two values, whichever disk it was on.
        """
        left = Invariants(self.quorum, durable=False, leases=self.leases.anew(), disk_lost=True)
        for record in tape:
            left.recorded(record)
        for name in _GOES_BACK:
            setattr(self, name, getattr(left, name))
        self.disk_lost = self._is_lost = True

    def saw(self, fragment_id: FragmentId, version: Version, digest: str) -> None:
        """Somebody holds a version of a fragment with that digest."""
        known = self.digests.setdefault((fragment_id, version), digest)
        must(known == digest, f"fragment {fragment_id} at {version} has two digests")

    def merging(self, effect: StartMerge) -> None:
        """A merge begins; a closed round's may begin again after a failure, with the same entries."""
        if not self.durable:
            return
        must(effect.round_id in self.closed, f"round {effect.round_id} is merged without a close record")
        standing = self.merging_now.get(effect.fragment_id)
        same = standing is not None and standing.entries == effect.entries
        must(same, f"round {effect.round_id} is merged with other entries than it closed with, or again")

    def balanced(self, machine: SyncerMachine) -> None:
        """The ledger accounts for every step of every fragment, and no journalled work is lost."""
        ledger = machine.state.ledger
        held = sum(map(len, machine.state.pool))
        must(
            held == len(self.written), f"{held} contributions wait to be merged, of {len(self.written)} in the journal"
        )
        # All of a few fragments each time; of many, a different few, since this is called at every event.
        first, self._turn = self._turn, self._turn + _BALANCED_AT_ONCE
        for index in {number % ledger.num_fragments for number in range(first, self._turn)}:
            self._balanced(machine, FragmentId(index))

    def over(self, machine: SyncerMachine) -> None:
        """The run has ended: everything has its fate, and the machine's sums are these books' own."""
        for index in range(machine.state.ledger.num_fragments):
            fragment_id = FragmentId(index)
            self._balanced(machine, fragment_id)
            outstanding = machine.state.ledger.outstanding(fragment_id)
            must(outstanding == Amount(0, 0), f"fragment {index} has {outstanding} left at the end")
            mine, its = self.merged_work.get(fragment_id, Amount(0, 0)), machine.state.ledger.merged[index]
            must(mine == its, f"fragment {index}: the ledger has {its} merged, the tape {mine}")

    def _balanced(self, machine: SyncerMachine, fragment_id: FragmentId) -> None:
        # In plain integers, since this is called at every event.
        ledger = machine.state.ledger
        steps = tokens = 0
        for life in ledger.lives.values():
            running = life.running[fragment_id].settled
            steps += life.position.steps - running.steps
            tokens += life.position.tokens - running.tokens
            for interval in life.ended[fragment_id]:
                must(interval.end is not None, "an interval has ended nowhere")
                assert interval.end is not None
                steps += interval.end.steps - interval.settled.steps
                tokens += interval.end.tokens - interval.settled.tokens
        must(min(steps, tokens) >= 0, f"fragment {fragment_id} has negative work outstanding")
        fates = (ledger.merged[fragment_id], *ledger.discarded[fragment_id].values())
        steps += sum(amount.steps for amount in fates) - ledger.trained.steps
        tokens += sum(amount.tokens for amount in fates) - ledger.trained.tokens
        must(steps == tokens == 0, f"the ledger of fragment {fragment_id} is off by {steps} steps, {tokens} tokens")

    def _journalled(self, header: ContributionHeader) -> None:
        key = header.key
        standing = self.admitted.get(key.learner_id)
        must(standing == key.incarnation, f"{key} is journalled while life {standing} stands")
        must(key not in self.merged, f"{key} is journalled and merged already")
        named = {entry.header.key for closed in self.merging_now.values() for entry in closed.entries}
        must(key not in named, f"{key} is replaced after a close record names it")
        before = self.journalled.get(key)
        must(before is None or before.step_hi <= header.step_hi, f"{key} is replaced by less work")
        self.journalled[key] = header
        place = (key.learner_id, key.fragment_id, int(key.step_lo))
        self.stored_hi[place] = max(self.stored_hi.get(place, 0), header.step_hi)
        self.leases.journalled(header)

    def _closed(self, record: RoundClosed) -> None:
        fragment_id, version = record.fragment_id, self.versions.get(record.fragment_id, Version(self.epoch, 0))
        must(record.round_id not in self.closed, f"round {record.round_id} is closed twice")
        must(fragment_id not in self.merging_now, f"fragment {fragment_id} has two rounds")
        must(record.from_version == version, f"round {record.round_id} starts from another version than {version}")
        must(record.to_version == version.next(), f"round {record.round_id} leads to {record.to_version}")
        self.closed.add(record.round_id)
        self.merging_now[fragment_id] = record
        order = [(entry.header.key.learner_id, entry.header.key.step_lo) for entry in record.entries]
        must(order == sorted(order), f"round {record.round_id} is merged out of order")
        for entry in record.entries:
            self._named(record, entry)

    def _named(self, record: RoundClosed, entry: MergeEntry) -> None:
        key = entry.header.key
        must(key not in self.merged, f"{key} is merged twice")
        must(self.journalled.pop(key, None) == entry.header, f"{key} is merged and not in the journal")
        behind = record.from_version.count - entry.header.base.count
        must(entry.header.base.epoch == record.from_version.epoch, f"{key} is of another epoch")
        must(behind in (0, 1) and behind == entry.staleness, f"{key} is merged {behind} versions behind")
        self.merged.add(key)
        self.leases.merged(entry.header)
        # Also no step twice under different keys: the intervals of a life don't overlap.
        life = (key.learner_id, int(key.incarnation), key.fragment_id)
        must(self.covered.get(life, 0) <= key.step_lo, f"{key} covers steps that were merged before")
        self.covered[life] = entry.header.step_hi
        if entry.staleness == 0:
            self.fresh_in.setdefault(key.learner_id, []).append((key.fragment_id, record.to_version.count))
            self.fresh_at.setdefault(key.learner_id, []).append((key.fragment_id, entry.header.step_hi))

    def _anew(self, epoch: Epoch) -> None:
        """What isn't merged is lost, and every version has another name."""
        follows = epoch > self.epoch if self.disk_lost else not self.durable and epoch == self.epoch + 1
        must(follows, f"epoch {self.epoch} is followed by {epoch}")
        self.epoch, self._is_lost = epoch, False
        self.journalled.clear()
        self.merging_now.clear()
        self.versions = {fragment: Version(epoch, version.count) for fragment, version in self.versions.items()}

    def _lost(self, record: ContributionsLost) -> None:
        closed = self.merging_now.pop(record.fragment_id, None)
        must(closed is not None, f"fragment {record.fragment_id} loses contributions without a round")
        assert closed is not None
        lost = {entry.header.key for entry in closed.entries} & set(record.keys)
        must(0 < len(lost) == len(record.keys), "what is lost wasn't there")
        left = tuple(entry for entry in closed.entries if entry.header.key not in lost)
        for entry in closed.entries if record.opened_anew else ():
            if entry in left:
                self.journalled[entry.header.key] = entry.header
        if not record.opened_anew:
            self.merging_now[record.fragment_id] = replace(closed, entries=left)
        # What waits again may be replaced; and a later contribution of a key that is lost contains all of its work.
        gone = [entry.header for entry in closed.entries if record.opened_anew or entry not in left]
        for header in sorted(gone, key=lambda header: header.key.step_lo, reverse=True):
            key = header.key
            self.leases.lost(header)
            self.merged.discard(key)
            self.covered[key.learner_id, int(key.incarnation), key.fragment_id] = key.step_lo

    def _published(self, record: FragmentPublished) -> None:
        closed = self.merging_now.pop(record.fragment_id, None)
        must(closed is not None, f"fragment {record.fragment_id} is published without a round")
        assert closed is not None
        expected = self.versions.get(record.fragment_id, Version(self.epoch, 0)).next()
        must(record.version == expected, f"version {record.version} is published in place of {expected}")
        must(closed.round_id == record.round_id, f"round {record.round_id} is published for {closed.round_id}")
        fresh = {entry.header.key.learner_id for entry in closed.entries if entry.staleness == 0}
        must(len(fresh) >= self.quorum, f"round {record.round_id} is published with {len(fresh)} of {self.quorum}")
        self.versions[record.fragment_id] = record.version
        self.published += 1
        self.saw(record.fragment_id, record.version, record.digest)
        for entry in closed.entries:
            work = Amount(entry.header.steps, entry.header.tokens)
            self.merged_work[record.fragment_id] = self.merged_work.get(record.fragment_id, Amount(0, 0)) + work
