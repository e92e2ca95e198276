"""A syncer's values as bytes, which are the same or aren't: no comparison of numbers would tell a zero from another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wan_diloco.algorithm.fragments import write_fragment
from wan_diloco.algorithm.layout import Layout
from wan_diloco.syncer.fragments_store import FragmentStore, FragmentValue

PARTS = ("exact_N", "published_N", "momentum_N")


def bits_of(store: FragmentStore) -> list[tuple[bytes, ...]]:
    """Exact value, published value and momentum of each fragment, whatever its version."""
    return [tuple(getattr(value, part).numpy().tobytes() for part in PARTS) for value in store.values()]


def values_of(store: FragmentStore) -> list[tuple[object, ...]]:
    """The same behind its version and its digest."""
    heads = [(value.version, value.digest) for value in store.values()]
    return [(*head, *bits) for head, bits in zip(heads, bits_of(store), strict=True)]


def bits_by_tensor(layout: Layout, values: Sequence[FragmentValue]) -> dict[str, dict[str, bytes]]:
    """Each part of the values by tensor, whichever fragments they are in."""
    parts = {}
    for part in PARTS:
        tensors = {spec.name: torch.empty(spec.shape) for spec in layout.tensors}
        for fragment, value in zip(layout.fragments, values, strict=True):
            write_fragment(fragment, tensors, getattr(value, part))
        parts[part] = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return parts
