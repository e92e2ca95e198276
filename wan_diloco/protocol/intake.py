"""Whether a contribution may be journalled: the checks of its header, as one pure function.

They run twice: before its bytes are let in, and again when they are whole, since the fragment may have moved
on meanwhile. What a header says is checked against the negotiated layout before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_diloco.protocol.messages import ContributionHeader, RefusalReason
from wan_diloco.protocol.syncer_state import SyncerState

__all__ = ["FragmentSizes", "IntakeRules", "Refusal", "examine_contribution", "examine_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentSizes:
    """What the layout and the codec make of a fragment.

    Attributes:
        parameters: Elements.
        codes_bytes, scales_bytes: Length of an encoded contribution's buffers.
    """

    parameters: int
    codes_bytes: int
    scales_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRules:
    """What is negotiated about contributions.

    Attributes:
        batch_tokens: The most tokens a step of a learner can have.
    """

    codec: str
    fragments: tuple[FragmentSizes, ...]
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not.

    Attributes:
        resync: The sender's base can't be right: it must take the published value.
    """

    reason: RefusalReason
    detail: str
    resync: bool = False


def examine_contribution(rules: IntakeRules, state: SyncerState, header: ContributionHeader) -> Refusal | None:
    """The first reason against a contribution that isn't a repeated one; None when there is none."""
    return _form(rules, header) or _version(state, header) or _fate(state, header)


def examine_data(state: SyncerState, header: ContributionHeader) -> Refusal | None:
    """Why its data aren't its life's; None when they are.

    A learner that was away, and comes back to find its data given to another, has trained on meanwhile. A step takes
    one unit: work of more steps than its life has had units contains data that aren't its own any more.
    """
    lease, first_unit = state.leases[header.key.learner_id], header.unit_hi - header.steps
    if first_unit >= lease.first_unit:
        return None
    detail = f"it begins with unit {first_unit} of shard {lease.shard}, and its life with {lease.first_unit}"
    return Refusal(RefusalReason.OTHER_DATA, detail, resync=True)


def _form(rules: IntakeRules, header: ContributionHeader) -> Refusal | None:
    if header.key.fragment_id >= len(rules.fragments):
        return Refusal(RefusalReason.GARBAGE, f"there is no fragment {header.key.fragment_id}")
    if header.codec != rules.codec:
        return Refusal(RefusalReason.WRONG_CODEC, f"the run's codec is {rules.codec}, not {header.codec}")
    sizes = rules.fragments[header.key.fragment_id]
    if (header.codes_bytes, header.scales_bytes) != (sizes.codes_bytes, sizes.scales_bytes):
        detail = (
            f"fragment {header.key.fragment_id} has {sizes.codes_bytes} + {sizes.scales_bytes} bytes, "
            f"not {header.codes_bytes} + {header.scales_bytes}"
        )
        return Refusal(RefusalReason.WRONG_LENGTH, detail)
    if header.steps == 0:
        return Refusal(RefusalReason.NO_STEPS, "a contribution covers at least one step")
    most = header.steps * rules.batch_tokens
    if header.tokens > most:
        return Refusal(RefusalReason.TOO_MANY_TOKENS, f"{header.steps} steps have at most {most} tokens")
    return None


def _version(state: SyncerState, header: ContributionHeader) -> Refusal | None:
    current = state.versions[header.key.fragment_id]
    if header.base.epoch != current.epoch:
        return Refusal(
            RefusalReason.FOREIGN_EPOCH, f"the epoch is {current.epoch}, not {header.base.epoch}", resync=True
        )
    if header.base > current:
        return Refusal(RefusalReason.WRONG_VERSION, f"version {header.base} does not exist, {current} is the newest")
    if header.base.count < current.count - 1:
        return Refusal(RefusalReason.STALE_BASE, f"its base is {header.base}, the newest version {current}")
    return None


def _fate(state: SyncerState, header: ContributionHeader) -> Refusal | None:
    learner_id, incarnation = header.key.learner_id, header.key.incarnation
    if learner_id not in state.leases or state.incarnations.get(learner_id) != incarnation:
        return Refusal(RefusalReason.FENCED, f"incarnation {incarnation} is over")
    if not state.ledger.accepts(header):
        late = Refusal(RefusalReason.LATE, "the work of these steps has its fate already")
        return examine_data(state, header) or late
    return None
