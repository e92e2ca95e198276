"""From the syncer's exact value to the published value that everybody holds, and into a learner's weights.

A lossy codec sends exact - published; both sides add the *decoded* update to the published value. What
quantisation lost stays in the difference and is sent in the next round; the published value is the same
bits everywhere, which `digest` proves. A lossless codec sends the value itself.

Legend: N elements of the fragment.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from wan_diloco.algorithm.blocks import BlockTable
from wan_diloco.algorithm.codec.base import Codec, Payload
from wan_diloco.algorithm.merge import round_f32

if TYPE_CHECKING:
    import torch

__all__ = ["apply_update", "delta", "digest", "mix", "publish", "rebase"]


def publish(
    exact_N: torch.Tensor, published_N: torch.Tensor, codec: Codec, table: BlockTable
) -> tuple[Payload, torch.Tensor]:
    """Encode a new value for everybody, once.

    Args:
        exact_N: The value after the outer step.
        published_N: The value that everybody holds; not changed.
        codec: Of the downlink.
        table: The fragment's blocks.

    Returns:
        The update, and the new published value: what `apply_update` makes of it.

    Raises:
        NonFiniteError: The value, or its distance from the published one, isn't finite.
    """
    payload = codec.encode(exact_N if codec.lossless else exact_N - published_N, table)
    return payload, apply_update(published_N, payload, codec, table)


def apply_update(published_N: torch.Tensor, payload: Payload, codec: Codec, table: BlockTable) -> torch.Tensor:
    """The next published value, the same bits on syncer and learner.

    Args:
        published_N: The value of the version that the update starts from; not changed.
        payload: The update.
        codec: Of the downlink.
        table: The fragment's blocks.

    Raises:
        DecodeError: The update doesn't decode.
        NonFiniteError: The update isn't finite.
    """
    decoded_N = codec.decode(payload, table)
    return decoded_N if codec.lossless else published_N + decoded_N


def delta(base_N: torch.Tensor, local_N: torch.Tensor) -> torch.Tensor:
    """The outer gradient: base minus local, relative to the base that the learner itself started from."""
    return base_N - local_N


def mix(local_N: torch.Tensor, published_N: torch.Tensor, alpha: float) -> torch.Tensor:
    """What a learner installs: alpha * local + (1 - alpha) * published; with alpha 0 the published bits.

    Args:
        local_N: The learner's value now.
        published_N: The new published value.
        alpha: 0 to below 1.

    Returns:
        float32 [N], in memory of its own.
    """
    if alpha == 0.0:
        return published_N.clone()
    return local_N * round_f32(alpha) + published_N * round_f32(1.0 - alpha)


def rebase(local_N: torch.Tensor, published_N: torch.Tensor, snapshot_N: torch.Tensor) -> torch.Tensor:
    """What a learner installs to keep the work of the overlap: local + (published - its value at the snapshot).

    Args:
        local_N: The learner's value now.
        published_N: The new published value, in which the snapshot was merged.
        snapshot_N: The learner's value when the snapshot was taken.
    """
    return local_N + (published_N - snapshot_N)


def digest(tensor_N: torch.Tensor) -> str:
    """BLAKE2b, 16 bytes, in hex, of the little-endian f32 bytes: equal exactly when the bits are."""
    array = tensor_N.detach().contiguous().numpy().astype("<f4", copy=False)
    return hashlib.blake2b(array.data, digest_size=16).hexdigest()
