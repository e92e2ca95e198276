"""The tape: the append-only record of every decision of a syncer.

A machine changes its durable state only by applying tape records (see `syncer_state`): alive, it emits
a record and applies it; after a restart the same records are applied again, and give the same state. The
journal holds them as JSON (`serial`), with the payloads of contributions and publications behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_diloco.protocol.messages import ContributionHeader, ContributionKey, RefusalReason
from wan_diloco.units import (
    Epoch,
    FragmentId,
    GlobalStep,
    Incarnation,
    LearnerId,
    LocalStep,
    RoundId,
    ShardId,
    Term,
    Version,
)

__all__ = [
    "ContributionDiscarded",
    "ContributionJournalled",
    "ContributionsLost",
    "FragmentPublished",
    "LearnerAdmitted",
    "LeaseEnded",
    "MembershipChanged",
    "MergeEntry",
    "Missing",
    "ProgressNoted",
    "Refragmented",
    "RoundClosed",
    "RunEnded",
    "RunStarted",
    "ShardsAssigned",
    "SyncerStarted",
    "TapeRecord",
]

_FIRST_SHARD = ShardId(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerStarted:
    """A syncer process took this state; the term fences an older one.

    Attributes:
        epoch: A higher one than before: the process before this one may have acknowledged and sent what isn't on the
            tape, and nothing that learners have counts any more.
        next_round: No earlier process gave this number or a higher one to a round, also not to one that it
            opened and never closed.
        durable: What this process acknowledges and sends is on the tape before.
        term_id: Drawn by this process, which tells it from another that began the same term on a copy; empty for none.
    """

    term: Term
    epoch: Epoch
    next_round: int = 0
    durable: bool = True
    term_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsAssigned:
    """Who takes part, and which part of the training text is whose; nobody else's work is waited for any more.

    Attributes:
        shards: Of each configured learner.
    """

    shards: tuple[tuple[LearnerId, ShardId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refragmented:
    """The parameters are cut into other fragments, each element with the values that it had; a new epoch begins.

    Attributes:
        fragments_before, fragments: The numbers that were asked for.
        parameters: Of each new fragment.
        initial_digests, digests: Of its initial and of its published value.
        counts: Of its version.
        due_steps: The last global step at which it was due; the rounds until then count as done.
    """

    fragments_before: int
    fragments: int
    epoch: Epoch
    parameters: tuple[int, ...]
    initial_digests: tuple[str, ...]
    digests: tuple[str, ...]
    counts: tuple[int, ...]
    due_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerAdmitted:
    """A new life of a learner; lower incarnations are refused from now on.

    Attributes:
        life_id: Of the process that asked for it; see `Hello`.
        shard: Of the data: it goes on where the shard's committed units end.
    """

    learner_id: LearnerId
    incarnation: Incarnation
    local_step: LocalStep
    tokens: int
    life_id: str = ""
    shard: ShardId = _FIRST_SHARD


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """A life that is not live is over, since another learner needs its data; what it had journalled still counts.

    Attributes:
        shard: Free from now on.
    """

    learner_id: LearnerId
    incarnation: Incarnation
    shard: ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChanged:
    """Others are live from now on.

    Attributes:
        global_step: At that moment.
        anchors: Of each live member, local_step - global_step: with them a restarted syncer finds the global
            step again by the members' own counters.
    """

    global_step: GlobalStep
    anchors: tuple[tuple[LearnerId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """Learners may take steps. Given once a run.

    Attributes:
        present, absent: Configured learners that were live by then, and those that weren't.
        total_steps: T, whatever a later start is configured with.
    """

    present: tuple[LearnerId, ...]
    absent: tuple[LearnerId, ...]
    total_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionJournalled:
    """A contribution is whole, valid and durable; it replaces a smaller one under its key."""

    header: ContributionHeader
    ref: str
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionDiscarded:
    """A journalled contribution that will never be merged."""

    header: ContributionHeader
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeEntry:
    """A contribution in a merge.

    Attributes:
        staleness: Versions by which its base was behind: 0 is fresh.
    """

    header: ContributionHeader
    ref: str
    payload_bytes: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A member that is not fresh in a round, and why."""

    learner_id: LearnerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """Which contributions a round merges; decided, durable, changed by `ContributionsLost` alone.

    Attributes:
        members: Live learners of the last attempt.
        global_step: At which the round was due.
        quorum_s, grace_s: Time from the round's opening to its quorum, and from there to its close.
    """

    round_id: RoundId
    attempt: int
    fragment_id: FragmentId
    from_version: Version
    to_version: Version
    global_step: GlobalStep
    members: tuple[LearnerId, ...]
    entries: tuple[MergeEntry, ...]
    missing: tuple[Missing, ...]
    quorum_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionsLost:
    """Bytes of a closed round's contributions can't be read any more: it merges the others, or is opened anew.

    Attributes:
        keys: Of the contributions.
        opened_anew: The others are no quorum: they wait for the round that comes in place of this one.
    """

    round_id: RoundId
    fragment_id: FragmentId
    keys: tuple[ContributionKey, ...]
    opened_anew: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentPublished:
    """The new version of a fragment exists, with these bits."""

    round_id: RoundId
    fragment_id: FragmentId
    version: Version
    digest: str
    ref: str
    codes_bytes: int
    scales_bytes: int
    update_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressNoted:
    """How far everybody is, and what was refused: once in a while, so that a restart knows it nearly to the second.

    No decision rests on it, so it is never waited for; figures that are shown must not fall over a restart.

    Attributes:
        positions: Of each open life: learner, incarnation, cumulative steps and tokens.
        rejected: For each reason, how often something was refused since the run began.
    """

    positions: tuple[tuple[LearnerId, Incarnation, int, int], ...]
    rejected: tuple[tuple[RefusalReason, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last step is reached, and every round is done or can't be."""

    global_step: GlobalStep
    reason: str


TapeRecord = (
    SyncerStarted
    | ShardsAssigned
    | Refragmented
    | LearnerAdmitted
    | LeaseEnded
    | MembershipChanged
    | RunStarted
    | ContributionJournalled
    | ContributionDiscarded
    | RoundClosed
    | ContributionsLost
    | FragmentPublished
    | ProgressNoted
    | RunEnded
)
