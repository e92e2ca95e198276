"""What no honest learner can say about its own progress; pure functions, without a clock.

A learner's counters are believed, since nobody else has them. But one wrong number must not end a run, or take
a learner out of it for good: a fragment whose journalled work ends at step 10^9 takes no other work any more.

The rule is in steps and not in seconds, because time tells little here: a syncer that waits for disk space, or whose
machine was suspended, hears the work of hours at once. A learner that hears nothing trains on up to the run's
last step and holds there (see `LearnerMachine`); so since the last word that reached the syncer it has taken at most
T steps, and those that were under way while that word travelled. A Hello isn't bounded at all: whoever comes back after
hours, or to a restarted syncer, is taken in wherever it stands, and comes back that way if this rule is
ever wrong. What a Hello or a leap claims never moves the global step (`Membership.progressed`).
"""

from __future__ import annotations

from wan_diloco.protocol.intake import Refusal
from wan_diloco.protocol.ledger import Amount
from wan_diloco.protocol.messages import ContributionHeader, RefusalReason, Report

__all__ = ["claim_steps_max", "examine_claim", "examine_report", "leap_steps_max"]

# Steps that may be taken while a word travels: a minute of the quickest steps that a trainer of any use takes.
_TRAVELLING_STEPS = 10_000


def claim_steps_max(total_steps: int) -> int:
    """How far beyond the last word of a session a learner may claim to be."""
    return total_steps + max(total_steps, _TRAVELLING_STEPS)


def leap_steps_max(total_steps: int, period_steps: int) -> int:
    """Up to which advance at once the global step follows a learner.

    Two periods, so that rounds in lockstep never count as a leap; a quarter of the run, so that a short absence of
    the syncer costs no budget, and no single message ends a run.
    """
    return max(2 * period_steps, total_steps // 4)


def examine_report(
    report: Report, *, said_step: int, position: Amount, claim_max: int, batch_tokens: int
) -> Refusal | None:
    """Why a report can't be true; None when it may be.

    Args:
        report: Not older than `said_step`.
        said_step: The local step that the session told last.
        position: Where the life stands, by the ledger.
        claim_max: From `claim_steps_max`.
        batch_tokens: The most tokens a step of this learner can have.
    """
    if report.local_step > said_step + claim_max:
        return _no(f"step {report.local_step}, from {said_step} before")
    for item in report.fragments:
        if item.step_lo > report.local_step or item.tokens_lo > report.tokens:
            return _no(f"fragment {item.fragment_id} installed at step {item.step_lo} of {report.local_step}")
    return _tokens(Amount(report.local_step, report.tokens), position, batch_tokens)


def examine_claim(
    header: ContributionHeader, *, said_step: int, position: Amount, units: int, claim_max: int, batch_tokens: int
) -> Refusal | None:
    """Why a contribution can't be its sender's own work; None when it may be.

    A contribution may overtake the report of its steps, since it travels on another connection.

    Args:
        header: Of a form that `examine_contribution` accepts.
        said_step: The local step that its sender's session told last.
        position: Where the life stands, by the ledger.
        units: The first unit of the sender's shard that isn't committed: a life starts there, and a step takes one.
        claim_max: From `claim_steps_max`.
        batch_tokens: The most tokens a step of this learner can have.
    """
    if header.step_hi > said_step + claim_max:
        return _no(f"work up to step {header.step_hi}, from {said_step} before")
    if header.unit_hi > units + header.step_hi:
        return _no(f"data up to unit {header.unit_hi} in {header.step_hi} steps, from {units} before")
    ends = (Amount(header.key.step_lo, header.tokens_lo), Amount(header.step_hi, header.tokens_hi))
    return next((refusal for end in ends if (refusal := _tokens(end, position, batch_tokens))), None)


def _tokens(claim: Amount, position: Amount, batch_tokens: int) -> Refusal | None:
    """Tokens grow with steps: by at most a batch each, and never backwards."""
    earlier, later = sorted((claim, position), key=lambda amount: amount.steps)
    between = later - earlier
    if 0 <= between.tokens <= between.steps * batch_tokens:
        return None
    detail = f"{claim.tokens} tokens at step {claim.steps}, and {position.tokens} at step {position.steps}"
    return Refusal(
        RefusalReason.TOO_MANY_TOKENS if claim.tokens > position.tokens else RefusalReason.IMPLAUSIBLE, detail
    )


def _no(detail: str) -> Refusal:
    return Refusal(RefusalReason.IMPLAUSIBLE, detail)
