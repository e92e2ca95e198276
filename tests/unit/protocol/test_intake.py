"""Contributions that can't be merged are refused, each for its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.protocol import RULES, contribution, fresh_state, version
from wan_diloco.protocol.intake import examine_contribution
from wan_diloco.protocol.ledger import Amount
from wan_diloco.protocol.messages import ContributionHeader, RefusalReason
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import ContributionJournalled, LearnerAdmitted
from wan_diloco.units import FragmentId, Incarnation, LearnerId, LocalStep

EAST = LearnerId("east")


@pytest.fixture
def state() -> SyncerState:
    """Version 2, one life, whose work counts from step 0."""
    state = fresh_state()
    state.versions = [version(2), version(2)]
    state.apply(LearnerAdmitted(learner_id=EAST, incarnation=Incarnation(1), local_step=LocalStep(0), tokens=0))
    return state


def reason(state: SyncerState, header: ContributionHeader) -> RefusalReason | None:
    refusal = examine_contribution(RULES, state, header)
    return None if refusal is None else refusal.reason


@pytest.mark.parametrize("count", [1, 2])
def test_a_base_that_is_current_or_one_behind_is_taken(state: SyncerState, count: int) -> None:
    assert reason(state, contribution(base=version(count))) is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (contribution(fragment_id=2, base=version(2)), RefusalReason.GARBAGE),
        (contribution(codec="bf16", base=version(2)), RefusalReason.WRONG_CODEC),
        (contribution(codes_bytes=499, base=version(2)), RefusalReason.WRONG_LENGTH),
        (contribution(scales_bytes=17, base=version(2)), RefusalReason.WRONG_LENGTH),
        (contribution(codes_bytes=2**40, base=version(2)), RefusalReason.WRONG_LENGTH),
        (contribution(step_lo=4, step_hi=4, base=version(2)), RefusalReason.NO_STEPS),
        (contribution(tokens_hi=401, base=version(2)), RefusalReason.TOO_MANY_TOKENS),
        (contribution(base=version(2, epoch=1)), RefusalReason.FOREIGN_EPOCH),
        (contribution(base=version(3)), RefusalReason.WRONG_VERSION),
        (contribution(base=version(0)), RefusalReason.STALE_BASE),
        (contribution(incarnation=2, base=version(2)), RefusalReason.FENCED),
        (contribution(LearnerId("west"), base=version(2)), RefusalReason.FENCED),
        (contribution(tokens_lo=1, base=version(2)), RefusalReason.LATE),
    ],
)
def test_each_refusal_has_its_reason(state: SyncerState, header: ContributionHeader, expected: RefusalReason) -> None:
    assert reason(state, header) is expected


def test_only_a_foreign_epoch_asks_for_a_resync(state: SyncerState) -> None:
    foreign = examine_contribution(RULES, state, contribution(base=version(2, epoch=1)))
    stale = examine_contribution(RULES, state, contribution(base=version(0)))
    assert foreign is not None
    assert stale is not None
    assert (foreign.resync, stale.resync) == (True, False)


def test_work_that_has_its_fate_comes_too_late(state: SyncerState) -> None:
    merged = contribution(base=version(2))
    state.apply(ContributionJournalled(header=merged, ref="r", payload_bytes=1))
    larger = replace(merged, step_hi=LocalStep(6), tokens_hi=600, unit_hi=6)
    assert reason(state, larger) is None, "it may still be replaced"
    state.ledger.named(merged)
    assert reason(state, larger) is RefusalReason.LATE
    state.ledger.settled(merged, None)
    assert reason(state, larger) is RefusalReason.LATE


def test_work_beyond_the_next_install_is_refused(state: SyncerState) -> None:
    state.ledger.installed(EAST, Incarnation(1), FragmentId(0), Amount(4, 400))
    assert reason(state, contribution(step_hi=4, base=version(2))) is None
    assert reason(state, contribution(step_hi=5, base=version(2))) is RefusalReason.LATE
