"""The fragments' values at the syncer, and the maths that makes the next version of one.

Twelve bytes a parameter: exact, published, momentum, all f32; a merge changes them in place. While it is
under way nobody else may look at the fragment, and whoever needs a value for longer than a moment, a snapshot
or a transfer, holds it: a merge of a fragment that is held works on a copy, and leaves what is held alone.

Legend: N elements of a fragment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from wan_diloco.algorithm.blocks import BlockTable, build_block_table
from wan_diloco.algorithm.codec import Codec, Payload, PayloadSizes, PayloadSource
from wan_diloco.algorithm.fragments import read_fragment, write_fragment
from wan_diloco.algorithm.layout import Fragment, Layout
from wan_diloco.algorithm.merge import Contribution, FragmentTensors, inspect_payload, merge_and_publish
from wan_diloco.algorithm.outer import momentum_at
from wan_diloco.algorithm.publication import apply_update, digest
from wan_diloco.errors import CheckpointError
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Version

if TYPE_CHECKING:
    from wan_diloco.protocol.tape import MergeEntry

__all__ = [
    "FragmentStore",
    "FragmentValue",
    "Hold",
    "InspectedSource",
    "Maths",
    "MergedFragment",
    "OuterRule",
    "published_tensors",
    "snapshot_tensors",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterRule:
    """The outer optimizer's settings.

    Attributes:
        lr: Learning rate.
        momentum: Nesterov momentum, once risen.
        warmup_steps: Global steps over which it rises from 0.
    """

    lr: float
    momentum: float
    warmup_steps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FragmentValue:
    """One version of a fragment; its tensors stay as they are while somebody holds it.

    Attributes:
        digest: Of the published value.
        exact_N: float32 [N], what the outer optimizer has.
        published_N: float32 [N], what everybody has.
        momentum_N: float32 [N].
    """

    version: Version
    digest: str
    exact_N: torch.Tensor
    published_N: torch.Tensor
    momentum_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InspectedSource:
    """A contribution's payload that was found good.

    Attributes:
        source: To be read.
        norms: Of each piece that takes RDA, 0 for others.
    """

    source: PayloadSource
    norms: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedFragment:
    """What a merge made: the next value, and the update that leads to its published part.

    Attributes:
        unstepped: Blocks that stayed as they were, since their new values would not have been finite.
    """

    fragment_id: FragmentId
    value: FragmentValue
    payload: Payload
    unstepped: int = 0


class Maths:
    """All that is computed on a fragment, as pure functions of values and bytes.

    Thread: any, several at once.

    Args:
        layout: The run's.
        codec: Of contributions and of updates.
        outer: The outer optimizer's settings.
    """

    def __init__(self, layout: Layout, codec: Codec, outer: OuterRule) -> None:
        """Cut the fragments into blocks."""
        self.layout = layout
        self.codec = codec
        self._outer = outer
        self._tables = tuple(build_block_table(fragment) for fragment in layout.fragments)

    def fragment(self, fragment_id: FragmentId) -> Fragment:
        """A fragment of the layout."""
        return self.layout.fragments[fragment_id]

    def table(self, fragment_id: FragmentId) -> BlockTable:
        """Its blocks."""
        return self._tables[fragment_id]

    def sizes(self, fragment_id: FragmentId) -> PayloadSizes:
        """Lengths of its encoded form."""
        return self.codec.sizes(self.table(fragment_id))

    def split(self, fragment_id: FragmentId, joined: bytes) -> Payload:
        """Codes and scales out of a journal's payload, which has one after the other; nothing is copied.

        Raises:
            CheckpointError: The length isn't that of this fragment's payloads.
        """
        sizes = self.sizes(fragment_id)
        if len(joined) != sizes.total_bytes:
            raise CheckpointError(
                f"a stored payload of fragment {fragment_id} has {len(joined)} bytes and not {sizes.total_bytes}"
            )
        both = np.frombuffer(joined, dtype=np.uint8)
        return Payload(codes=both[: sizes.codes_bytes], scales=both[sizes.codes_bytes :])

    def merge(
        self,
        fragment_id: FragmentId,
        value: FragmentValue,
        to_version: Version,
        global_step: GlobalStep,
        entries: Sequence[tuple[MergeEntry, InspectedSource]],
    ) -> MergedFragment:
        """Merge, take the outer step, publish; the same bits for the same arguments, on every machine.

        Args:
            fragment_id: Which fragment.
            value: Its value before; its tensors become those of the value after.
            to_version: Of the value after.
            global_step: The outer schedule's argument.
            entries: At least one, in the order in which they are summed.

        Raises:
            JournalError: A contribution can't be read; then nothing is changed.
            StorageError: The same.
        """
        contributions = [
            Contribution(
                source=inspected.source,
                tokens=entry.header.tokens,
                steps=entry.header.steps,
                norms=inspected.norms,
            )
            for entry, inspected in entries
        ]
        tensors = FragmentTensors(exact_N=value.exact_N, momentum_N=value.momentum_N, published_N=value.published_N)
        payload, unstepped = merge_and_publish(
            self.fragment(fragment_id),
            self.table(fragment_id),
            self.codec,
            contributions,
            tensors,
            lr=self._outer.lr,
            momentum=momentum_at(global_step, self._outer.momentum, self._outer.warmup_steps),
        )
        after = dataclasses.replace(value, version=to_version, digest=digest(value.published_N))
        return MergedFragment(fragment_id=fragment_id, value=after, payload=payload, unstepped=unstepped)

    def published_after(self, fragment_id: FragmentId, published_N: torch.Tensor, payload: Payload) -> torch.Tensor:
        """The published value that a stored update leads to.

        Raises:
            DecodeError: The update doesn't decode.
            NonFiniteError: It isn't finite.
        """
        return apply_update(published_N, payload, self.codec, self.table(fragment_id))

    def inspect(self, fragment_id: FragmentId, source: PayloadSource) -> InspectedSource:
        """See that a contribution decodes to finite values, and measure what its merge needs.

        Raises:
            DecodeError: It doesn't decode.
            NonFiniteError: It isn't finite.
        """
        fragment, table = self.fragment(fragment_id), self.table(fragment_id)
        return InspectedSource(source=source, norms=inspect_payload(fragment, table, self.codec, source))


class Hold:
    """Fragments whose tensors must not be changed for now; made by `FragmentStore.hold`.

    Attributes:
        values: By fragment, as they were when the hold began.
    """

    def __init__(self, values: dict[FragmentId, FragmentValue], end: Callable[[Hold], None]) -> None:
        """Begin."""
        self.values = values
        self._held = set(values)
        self._end = end

    def __contains__(self, fragment_id: FragmentId) -> bool:
        """Whether the fragment is held still."""
        return fragment_id in self._held

    def let_go(self, fragment_id: FragmentId) -> None:
        """One of them may be changed again.

        Thread: any.
        """
        self._held.discard(fragment_id)

    def end(self) -> None:
        """All of them may; idempotent.

        Thread: the event loop.
        """
        self._held.clear()
        self.values = {}
        self._end(self)


class FragmentStore:
    """The newest value of each fragment.

    Owner: the service's event loop.

    Args:
        values: One a fragment, in order.
    """

    def __init__(self, values: Sequence[FragmentValue]) -> None:
        """Take the values over."""
        self._values = list(values)
        self._changing: set[FragmentId] = set()
        self._holds: list[Hold] = []

    @classmethod
    def fresh(cls, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Self:
        """The initial weights, at version 0.0."""
        return cls([_initial(read_fragment(fragment, tensors)) for fragment in layout.fragments])

    @classmethod
    def restore(cls, layout: Layout, tensors: Mapping[str, torch.Tensor], versions: Sequence[Version]) -> Self:
        """What `tensors` of another life gave.

        Args:
            layout: The run's.
            tensors: As `tensors` names them.
            versions: Of each fragment.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape.
        """
        values = []
        for fragment, version in zip(layout.fragments, versions, strict=True):
            exact_N, published_N, momentum_N = (
                _checked(tensors, f"{part}.{fragment.fragment_id}", fragment.numel)
                for part in ("exact", "published", "momentum")
            )
            values.append(
                FragmentValue(
                    version=version,
                    digest=digest(published_N),
                    exact_N=exact_N,
                    published_N=published_N,
                    momentum_N=momentum_N,
                )
            )
        return cls(values)

    def __len__(self) -> int:
        """How many fragments there are."""
        return len(self._values)

    @property
    def settled(self) -> bool:
        """Whether no merge is changing anything."""
        return not self._changing

    def changing(self, fragment_id: FragmentId) -> bool:
        """Whether a merge is changing the fragment, and nobody else may look at it."""
        return fragment_id in self._changing

    def value(self, fragment_id: FragmentId) -> FragmentValue:
        """The newest value of a fragment, to be looked at now; to be held for longer."""
        assert fragment_id not in self._changing, f"fragment {fragment_id} is being changed"
        return self._values[fragment_id]

    def values(self) -> tuple[FragmentValue, ...]:
        """All of them, to be looked at now."""
        assert self.settled, f"fragments {sorted(self._changing)} are being changed"
        return tuple(self._values)

    def hold(self, fragment_ids: Iterable[FragmentId] | None = None) -> Hold:
        """Keep fragments as they are now until the hold ends; all where none is named."""
        names = [FragmentId(index) for index in range(len(self))] if fragment_ids is None else list(fragment_ids)
        hold = Hold({fragment_id: self.value(fragment_id) for fragment_id in names}, self._ended)
        self._holds.append(hold)
        return hold

    def _ended(self, hold: Hold) -> None:
        self._holds = [other for other in self._holds if other is not hold]

    def take(self, fragment_id: FragmentId, *, copy: bool = False) -> FragmentValue:
        """The newest value for a merge, which may change its tensors: a copy where somebody holds it or it is wished.

        Ordering: `install` or `give_back` follows.
        """
        value = self.value(fragment_id)
        if copy or any(fragment_id in hold for hold in self._holds):
            return dataclasses.replace(
                value,
                exact_N=value.exact_N.clone(),
                published_N=value.published_N.clone(),
                momentum_N=value.momentum_N.clone(),
            )
        self._changing.add(fragment_id)
        return value

    def give_back(self, fragment_id: FragmentId) -> None:
        """The merge changed nothing."""
        self._changing.discard(fragment_id)

    def install(self, merged: MergedFragment) -> None:
        """What a merge made is the fragment's from now on; it must follow on the version that is there."""
        before = self._values[merged.fragment_id].version
        assert merged.value.version > before, f"version {merged.value.version} after {before}"
        self._values[merged.fragment_id] = merged.value
        self._changing.discard(merged.fragment_id)

    def rename(self, versions: Sequence[Version]) -> None:
        """In a new epoch the very same values have other names."""
        assert self.settled, "a new epoch begins before any merge"
        self._values = [
            dataclasses.replace(value, version=version) for value, version in zip(self._values, versions, strict=True)
        ]


