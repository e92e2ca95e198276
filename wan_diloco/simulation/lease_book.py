"""Who reads which data: what must hold of it, in books of their own.

They know what was really read: each simulated training loop says of every contribution which units of which shard its
steps took. So neither a wrong position nor a wrong shard can hide behind what a header says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wan_diloco.protocol.events import Record, SyncerEffect
from wan_diloco.protocol.messages import ContributionHeader, ContributionKey, Welcome
from wan_diloco.protocol.tape import LearnerAdmitted, LeaseEnded
from wan_diloco.simulation.violations import must
from wan_diloco.units import FragmentId, LearnerId, ShardId

__all__ = ["LeaseBook", "Unit"]

# A shard, and a unit of it.
Unit = tuple[ShardId, int]


class LeaseBook:
    """Of one run.

    Args:
        listed: The configured learners, in order: each has the shard of its place for good.
        num_spare: Shards beyond theirs.

    Attributes:
        holders: Whose standing life reads each shard.
        committed: Of each shard, the first unit that no durable contribution contains.
        ended: Loans that ended.
    """

    def __init__(self, listed: Sequence[LearnerId] = (), num_spare: int = 0) -> None:
        """Nobody reads anything."""
        self._listed = tuple(listed)
        self._num_spare = num_spare
        self.holders: dict[ShardId, LearnerId] = {}
        self.committed: dict[ShardId, int] = {}
        self.ended = 0
        self._shards: dict[tuple[LearnerId, int], ShardId] = {}
        # Of a number that was given again on another disk there may be two lives.
        self._made: dict[tuple[ContributionKey, int], set[tuple[Unit, ...]]] = {}
        self._merged: dict[tuple[FragmentId, Unit], ContributionKey] = {}

    # ---- what is decided -------------------------------------------------------------------------

    def decided(self, effects: Sequence[SyncerEffect], is_live: Callable[[LearnerId], bool]) -> None:
        """A loan ends only for somebody who is given the shard at once, and not while its holder is there."""
        records = [effect.record for effect in effects if isinstance(effect, Record)]
        for record in records:
            if isinstance(record, LeaseEnded):
                name = f"the lease of {record.learner_id}"
                needed = any(
                    isinstance(other, LearnerAdmitted)
                    and other.shard == record.shard
                    and other.learner_id != record.learner_id
                    for other in records
                )
                must(needed, f"{name} ends, and nobody needs its data")
                must(not is_live(record.learner_id), f"{name} ends, and it is live")

    def admitted(self, record: LearnerAdmitted) -> None:
        """A new life is durable."""
        learner_id, shard = record.learner_id, record.shard
        holder = self.holders.get(shard, learner_id)
        must(holder == learner_id, f"shard {shard} is given to {learner_id}, and {holder} reads it")
        if learner_id in self._listed:
            own = self._listed.index(learner_id)
            must(shard == own, f"{learner_id} is given shard {shard}, and its own is {own}")
        else:
            spare = range(len(self._listed), len(self._listed) + self._num_spare)
            must(shard in spare, f"{learner_id} is given shard {shard}, which isn't a spare one")
            held = [other for other, name in self.holders.items() if name == learner_id and other != shard]
            must(not held, f"{learner_id} is given shard {shard}, and has {held} already")
        self.holders[shard] = learner_id
        self._shards[learner_id, int(record.incarnation)] = shard

    def lease_ended(self, record: LeaseEnded) -> None:
        """The end of a loan is durable."""
        must(record.learner_id not in self._listed, f"{record.learner_id} loses data that are its own")
        holder = self.holders.pop(record.shard, None)
        must(holder == record.learner_id, f"{record.learner_id} loses shard {record.shard}, which {holder} has")
        self.ended += 1

    def welcomed(self, life: tuple[LearnerId, int], welcome: Welcome) -> None:
        """A learner is told what it reads."""
        committed = self.committed.get(welcome.data_shard, 0)
        text = f"{life[0]} is told unit {welcome.next_unit}, {committed} are committed"
        must(welcome.next_unit >= committed, text)

    # ---- what was really read --------------------------------------------------------------------

    def made(self, header: ContributionHeader, units: Sequence[Unit]) -> None:
        """A training loop says which units the steps of a contribution took."""
        self._made.setdefault((header.key, header.step_hi), set()).add(tuple(units))

    def journalled(self, header: ContributionHeader) -> None:
        """A contribution is durable: its units are committed, and are its life's."""
        key = header.key
        said = self._claimed(header)
        read = self._made.get((key, header.step_hi), set())
        must(said in read, f"{key} is journalled with {said}, and had {read}")
        shard = self._shards[key.learner_id, int(key.incarnation)]
        self.committed[shard] = max(self.committed.get(shard, 0), header.unit_hi)

    def merged(self, header: ContributionHeader) -> None:
        """A close record names a contribution: no unit is merged twice into a fragment, whoever read it."""
        for unit in self._claimed(header):
            other = self._merged.setdefault((header.key.fragment_id, unit), header.key)
            must(other == header.key, f"unit {unit[1]} of shard {unit[0]} is merged with {other} and with {header.key}")

    def lost(self, header: ContributionHeader) -> None:
        """What was named can't be read any more: its units may come again, with a later contribution of its key."""
        for unit in self._claimed(header):
            self._merged.pop((header.key.fragment_id, unit), None)

    def anew(self) -> LeaseBook:
        """Books of the same learners that know nothing yet but what was really read."""
        book = LeaseBook(self._listed, self._num_spare)
        book._made = self._made
        return book

    def _claimed(self, header: ContributionHeader) -> tuple[Unit, ...]:
        """The units that a contribution says it has; once it is journalled, that it has."""
        shard = self._shards.get((header.key.learner_id, int(header.key.incarnation)))
        must(shard is not None, f"{header.key} is journalled, and its life was given no data")
        assert shard is not None
        return tuple((shard, unit) for unit in range(header.unit_hi - header.steps, header.unit_hi))
