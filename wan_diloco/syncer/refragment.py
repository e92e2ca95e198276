"""Cutting a run's values into other fragments, when it is told to at a start.

Exact value, published value and momentum of each element stay as they are, bit for bit; only where they stand changes.
What is in the journal was encoded for the fragments of before, and is discarded by the record that this makes.

Legend: N elements of a fragment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from wan_diloco.algorithm.fragments import read_fragment, write_fragment
from wan_diloco.algorithm.layout import Layout
from wan_diloco.algorithm.publication import digest
from wan_diloco.errors import ConfigError
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.protocol.tape import Refragmented
from wan_diloco.syncer.fragments_store import FragmentValue, Maths
from wan_diloco.units import Epoch, FragmentId, Version

if TYPE_CHECKING:
    from wan_diloco.protocol.syncer_state import SyncerState

__all__ = ["Cutting", "digests_of", "fragments_of", "plan_cut", "recut"]

_KEY: Final = "sync.fragments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """Into how many fragments a run is to be cut.

    Attributes:
        fragments: As the configuration asks for.
        period_steps: H.
        allowed: Whether a run that has another number may be cut anew.
        maths_of: The maths of the run, were it cut into a number of fragments.
    """

    fragments: int
    period_steps: int
    allowed: bool
    maths_of: Callable[[int], Maths]

    def require_allowed(self, there: int, folder: Path) -> None:
        """See that a run that was cut into `there` fragments may be taken up.

        Raises:
            ConfigError: It may not.
        """
        if there != self.fragments and not self.allowed:
            raise ConfigError(
                f"is {self.fragments} now, and the run in {folder} has {there}",
                where=_KEY,
                hint="change it back, or give --refragment to cut its values and momentum anew; work under way is then "
                "discarded",
            )


def fragments_of(manifest: Mapping[str, Any]) -> int:
    """The number of fragments that the run of a snapshot was asked to have, by what it says beside its tensors."""
    return int(json.loads(dict(manifest["agreement"])[_KEY]))


def recut(
    before: Layout, after: Layout, values: Sequence[FragmentValue], versions: Sequence[Version]
) -> tuple[FragmentValue, ...]:
    """The same values in other fragments; nothing is computed, only copied.

    Args:
        before: Of the values.
        after: Of the same tensors.
        values: One a fragment of `before`.
        versions: Of the fragments of `after`.
    """
    exact = _cut(before, after, [value.exact_N for value in values])
    published = _cut(before, after, [value.published_N for value in values])
    momentum = _cut(before, after, [value.momentum_N for value in values])
    return tuple(
        FragmentValue(
            version=version, digest=digest(published_N), exact_N=exact_N, published_N=published_N, momentum_N=momentum_N
        )
        for version, exact_N, published_N, momentum_N in zip(versions, exact, published, momentum, strict=True)
    )


def _cut(before: Layout, after: Layout, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One part of the values, such as the momentum, in other fragments."""
    assert before.tensors == after.tensors, "the same model, cut otherwise"
    tensors = {spec.name: torch.empty(spec.shape, dtype=torch.float32) for spec in before.tensors}
    for fragment, part_N in zip(before.fragments, parts, strict=True):
        write_fragment(fragment, tensors, part_N)
    return [read_fragment(fragment, tensors) for fragment in after.fragments]


def plan_cut(
    cutting: Cutting,
    there: int,
    state: SyncerState,
    values: Sequence[FragmentValue],
    initial: Mapping[str, torch.Tensor],
) -> Refragmented:
    """What is put on the tape when a run is cut anew.

    Rounds that are due by now count as done in the new fragments: of the work since the last of them nothing is left
    to be merged.

    Args:
        cutting: How it is to be cut.
        there: Into how many fragments it was asked to be cut before.
        state: As it is.
        values: One a fragment, as they are.
        initial: The initial weights, by canonical name.

    Raises:
        ConfigError: These aren't the weights that the run began with, so that learners would be refused.
    """
    before, after = cutting.maths_of(there).layout, cutting.maths_of(cutting.fragments).layout
    if digests_of(before, initial) != state.initial_digests:
        raise ConfigError(
            "the initial weights that come out here aren't those that the run began with",
            where="model",
            hint="use the versions of Python's packages that it was begun with",
        )
    schedule = Schedule(num_fragments=after.num_fragments, period_steps=cutting.period_steps)
    epoch = Epoch(state.epoch + 1)
    fragments = [FragmentId(index) for index in range(after.num_fragments)]
    counts = tuple(schedule.rounds_due(fragment_id, state.global_step) for fragment_id in fragments)
    # Only these are on the tape; the rest is cut when the record is replayed, which takes room for a model.
    published = _cut(before, after, [value.published_N for value in values])
    return Refragmented(
        fragments_before=there,
        fragments=cutting.fragments,
        epoch=epoch,
        parameters=tuple(fragment.numel for fragment in after.fragments),
        initial_digests=digests_of(after, initial),
        digests=tuple(map(digest, published)),
        counts=counts,
        due_steps=tuple(schedule.last_due_step(fragment_id, state.global_step) for fragment_id in fragments),
    )


def digests_of(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The digest of each fragment of a model, as the tape and the snapshots have those of the initial one."""
    return tuple(digest(read_fragment(fragment, tensors)) for fragment in layout.fragments)
