"""Memory that training process and uplink both see: three slots of f32 for each fragment.

Two slots hold published values, in turn: one is the base, which stays readable for a new uplink after the death
of an old one, the other takes the next value. The third takes the trainer's snapshots. Who may write which slot
when is a matter of the messages: the uplink writes the slot that isn't the base, and not again before the trainer
has said that it installed it; the trainer writes a snapshot only when asked, and isn't asked again before the
last one has been read.

Behind them lies room for a row of inner moments, see `state_area`.

The memory is a file without a name: it is gone when the last process that holds it is gone, however that died.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["FragmentSlots"]

_SLOTS: Final = 3
_OUTBOX: Final = 2
# Slots begin on cache lines of their own: neighbours are written by different processes.
_ALIGNMENT_ELEMENTS: Final = 16
_ELEMENT_BYTES: Final = 4


def _nothing() -> None:
    pass


class FragmentSlots:
    """The slots of all fragments.

    Args:
        flat: f32, one dimension, the memory; see the class methods.
        sizes: Elements of each fragment.
        descriptor: Of the file behind the memory, -1 for none; owned by the caller.
        state: uint8, room for a row of inner moments; None for none.
        release_state: Gives the memory of that row back.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        descriptor: int = -1,
        state: NDArray[np.uint8] | None = None,
        release_state: Callable[[], None] = _nothing,
    ) -> None:
        """Find each slot's place."""
        self.descriptor = descriptor
        self.state = np.empty(0, np.uint8) if state is None else state
        self.release_state = release_state
        self._slots: list[tuple[torch.Tensor, ...]] = []
        start = 0
        for size in sizes:
            stride = _stride(size)
            self._slots.append(tuple(flat[start + i * stride : start + i * stride + size] for i in range(_SLOTS)))
            start += _SLOTS * stride

    @classmethod
    def private(cls, sizes: Sequence[int], state_bytes: int = 0) -> Self:
        """Slots in this process only, for when trainer and uplink are one process."""
        return cls(torch.zeros(_elements(sizes)), sizes, state=np.zeros(state_bytes, np.uint8))

    @classmethod
    def create(cls, sizes: Sequence[int], state_bytes: int = 0) -> Self:
        """Slots that a child process can be given by the descriptor."""
        descriptor = os.memfd_create("wan-diloco-fragments", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _state_offset(sizes) + state_bytes)
        return cls.attach(descriptor, sizes, state_bytes)

    @classmethod
    def attach(cls, descriptor: int, sizes: Sequence[int], state_bytes: int = 0) -> Self:
        """The slots that another process created.

        Raises:
            ValueError: The file is smaller than fragments of these sizes need.
        """
        offset = _state_offset(sizes)
        memory = mmap.mmap(descriptor, offset + state_bytes)
        flat = torch.frombuffer(memory, dtype=torch.float32, count=_elements(sizes))
        state = np.frombuffer(memory, np.uint8, state_bytes, offset)

        def release() -> None:
            if state_bytes:
                memory.madvise(mmap.MADV_REMOVE, offset, state_bytes)

        return cls(flat, sizes, descriptor, state, release)

    @property
    def num_fragments(self) -> int:
        """Fragments that have slots."""
        return len(self._slots)

    def published(self, fragment_id: int, slot: int) -> torch.Tensor:
        """Slot 0 or 1 of a fragment's published values, f32 [N], the memory itself."""
        if slot not in {0, 1}:
            raise ValueError(f"there is no published slot {slot}")
        return self._slots[fragment_id][slot]

    def outbox(self, fragment_id: int) -> torch.Tensor:
        """The fragment's last snapshot, f32 [N], the memory itself."""
        return self._slots[fragment_id][_OUTBOX]


def _stride(size: int) -> int:
    return -(-size // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS


def _state_offset(sizes: Sequence[int]) -> int:
    """On a page of its own, so that it can be given back."""
    return -(-_elements(sizes) * _ELEMENT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _elements(sizes: Sequence[int]) -> int:
    return sum(_SLOTS * _stride(size) for size in sizes)
