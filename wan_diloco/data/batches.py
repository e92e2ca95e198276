"""Batches by number. A data position is one integer, so that it can be reported, committed, leased and resumed.

A *unit* is the batch of one local step of one region. Unit i is a pure function of the tokens, the sizes, the seed
and i: there is no iterator whose state could be lost, nothing to fast-forward, and no order in which units must be
read. Windows are numbered through: unit i holds windows i*B .. i*B+B-1 of an endless sequence of passes, each of
which is a permutation of all windows of its own.

torch takes seconds to import, and who only counts windows, as the check before a run does, has no use for it: it is
imported where batches are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wan_diloco.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    import torch

    _Batch = tuple[torch.Tensor, torch.Tensor]

__all__ = ["IGNORED_TARGET", "BatchReader", "evaluation_batches"]

# Targets of this value don't count, in training or evaluation; torch's cross-entropy has it as its default.
IGNORED_TARGET = -100


class BatchReader:
    """Training batches of one shard, by number.

    A pass uses each of its windows exactly once, and a unit may straddle two passes. Each pass begins at an offset of
    its own, smaller than a window, so that passes cut the text at different places.

    Thread: not safe for several at once; it keeps the last passes' permutations.

    Args:
        tokens: The shard, uint8 (N,).
        sequence_length: T, the tokens of a window.
        batch_size: B, the windows of a unit.
        seed: Permutations and offsets; give every shard another.

    Raises:
        DataError: The shard doesn't fill one unit.
    """

    def __init__(self, tokens: npt.NDArray[np.uint8], *, sequence_length: int, batch_size: int, seed: int) -> None:
        """Count the windows."""
        if min(sequence_length, batch_size) < 1:
            raise ValueError(f"a batch of {batch_size} windows of {sequence_length} tokens can't be")
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._seed = seed
        # With any offset below T the last window, and the one token after it, still fit.
        self._windows = max(0, (len(tokens) - sequence_length) // sequence_length)
        if self._windows < batch_size:
            raise DataError(
                f"the corpus is too small for its shards: one of {len(tokens)} tokens has {self._windows} windows of "
                f"{sequence_length}, and one step takes {batch_size}",
                where="data.source",
                hint=f"a shard needs at least {(batch_size + 1) * sequence_length} tokens: use fewer regions, "
                "smaller batches or more text",
            )
        self._starts: dict[int, npt.NDArray[np.int64]] = {}

    @property
    def windows_per_pass(self) -> int:
        """Windows in one pass over the shard."""
        return self._windows

    @property
    def units_per_pass(self) -> int:
        """Whole units before the shard begins to repeat itself; at least 1."""
        return self._windows // self._batch_size

    @property
    def tokens_per_unit(self) -> int:
        """Targets in a unit: B * T."""
        return self._batch_size * self._sequence_length

    def batch(self, index: int) -> _Batch:
        """The batch of one unit; the same for the same index, whatever was read before.

        Args:
            index: 0 or more; past `units_per_pass` the shard is read again, in another order.

        Returns:
            Inputs and targets, both int64 (B, T), targets one token ahead.
        """
        import torch  # noqa: PLC0415 - see above

        if index < 0:
            raise ValueError(f"units are numbered from 0, not {index}")
        first = index * self._batch_size
        starts = np.array([self._start(window) for window in range(first, first + self._batch_size)])
        # One gather of T+1 tokens a window; the shard stays uint8, an eighth of what int64 would take.
        rows = self._tokens[starts[:, None] + np.arange(self._sequence_length + 1)]
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def _start(self, window: int) -> int:
        number, place = divmod(window, self._windows)
        starts = self._starts.get(number)
        if starts is None:
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, number])))
            offset = int(rng.integers(self._sequence_length))
            starts = rng.permutation(self._windows) * self._sequence_length + offset
            # Two, since a unit may straddle two passes.
            self._starts = {number: starts, **{key: self._starts[key] for key in list(self._starts)[:1]}}
        return int(starts[place])


def evaluation_batches(
    tokens: npt.NDArray[np.uint8], *, sequence_length: int, batch_size: int, tokens_max: int = 0
) -> Iterator[_Batch]:
    """Contiguous windows that don't overlap and together predict every token but the first exactly once.

    Args:
        tokens: The set to evaluate, uint8 (N,), N at least 2.
        sequence_length: T, the tokens of a window.
        batch_size: The most windows of a batch.
        tokens_max: When positive and less than N: only as many windows as this holds, at least one, spread evenly
            over the set, so that a quick look isn't a look at the first documents only.

    Yields:
        Inputs and targets, int64 (at most B, T). The last window is padded, its padding has `IGNORED_TARGET`.

    Raises:
        DataError: There is nothing to predict.
    """
    import torch  # noqa: PLC0415 - see above

    if len(tokens) < 2:
        raise DataError(
            f"the evaluation set has {len(tokens)} tokens: there is nothing to predict", where="data.source"
        )
    num_windows = -(-(len(tokens) - 1) // sequence_length)
    padded = np.full(num_windows * sequence_length + 1, IGNORED_TARGET, dtype=np.int64)
    padded[: len(tokens)] = tokens
    kept = np.arange(num_windows)
    if 0 < tokens_max < len(tokens):
        num_kept = max(1, tokens_max // sequence_length)
        kept = np.arange(num_kept) * num_windows // num_kept
    for low in range(0, len(kept), batch_size):
        starts = kept[low : low + batch_size] * sequence_length
        both = torch.from_numpy(padded[starts[:, None] + np.arange(sequence_length + 1)])
        # Padding is an input too: any token will do, since no counted position sees a later one.
        yield both[:, :-1].clamp(min=0), both[:, 1:]
