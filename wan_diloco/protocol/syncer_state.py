"""What a syncer must not forget, changed only by applying tape records.

Alive, the machine emits a record and applies it; after a restart the records since the last snapshot are
applied to the snapshot's state, and give the same state. The learners' reports are not on the tape: what the
ledger learned from them is in the snapshots, and comes again with the next reports.

Owner: the syncer's machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import assert_never

from wan_diloco.protocol.epochs import begin_epoch, refragment
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.ledger import Amount, DiscardReason, Ledger
from wan_diloco.protocol.messages import ContributionHeader, ContributionKey, MergedNote, RefusalReason
from wan_diloco.protocol.tape import (
    ContributionDiscarded,
    ContributionJournalled,
    ContributionsLost,
    FragmentPublished,
    LearnerAdmitted,
    LeaseEnded,
    MembershipChanged,
    MergeEntry,
    ProgressNoted,
    Refragmented,
    RoundClosed,
    RunEnded,
    RunStarted,
    ShardsAssigned,
    SyncerStarted,
    TapeRecord,
)
from wan_diloco.protocol.unit_book import UnitBook
from wan_diloco.units import Epoch, FragmentId, Incarnation, LearnerId, ShardId, Term, Version

__all__ = ["Journalled", "StoredUpdate", "SyncerState", "Totals"]

_NO_TERM = Term(0)
# Of older ones it isn't known who began them; a learner that was away for so many starts is taken at its word.
_TERM_IDS_MAX = 64
_FIRST_EPOCH = Epoch(0)
_STALE_AS = {RefusalReason.STALE_BASE: DiscardReason.STALE_BASE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Journalled:
    """A contribution in the journal that no close record names yet."""

    header: ContributionHeader
    ref: str
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUpdate:
    """A publication in the journal: one link of a chain for those who lag."""

    from_version: Version
    to_version: Version
    digest: str
    ref: str
    codes_bytes: int
    scales_bytes: int
    merged: tuple[MergedNote, ...]


@dataclass(slots=True)
class Totals:
    """Counters of the whole run; none ever falls.

    Attributes:
        rounds: Published.
        fresh, members: Sums over rounds of learners merged fresh, and of live members: their ratio is the
            participation.
        merged_parameters, upload_bytes: Over merged contributions.
        published_parameters, update_bytes: Over publications.
    """

    rounds: int = 0
    fresh: int = 0
    stale: int = 0
    members: int = 0
    merged_parameters: int = 0
    upload_bytes: int = 0
    published_parameters: int = 0
    update_bytes: int = 0


@dataclass(slots=True)
class SyncerState:
    """The durable state.

    Attributes:
        parameters: Of each fragment.
        incarnations: The life that stands of each learner ever admitted.
        life_ids: Of the processes that live them.
        anchors: Of each live member, as of the last change of membership.
        term_ids: Which process began each of the last terms; empty where it told nobody.
        versions, digests: Published, of each fragment.
        durable: Whether the process that runs, or ran last, acknowledges and sends only what is on the tape.
        updates: Stored publications of each fragment, oldest first, at most `keep_updates`.
        pool: Journalled contributions that no close record names.
        closed: Rounds that are closed and not yet published, by fragment.
        leases: Which data the standing life of each learner reads; of one whose lease has ended there is none.
        units: First unit of each shard that isn't committed.
        shards: The part of the training text that belongs to each learner that was ever configured.
        listed: Learners that are configured now, with their shards.
        total_steps: T, once the run has started.
        global_step: At least this far.
        due_steps: Of each fragment, the global step at which its last closed round was due; 0 before. One less where
            that round is opened anew.
    """

    parameters: tuple[int, ...]
    initial_digests: tuple[str, ...]
    keep_updates: int
    term: Term = _NO_TERM
    term_ids: dict[Term, str] = field(default_factory=dict)
    epoch: Epoch = _FIRST_EPOCH
    durable: bool = True
    started: bool = False
    ended: bool = False
    total_steps: int = 0
    global_step: int = 0
    next_round: int = 0
    incarnations: dict[LearnerId, Incarnation] = field(default_factory=dict)
    life_ids: dict[LearnerId, str] = field(default_factory=dict)
    anchors: dict[LearnerId, int] = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    updates: list[list[StoredUpdate]] = field(default_factory=list)
    pool: list[dict[ContributionKey, Journalled]] = field(default_factory=list)
    closed: dict[FragmentId, RoundClosed] = field(default_factory=dict)
    leases: dict[LearnerId, Lease] = field(default_factory=dict)
    units: dict[ShardId, int] = field(default_factory=dict)
    shards: dict[LearnerId, ShardId] = field(default_factory=dict)
    listed: tuple[tuple[LearnerId, ShardId], ...] = ()
    due_steps: list[int] = field(default_factory=list)
    merges: list[int] = field(default_factory=list)
    participation: Counter[LearnerId] = field(default_factory=Counter)
    rejected: Counter[RefusalReason] = field(default_factory=Counter)
    totals: Totals = field(default_factory=Totals)
    ledger: Ledger = field(init=False)
    unit_book: UnitBook = field(init=False)

    def __post_init__(self) -> None:
        """Begin at the initial weights."""
        count = len(self.parameters)
        self.versions = [Version(self.epoch, 0)] * count
        self.digests = list(self.initial_digests)
        self.updates = [[] for _ in range(count)]
        self.pool = [{} for _ in range(count)]
        self.due_steps = [0] * count
        self.merges = [0] * count
        self.ledger = Ledger(count)
        self.unit_book = UnitBook(count)

    def apply(self, record: TapeRecord) -> None:
        """Change the state as a record says. Records are applied in the tape's order, each once."""
        match record:
            case SyncerStarted():
                if record.epoch > self.epoch:
                    begin_epoch(self, record.epoch, DiscardReason.SYNCER_LOST)
                self.term, self.durable = record.term, record.durable
                self.term_ids[record.term] = record.term_id
                for term in sorted(self.term_ids)[:-_TERM_IDS_MAX]:
                    del self.term_ids[term]
                self.next_round = max(self.next_round, record.next_round)
            case ShardsAssigned():
                self._assigned(record)
            case Refragmented():
                refragment(self, record)
            case LearnerAdmitted():
                self._admitted(record)
            case LeaseEnded():
                self._leaves(record.learner_id, DiscardReason.LEASE_ENDED)
            case MembershipChanged():
                self.global_step = max(self.global_step, record.global_step)
                self.anchors = dict(record.anchors)
            case RunStarted():
                self.started, self.total_steps = True, record.total_steps
            case ContributionJournalled():
                self._journalled(record)
            case ContributionDiscarded():
                self._discarded(record)
            case RoundClosed():
                self._closed(record)
            case ContributionsLost():
                self._lost(record)
            case FragmentPublished():
                self._published(record)
            case ProgressNoted():
                for learner_id, incarnation, steps, tokens in record.positions:
                    self.ledger.observe(learner_id, incarnation, Amount(steps, tokens))
                for reason, number in record.rejected:
                    self.rejected[reason] = max(self.rejected[reason], number)
            case RunEnded():
                self._ended(record)
            case _:
                assert_never(record)

    def progress(self) -> ProgressNoted:
        """What the tape doesn't say otherwise."""
        positions = tuple(
            (learner_id, incarnation, life.position.steps, life.position.tokens)
            for (learner_id, incarnation), life in sorted(self.ledger.lives.items())
            if not life.closed
        )
        return ProgressNoted(positions=positions, rejected=tuple(sorted(self.rejected.items())))

    def rejected_once(self, reason: RefusalReason) -> None:
        """Count a refusal."""
        self.rejected[reason] += 1

    # ---- records ---------------------------------------------------------------------------------

    def _assigned(self, record: ShardsAssigned) -> None:
        before, names = dict(self.listed), dict(record.shards)
        self.listed = record.shards
        self.shards.update(record.shards)
        for learner_id in before.keys() - names.keys():
            # What it had journalled still counts, and its shard stays its own.
            self._leaves(learner_id, DiscardReason.REMOVED)
        for learner_id, lease in list(self.leases.items()):
            if names.get(learner_id) != lease.shard and lease.shard in names.values():
                # What was lent is some region's now.
                self._leaves(learner_id, DiscardReason.LEASE_ENDED)

    def _leaves(self, learner_id: LearnerId, reason: DiscardReason) -> None:
        self.leases.pop(learner_id, None)
        self.anchors.pop(learner_id, None)
        self.ledger.close(learner_id, reason)

    def _admitted(self, record: LearnerAdmitted) -> None:
        self.incarnations[record.learner_id] = record.incarnation
        self.life_ids[record.learner_id] = record.life_id
        self.leases[record.learner_id] = Lease(shard=record.shard, first_unit=self.units.get(record.shard, 0))
        self.anchors.pop(record.learner_id, None)
        self.ledger.admit(record.learner_id, record.incarnation, Amount(record.local_step, record.tokens))

    def _journalled(self, record: ContributionJournalled) -> None:
        key = record.header.key
        self.pool[key.fragment_id][key] = Journalled(
            header=record.header, ref=record.ref, payload_bytes=record.payload_bytes
        )
        self.ledger.journalled(record.header)
        shard = self.leases[key.learner_id].shard
        self.units[shard] = max(self.units.get(shard, 0), record.header.unit_hi)
        self.unit_book.journalled(record.header, shard)

    def _discarded(self, record: ContributionDiscarded) -> None:
        key = record.header.key
        del self.pool[key.fragment_id][key]
        self.ledger.settled(record.header, _STALE_AS.get(record.reason, DiscardReason.REFUSED))

    def _closed(self, record: RoundClosed) -> None:
        for entry in record.entries:
            del self.pool[record.fragment_id][entry.header.key]
            self.ledger.named(entry.header)
        self.closed[record.fragment_id] = record
        self.due_steps[record.fragment_id] = record.global_step
        self.next_round = max(self.next_round, record.round_id + 1)
        self.global_step = max(self.global_step, record.global_step)

    def _lost(self, record: ContributionsLost) -> None:
        closed = self.closed[record.fragment_id]
        for entry in closed.entries:
            if entry.header.key in record.keys:
                self.ledger.unreadable(entry.header)
        left = tuple(entry for entry in closed.entries if entry.header.key not in record.keys)
        if not record.opened_anew:
            self.closed[record.fragment_id] = replace(closed, entries=left)
            return
        del self.closed[record.fragment_id]
        for entry in left:
            self.pool[record.fragment_id][entry.header.key] = Journalled(
                header=entry.header, ref=entry.ref, payload_bytes=entry.payload_bytes
            )
            self.ledger.unnamed(entry.header)
        # It is due still, also for a process that knows nothing but this.
        self.due_steps[record.fragment_id] = closed.global_step - 1

    def _published(self, record: FragmentPublished) -> None:
        fragment_id = record.fragment_id
        closed = self.closed.pop(fragment_id)
        notes = tuple(
            MergedNote(
                learner_id=entry.header.key.learner_id,
                incarnation=entry.header.key.incarnation,
                step_lo=entry.header.key.step_lo,
                step_hi=entry.header.step_hi,
            )
            for entry in closed.entries
        )
        for entry in closed.entries:
            self.ledger.settled(entry.header, None)
        update = StoredUpdate(
            from_version=self.versions[fragment_id],
            to_version=record.version,
            digest=record.digest,
            ref=record.ref,
            codes_bytes=record.codes_bytes,
            scales_bytes=record.scales_bytes,
            merged=notes,
        )
        self.updates[fragment_id] = [*self.updates[fragment_id], update][-self.keep_updates :]
        self.versions[fragment_id] = record.version
        self.digests[fragment_id] = record.digest
        self._count(closed, record)

    def _count(self, closed: RoundClosed, record: FragmentPublished) -> None:
        fresh = _fresh(closed.entries)
        size = self.parameters[record.fragment_id]
        self.merges[record.fragment_id] += 1
        self.participation.update(fresh)
        totals = self.totals
        totals.rounds += 1
        totals.fresh += len(fresh)
        totals.stale += sum(1 for entry in closed.entries if entry.staleness > 0)
        totals.members += max(len(closed.members), len(fresh))
        totals.merged_parameters += size * len(closed.entries)
        totals.upload_bytes += sum(entry.payload_bytes for entry in closed.entries)
        totals.published_parameters += size
        totals.update_bytes += record.update_bytes

    def _ended(self, record: RunEnded) -> None:
        self.ended = True
        self.global_step = max(self.global_step, record.global_step)
        for pool in self.pool:
            for journalled in pool.values():
                self.ledger.settled(journalled.header, DiscardReason.RUN_ENDED)
            pool.clear()
        for learner_id in self.incarnations:
            self.ledger.close(learner_id, DiscardReason.RUN_ENDED)


def _fresh(entries: tuple[MergeEntry, ...]) -> set[LearnerId]:
    return {entry.header.key.learner_id for entry in entries if entry.staleness == 0}
