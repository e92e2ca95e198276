"""Block tables and norms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from wan_diloco.algorithm.blocks import block_sums_of_squares, norm


@pytest.mark.parametrize(
    ("shapes", "lengths"),
    [
        ([(300,)], [128, 128, 44]),
        ([(2, 300)], [128, 128, 44, 128, 128, 44]),
        ([(3, 40)], [40, 40, 40]),
        ([(3, 32)], [32, 32, 32]),
        ([(10, 31)], [128, 128, 54]),
        ([(2, 4, 16)], [64, 64]),
        ([(2, 256), (1,), (128,)], [128] * 4 + [1, 128]),
        ([()], [1]),
    ],
)
def test_blocks_restart_at_tensors_and_rows_and_short_rows_are_flat(make_fragment, shapes, lengths):
    _, table = make_fragment(*shapes)
    assert table.lengths() == lengths
    assert table.num_blocks == len(lengths)
    assert table.numel == sum(lengths)


def test_each_piece_knows_its_blocks(make_fragment):
    fragment, table = make_fragment((2, 256), (1,), (128,), (3, 40))
    assert table.piece_elements == ((0, 512), (512, 513), (513, 641), (641, 761))
    assert table.piece_blocks == ((0, 4), (4, 5), (5, 6), (6, 9))
    assert len(table.piece_blocks) == len(fragment.pieces)


def test_tensors_of_whole_blocks_are_worked_on_as_one(make_fragment):
    _, table = make_fragment((4, 128), (2, 256), (384,))
    (segment,) = table.segments
    values = torch.arange(float(table.numel))
    assert segment.padded(values).data_ptr() == values.data_ptr()


def test_padding_is_zero_and_comes_off_again(make_fragment):
    _, table = make_fragment((2, 200))
    (segment,) = table.segments
    values = torch.arange(1.0, 401.0)
    padded = segment.padded(values)
    assert padded.shape == (2, 2, 128)
    assert int((padded == 0).sum()) == 2 * 56
    out = torch.zeros(400)
    segment.unpad(padded, out)
    assert torch.equal(out, values)


def scalar_sum_of_squares(block):
    """The definition, one operation at a time."""
    lanes = np.zeros(128, np.float32)
    lanes[: len(block)] = block
    lanes = lanes * lanes
    while len(lanes) > 1:
        lanes = np.array([lanes[i] + lanes[i + len(lanes) // 2] for i in range(len(lanes) // 2)], np.float32)
    return lanes[0]


def test_sums_of_squares_follow_their_definition_to_the_bit(make_fragment):
    _, table = make_fragment((3, 200), (77,), (5, 7), (2, 128))
    values = torch.randn(table.numel, generator=torch.Generator().manual_seed(1))
    sums = block_sums_of_squares(values, table)
    expected, start = [], 0
    for length in table.lengths():
        expected.append(scalar_sum_of_squares(values[start : start + length].numpy()))
        start += length
    assert sums.tolist() == [float(value) for value in expected]


def test_sums_of_squares_do_not_depend_on_the_number_of_threads(make_fragment):
    _, table = make_fragment((3000, 100), (200, 256))
    values = torch.randn(table.numel, generator=torch.Generator().manual_seed(2))
    one = block_sums_of_squares(values, table)
    torch.set_num_threads(2)
    assert block_sums_of_squares(values, table).tobytes() == one.tobytes()


def test_norm_adds_blocks_one_after_the_other():
    # 2^53 + 1 rounds to 2^53 each time; added pairwise, the ones would survive.
    sums = np.array([2.0**53, *[1.0] * 64], np.float32)
    assert norm(sums) == math.sqrt(2.0**53)