def snapshot_tensors(values: Sequence[FragmentValue]) -> dict[str, torch.Tensor]:
    """All values under the names that `FragmentStore.restore` looks for; nothing is copied."""
    return {
        f"{part}.{index}": tensor_N
        for index, value in enumerate(values)
        for part, tensor_N in (
            ("exact", value.exact_N),
            ("published", value.published_N),
            ("momentum", value.momentum_N),
        )
    }


def published_tensors(layout: Layout, values: Sequence[FragmentValue]) -> dict[str, torch.Tensor]:
    """The published model by the names of its parameters, in memory of its own."""
    tensors = {spec.name: torch.empty(spec.shape, dtype=torch.float32) for spec in layout.tensors}
    for fragment, value in zip(layout.fragments, values, strict=True):
        write_fragment(fragment, tensors, value.published_N)
    return tensors


def _initial(weights_N: torch.Tensor) -> FragmentValue:
    return FragmentValue(
        version=Version(Epoch(0), 0),
        digest=digest(weights_N),
        exact_N=weights_N,
        # Not the same memory: a snapshot can hold each tensor only once.
        published_N=weights_N.clone(),
        momentum_N=torch.zeros_like(weights_N),
    )


def _checked(tensors: Mapping[str, torch.Tensor], name: str, numel: int) -> torch.Tensor:
    tensor_N = tensors.get(name)
    if tensor_N is None or tensor_N.shape != (numel,) or tensor_N.dtype is not torch.float32:
        raise CheckpointError(f"the snapshot has no float32 tensor {name} of {numel} elements")
    return tensor_N
