"""From the syncer's exact value to the published value that everybody holds, and into a learner's weights.

A lossy codec sends exact - published; both sides add the *decoded* update to the published value. What
quantisation lost stays in the difference and is sent in the next round; the published value is the same
bits everywhere, which `digest` proves. A lossless codec sends the value itself. The syncer's part is done with the
merge, in `merge.merge_and_publish`.

Legend: N elements of the fragment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from wan_diloco.algorithm.blocks import BlockTable
from wan_diloco.algorithm.codec.base import Codec, Payload
from wan_diloco.algorithm.rounding import round_f32

if TYPE_CHECKING:
    import torch

__all__ = ["apply_update", "digest", "mix", "rebase"]


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
    return codec.decode(payload, table, None if codec.lossless else published_N)


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
    """XXH3, 128 bits, in hex, of the little-endian f32 bytes: equal when the bits are, and else as good as never.

    It tells faults, not forgers: whoever may send weights at all may send bad ones. A cryptographic hash took a third
    of the time of a merge.
    """
    array = tensor_N.detach().contiguous().numpy().astype("<f4", copy=False)
    return xxhash.xxh3_128_hexdigest(array.data)
