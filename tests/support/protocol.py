"""Messages, headers and settings of a small invented run, for tests of the decisions."""

from __future__ import annotations

from wan_diloco.protocol.admission import Terms
from wan_diloco.protocol.intake import FragmentSizes, IntakeRules
from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    ContributionHeader,
    ContributionKey,
    FragmentReport,
    Hello,
    Report,
)
from wan_diloco.protocol.quorum import GracePolicy
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.protocol.syncer_machine import SyncerSettings
from wan_diloco.protocol.syncer_state import SyncerState
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
    "BATCH_TOKENS",
    "EAST",
    "RULES",
    "TERMS",
    "WEST",
    "contribution",
    "fresh_state",
    "hello",
    "report",
    "syncer_settings",
    "version",
]

EAST, WEST = LearnerId("east"), LearnerId("west")
BATCH_TOKENS = 100
_SIZES = FragmentSizes(parameters=1000, codes_bytes=500, scales_bytes=16)
TERMS = Terms(
    run="a run",
    learners=(EAST, WEST),
    layout=("layer.0 4x4", "layer.1 4x4"),
    settings=(("codec", "int4"), ("period", "4")),
    initial_digests=("initial-0", "initial-1"),
)
RULES = IntakeRules(codec="int4", fragments=(_SIZES, _SIZES), batch_tokens=BATCH_TOKENS)


def version(count: int, epoch: int = 0) -> Version:
    """A version of the first epoch."""
    return Version(Epoch(epoch), count)


def fresh_state() -> SyncerState:
    """A state of two fragments, before the first step."""
    return SyncerState(parameters=(1000, 1000), initial_digests=TERMS.initial_digests, keep_updates=4)


def syncer_settings(
    *, quorum: int = 1, overlap_steps: int = 2, total_steps: int = 100, lossless: bool = False
) -> SyncerSettings:
    """Two fragments, two learners, H = 4."""
    return SyncerSettings(
        terms=TERMS,
        schedule=Schedule(num_fragments=2, period_steps=4),
        policy=GracePolicy(quorum=quorum, overlap_steps=overlap_steps, safety=0.9, bound_steps=4.0),
        intake=RULES,
        total_steps=GlobalStep(total_steps),
        lease_s=10.0,
        start_timeout_s=60.0,
        shards=("", ""),
        lossless=lossless,
        data_shards=((EAST, ShardId(0)), (WEST, ShardId(1))),
    )


def hello(
    learner_id: LearnerId = EAST,
    *,
    incarnation: int = 0,
    local_step: int = 0,
    protocol_version: int = PROTOCOL_VERSION,
    run: str = TERMS.run,
    layout: tuple[str, ...] = TERMS.layout,
    settings: tuple[tuple[str, str], ...] = TERMS.settings,
    initial_digests: tuple[str, ...] = TERMS.initial_digests,
    life_id: str = "",
    term: int = 0,
    term_id: str = "",
) -> Hello:
    """A Hello that `TERMS` agree with, but for what is given."""
    return Hello(
        protocol_version=protocol_version,
        run=run,
        learner_id=learner_id,
        incarnation=Incarnation(incarnation),
        layout=layout,
        settings=settings,
        initial_digests=initial_digests,
        local_step=LocalStep(local_step),
        tokens=local_step * BATCH_TOKENS,
        life_id=life_id,
        term=Term(term),
        term_id=term_id,
    )


def report(
    local_step: int,
    *versions: Version,
    resync: int = 0,
    step_lo: int = 0,
    tokens: int | None = None,
    tokens_lo: int | None = None,
    loss: float | None = 2.0,
    step_time_s: float = 1.0,
) -> Report:
    """A report with all fragments installed at `step_lo`."""
    return Report(
        local_step=LocalStep(local_step),
        tokens=local_step * BATCH_TOKENS if tokens is None else tokens,
        step_time_s=step_time_s,
        loss=loss,
        learning_rate=0.1,
        fragments=tuple(
            FragmentReport(
                fragment_id=FragmentId(index),
                version=installed,
                pending=None,
                resync=resync,
                step_lo=LocalStep(step_lo),
                tokens_lo=step_lo * BATCH_TOKENS if tokens_lo is None else tokens_lo,
            )
            for index, installed in enumerate(versions or (version(0), version(0)))
        ),
    )


def contribution(
    learner_id: LearnerId = EAST,
    step_lo: int = 0,
    step_hi: int = 4,
    *,
    incarnation: int = 1,
    fragment_id: int = 0,
    base: Version | None = None,
    round_id: int = 0,
    attempt: int = 1,
    tokens_lo: int | None = None,
    tokens_hi: int | None = None,
    codec: str = "int4",
    codes_bytes: int = 500,
    scales_bytes: int = 16,
) -> ContributionHeader:
    """A full-batch contribution that `RULES` accept, but for what is given."""
    return ContributionHeader(
        key=ContributionKey(
            learner_id=learner_id,
            incarnation=Incarnation(incarnation),
            fragment_id=FragmentId(fragment_id),
            step_lo=LocalStep(step_lo),
        ),
        round_id=RoundId(round_id),
        attempt=attempt,
        base=version(0) if base is None else base,
        step_hi=LocalStep(step_hi),
        tokens_lo=step_lo * BATCH_TOKENS if tokens_lo is None else tokens_lo,
        tokens_hi=step_hi * BATCH_TOKENS if tokens_hi is None else tokens_hi,
        unit_hi=step_hi,
        codec=codec,
        codes_bytes=codes_bytes,
        scales_bytes=scales_bytes,
    )
