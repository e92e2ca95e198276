"""The laws of numbered batches: pure in the number, each window once a pass, nothing skipped on resume."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.data import (
    DOCUMENT_END,
    IGNORED_TARGET,
    BatchReader,
    decode_tokens,
    encode_documents,
    evaluation_batches,
)
from wan_diloco.errors import DataError

# Token i of 0..255 names its own place, so that a window is known by its first token.
PLACES = np.arange(256, dtype=np.uint8)
SIZES = st.tuples(st.integers(min_value=1, max_value=9), st.integers(min_value=1, max_value=5))
SEEDS = st.integers(min_value=0, max_value=2**32 - 1)


def reader(sizes: tuple[int, int], seed: int, tokens: np.ndarray = PLACES) -> BatchReader:
    """A reader of windows of sizes[0] tokens, sizes[1] a unit."""
    return BatchReader(tokens, sequence_length=sizes[0], batch_size=sizes[1], seed=seed)


def first_tokens(read: BatchReader, num_units: int) -> list[int]:
    """Where the windows of the first units begin, in order."""
    return [int(start) for index in range(num_units) for start in read.batch(index)[0][:, 0]]


@given(sizes=SIZES, seed=SEEDS)
def test_each_window_is_used_exactly_once_in_every_pass(sizes: tuple[int, int], seed: int) -> None:
    read = reader(sizes, seed)
    windows = read.windows_per_pass
    starts = first_tokens(read, -(-2 * windows // sizes[1]))
    for low in (0, windows):
        one_pass = sorted(starts[low : low + windows])
        offset = one_pass[0]
        assert 0 <= offset < sizes[0]
        assert one_pass == [offset + place * sizes[0] for place in range(windows)]


@given(sizes=SIZES, seed=SEEDS, order=st.lists(st.integers(min_value=0, max_value=300), min_size=1, max_size=12))
def test_a_batch_depends_on_its_number_only(sizes: tuple[int, int], seed: int, order: list[int]) -> None:
    read = reader(sizes, seed)
    for index in order:
        inputs_BT, targets_BT = read.batch(index)
        fresh_inputs_BT, fresh_targets_BT = reader(sizes, seed).batch(index)
        assert torch.equal(inputs_BT, fresh_inputs_BT)
        assert torch.equal(targets_BT, fresh_targets_BT)
        assert (inputs_BT.dtype, targets_BT.dtype) == (torch.int64, torch.int64)
        assert inputs_BT.shape == targets_BT.shape == (sizes[1], sizes[0])


@given(sizes=SIZES, seed=SEEDS, position=st.integers(min_value=0, max_value=40))
def test_reading_on_from_a_position_repeats_nothing_and_skips_nothing(
    sizes: tuple[int, int], seed: int, position: int
) -> None:
    whole = [reader(sizes, seed).batch(index)[0] for index in range(50)]
    resumed = reader(sizes, seed)
    for index in range(position, 50):
        assert torch.equal(resumed.batch(index)[0], whole[index])


def test_a_learner_that_died_inside_a_round_resumes_where_its_last_journalled_contribution_ended() -> None:
    # 700 samples of 10 a unit were journalled, 40 more were trained on and lost.
    tokens = np.arange(4000, dtype=np.uint32).astype(np.uint8)
    before, after = reader((2, 10), 3, tokens), reader((2, 10), 3, tokens)
    committed_units = 70
    accepted = Counter(sample for index in range(committed_units) for sample in range(index * 10, index * 10 + 10))
    lost = [before.batch(index)[0] for index in range(committed_units, committed_units + 4)]
    again = [after.batch(index)[0] for index in range(committed_units, committed_units + 4)]
    assert all(torch.equal(one, other) for one, other in zip(lost, again, strict=True))
    accepted.update(sample for index in range(70, 140) for sample in range(index * 10, index * 10 + 10))
    assert accepted == Counter(range(1400))


@given(sizes=SIZES, seed=SEEDS)
def test_targets_are_the_next_tokens(sizes: tuple[int, int], seed: int) -> None:
    inputs_BT, targets_BT = reader(sizes, seed).batch(7)
    assert torch.equal(targets_BT, inputs_BT + 1)


def test_passes_and_seeds_differ_in_order() -> None:
    read, other = reader((4, 1), 1), reader((4, 1), 2)
    windows = read.windows_per_pass
    starts = first_tokens(read, 2 * windows)
    assert starts[:windows] != starts[windows:]
    assert starts[:windows] != first_tokens(other, windows)


def test_units_per_pass_and_tokens_per_unit() -> None:
    read = reader((8, 4), 1, np.zeros(1000, dtype=np.uint8))
    assert read.windows_per_pass == 124
    assert read.units_per_pass == 31
    assert read.tokens_per_unit == 32


@given(sizes=SIZES, seed=SEEDS)
def test_the_smallest_shard_that_is_not_refused_reads_within_its_bounds(sizes: tuple[int, int], seed: int) -> None:
    enough = (sizes[1] + 1) * sizes[0]
    read = reader(sizes, seed, PLACES[:enough])
    for index in range(20):
        assert int(read.batch(index)[1].max()) < enough
    with pytest.raises(DataError, match=f"too small for its shards: one of {enough - 1} tokens"):
        reader(sizes, seed, PLACES[: enough - 1])


def test_a_negative_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="numbered from 0"):
        reader((4, 1), 1).batch(-1)


@given(count=st.integers(min_value=2, max_value=256), sizes=SIZES)
def test_evaluation_predicts_every_token_but_the_first_exactly_once(count: int, sizes: tuple[int, int]) -> None:
    batches = list(evaluation_batches(PLACES[:count], sequence_length=sizes[0], batch_size=sizes[1]))
    predicted = []
    for inputs_BT, targets_BT in batches:
        counted = targets_BT != IGNORED_TARGET
        assert torch.equal(targets_BT[counted], inputs_BT[counted] + 1)
        assert inputs_BT.min() >= 0
        predicted += targets_BT[counted].tolist()
    assert predicted == list(range(1, count))


@given(tokens_max=st.integers(min_value=1, max_value=400))
def test_a_quick_look_is_spread_over_the_whole_set(tokens_max: int) -> None:
    batches = list(evaluation_batches(PLACES, sequence_length=8, batch_size=4, tokens_max=tokens_max))
    starts = [int(start) for inputs_BT, _ in batches for start in inputs_BT[:, 0]]
    assert len(starts) == (32 if tokens_max >= 256 else max(1, tokens_max // 8))
    assert len(set(starts)) == len(starts)
    assert starts[-1] >= 256 - 8 - 256 / len(starts)


def test_an_evaluation_set_with_nothing_to_predict_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to predict"):
        next(evaluation_batches(PLACES[:1], sequence_length=4, batch_size=1))


def test_tokens_are_bytes_with_an_end_after_each_document() -> None:
    tokens = encode_documents([b"ab", "\u00e9".encode()])
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [97, 98, DOCUMENT_END, 0xC3, 0xA9, DOCUMENT_END]
    assert decode_tokens(tokens) == "ab\n\n\u00e9\n\n"
    assert decode_tokens([0xC3]) == "\ufffd"
