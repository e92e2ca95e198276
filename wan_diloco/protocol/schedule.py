"""When fragments are due, and how fast the run goes.

Streaming DiLoCo (arXiv 2501.18512): fragment p is due at global step t when (t - t_p) mod H = 0. Offsets
are t_p = floor(p*H/P), so that the fragments are spread evenly over a period also when P is not H.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wan_diloco.units import FragmentId, GlobalStep

__all__ = ["Schedule", "global_step_of"]

# The most of a round trip's steps that count, for each step of the overlap.
_TRAVELLING_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The fixed rhythm of a run.

    Attributes:
        num_fragments: P, effective (no empty fragments).
        period_steps: H, steps between two rounds of a fragment.
    """

    num_fragments: int
    period_steps: int

    def __post_init__(self) -> None:
        """Refuse a rhythm that never beats."""
        if self.num_fragments < 1 or self.period_steps < 1:
            raise ValueError("a schedule has at least one fragment and a period of at least one step")

    def offset(self, fragment_id: FragmentId) -> int:
        """t_p, in steps."""
        return fragment_id * self.period_steps // self.num_fragments

    def is_due(self, fragment_id: FragmentId, step: int) -> bool:
        """Whether the fragment is due at that global step; never at step 0, when nothing was trained."""
        return step > 0 and (step - self.offset(fragment_id)) % self.period_steps == 0

    def due_at(self, step: int) -> tuple[FragmentId, ...]:
        """The fragments due at a global step, in order."""
        return tuple(
            FragmentId(fragment) for fragment in range(self.num_fragments) if self.is_due(FragmentId(fragment), step)
        )

    def due_between(self, after: int, until: int) -> tuple[tuple[GlobalStep, FragmentId], ...]:
        """All (step, fragment) with after < step <= until, oldest first."""
        return tuple(
            (GlobalStep(step), fragment) for step in range(after + 1, until + 1) for fragment in self.due_at(step)
        )

    def next_due_step(self, after: int) -> GlobalStep:
        """The first step after `after` at which any fragment is due."""
        step = after + 1
        while not self.due_at(step):
            step += 1
        return GlobalStep(step)

    def last_due_step(self, fragment_id: FragmentId, step: int) -> GlobalStep:
        """The last step up to `step` at which the fragment was due; 0 when it wasn't yet."""
        rounds = self.rounds_due(fragment_id, step)
        if rounds == 0:
            return GlobalStep(0)
        offset = self.offset(fragment_id)
        return GlobalStep(offset + self.period_steps * (rounds - (1 if offset > 0 else 0)))

    def rounds_due(self, fragment_id: FragmentId, step: int) -> int:
        """How many rounds of the fragment are due in 1..step: its version's count, in lockstep."""
        offset = self.offset(fragment_id)
        if step < offset or step < 1:
            return 0
        return (step - offset) // self.period_steps + (1 if offset > 0 else 0)

    @property
    def fragments_a_step_max(self) -> int:
        """The most fragments due at one step, for bounds on what may be in flight."""
        return -(-self.num_fragments // self.period_steps)

    def uploads_max(self, overlap_steps: int, travelling_steps: int | None = None) -> int:
        """How many uploads a learner may have under way: the one place that says it, for both ends.

        They are what falls due within tau steps, and what falls due while acknowledgements travel; without the
        second part a long round trip would look like a narrow link.

        Args:
            overlap_steps: tau.
            travelling_steps: Steps of the run within a round trip, and within a step of a learner that is slower.
                However many, what is under way stays bounded; where not given, by the most that is ever allowed.
        """
        due = max(1, overlap_steps)
        most = _TRAVELLING_FACTOR * due
        return self.fragments_a_step_max * (due + (most if travelling_steps is None else min(travelling_steps, most)))


def global_step_of(progress: Iterable[int], quorum: int) -> int | None:
    """t: the K-th largest of the live members' (local step - anchor).

    So that H means H on a fast link as on a slow one: a slow learner doesn't hold the schedule up, and with
    K > 1 a single fast one doesn't drive it.

    Returns:
        The step, or None when fewer than K are live: the schedule stands still then.
    """
    ordered = sorted(progress, reverse=True)
    return ordered[quorum - 1] if len(ordered) >= quorum else None
