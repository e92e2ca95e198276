"""What a syncer's machine knows, as one value for the operator, the supervisor and the status call."""

from __future__ import annotations

from dataclasses import dataclass

from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LearnerId, LocalStep, RoundId, ShardId

__all__ = ["LearnerStatus", "RoundStatus", "Status", "participation", "status_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """One learner.

    Attributes:
        behind_steps: Of the run's step, by how many its own is less.
        silent_s: Since anything came from it.
        merged_fresh: In how many rounds it was.
        moments: Where the inner moments of its life came from: "own", "peer of NAME", "none"; empty before.
        shard: Of the data, which its life reads; None after that was given to another.
    """

    learner_id: LearnerId
    live: bool
    connected: bool
    incarnation: Incarnation
    local_step: LocalStep
    tokens: int
    loss: float | None
    step_time_s: float
    learning_rate: float
    behind_steps: int
    silent_s: float
    merged_fresh: int
    moments: str
    shard: ShardId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
    """One open round, and what it waits for."""

    round_id: RoundId
    fragment_id: FragmentId
    attempt: int
    open_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The whole run.

    Attributes:
        rounds: Published.
        rounds_due: Waiting to be opened: the lag.
        participation: Learners merged fresh, over rounds times live members; 0 before the first round.
        merges_min: Of the fragment that was merged least.
        balance: Of the ledger; 0 or a bug.
        repeated_units: Units of data that came twice into the journal; 0 where installs overwrite, or a bug.
        trained_tokens, merged_tokens, outstanding_tokens, discarded_tokens: See the ledger.
    """

    global_step: GlobalStep
    total_steps: GlobalStep
    term: int
    epoch: int
    started: bool
    ended: bool
    learners: tuple[LearnerStatus, ...]
    rounds_open: tuple[RoundStatus, ...]
    rounds_due: int
    waiting: dict[str, str]
    rounds: int
    participation: float
    merges_min: int
    rejected: dict[str, int]
    balance: int
    repeated_units: int
    trained_tokens: float
    merged_tokens: float
    outstanding_tokens: float
    discarded_tokens: dict[str, float]
    merged_parameters: int
    upload_bytes: int
    published_parameters: int
    update_bytes: int


def participation(fresh: int, members: int) -> float:
    """Distinct learners merged with staleness 0 over rounds times live members."""
    return fresh / members if members else 0.0


def status_of(machine: SyncerMachine, now_s: float) -> Status:
    """What the machine knows now."""
    context, state = machine.context, machine.state
    totals = state.totals
    ledger = state.ledger.totals(state.parameters)
    return Status(
        global_step=GlobalStep(context.membership.global_step),
        total_steps=context.settings.total_steps,
        term=state.term,
        epoch=state.epoch,
        started=state.started,
        ended=state.ended,
        learners=_learners(machine, now_s),
        rounds_open=_rounds(machine, now_s),
        rounds_due=len(machine.conductor.queue),
        waiting=dict(context.waiting),
        rounds=totals.rounds,
        participation=participation(totals.fresh, totals.members),
        merges_min=min(state.merges),
        rejected={reason.value: count for reason, count in state.rejected.items()},
        balance=ledger.balance,
        repeated_units=state.unit_book.repeated,
        trained_tokens=ledger.trained_tokens,
        merged_tokens=ledger.merged_tokens,
        outstanding_tokens=ledger.outstanding_tokens,
        discarded_tokens={reason.value: tokens for reason, tokens in ledger.discarded_tokens.items()},
        merged_parameters=totals.merged_parameters,
        upload_bytes=totals.upload_bytes,
        published_parameters=totals.published_parameters,
        update_bytes=totals.update_bytes,
    )


def _learners(machine: SyncerMachine, now_s: float) -> tuple[LearnerStatus, ...]:
    return tuple(
        LearnerStatus(
            learner_id=member.learner_id,
            live=member.live,
            connected=member.session is not None,
            incarnation=member.incarnation,
            local_step=member.local_step,
            tokens=member.tokens,
            loss=member.loss,
            step_time_s=member.step_time_s,
            learning_rate=member.learning_rate,
            behind_steps=max(0, machine.context.membership.global_step - member.progress),
            silent_s=now_s - member.heard_s,
            merged_fresh=machine.state.participation[member.learner_id],
            moments=member.moments,
            shard=_shard(machine, member.learner_id),
        )
        for _, member in sorted(machine.context.membership.members.items())
    )


def _shard(machine: SyncerMachine, learner_id: LearnerId) -> ShardId | None:
    lease = machine.state.leases.get(learner_id)
    return None if lease is None else lease.shard


def _rounds(machine: SyncerMachine, now_s: float) -> tuple[RoundStatus, ...]:
    return tuple(
        RoundStatus(
            round_id=round_.round_id,
            fragment_id=round_.fragment_id,
            attempt=round_.attempt,
            open_s=now_s - round_.opened_s,
            reason=machine.conductor.reason(round_.fragment_id),
        )
        for round_ in machine.conductor.open.values()
    )
