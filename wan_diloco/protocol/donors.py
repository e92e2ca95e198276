"""Whose inner moments a new life begins with: its own, a peer's and which, or none.

Published bases aren't a question: the syncer has them, the same bits that every peer has. Inner moments are what only a
learner has. Pure functions; `docs/adr/0012-moments-through-the-syncer.md` says why it is so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.units import Incarnation, LearnerId

__all__ = ["Candidate", "Choice", "choose_donor", "is_proven", "is_recent", "keeps_own"]


def keeps_own(own_step: int | None, global_step: int, period_steps: int) -> bool:
    """Whether a new life begins with the moments that it has, without asking anybody.

    Its own fit its own data, and cost no transfer; after a period without them they tell little of the weights that
    they would be used on. Before the first step nobody has any, and zero is right.

    Args:
        own_step: The global step that its moments are of; None when it has none.
        global_step: Now.
        period_steps: H.
    """
    if global_step == 0:
        return True
    return own_step is not None and abs(global_step - own_step) <= period_steps


def is_proven(state: SyncerState, learner_id: LearnerId, incarnation: Incarnation) -> bool:
    """Whether a contribution of that very life is in a publication of this epoch that the syncer still keeps.

    So a learner that was freshly initialised isn't, nor one that hasn't had anything merged for long.
    """
    return any(
        (note.learner_id, note.incarnation) == (learner_id, incarnation)
        for updates in state.updates
        for update in updates
        if update.to_version.epoch == state.epoch
        for note in update.merged
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A learner that is proven, reachable, up to date, and has its own moments.

    Attributes:
        serving: How many joiners take its state now, or are about to.
        failures: How often it has failed the joiner in question.
        holds: It may still have pinned the row of which the joiner has a part.
    """

    learner_id: LearnerId
    serving: int
    failures: int = 0
    holds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who should give.

    Attributes:
        donor: None when there is nobody now.
        later: Whether it makes sense to wait: somebody could, and is busy.
    """

    donor: LearnerId | None
    later: bool = False


def choose_donor(candidates: Iterable[Candidate], joiners_max: int) -> Choice:
    """The donor for one joiner.

    Who holds a part of it already goes first, unless it failed again; then who failed it least, then who serves the
    fewest, so that many joiners spread; among equals the order of names decides.

    Args:
        candidates: In any order; the joiner itself is none.
        joiners_max: That one donor serves at once.
    """
    known = list(candidates)
    free = [candidate for candidate in known if candidate.serving < joiners_max]
    if not free:
        return Choice(donor=None, later=bool(known))
    best = min(free, key=_rank)
    return Choice(donor=best.learner_id)


def is_recent(clock_step: int, pinned_step: int, period_steps: int) -> bool:
    """Whether a state that was pinned earlier is new enough for a joiner of now."""
    return clock_step - pinned_step <= period_steps


def _rank(candidate: Candidate) -> tuple[bool, int, int, LearnerId]:
    holds = candidate.holds and candidate.failures <= 1
    return (not holds, candidate.failures, candidate.serving, candidate.learner_id)
