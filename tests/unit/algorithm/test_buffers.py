"""Running statistics are averaged, counters take the maximum, and what is kept keeps its bits."""

from __future__ import annotations

import pytest
import torch

from wan_diloco.algorithm.buffers import BufferRule, buffer_rule, merge_buffer


def test_running_statistics_are_averaged_and_counters_stay_integers():
    means = [torch.zeros(2), torch.full((2,), 2.0)]
    counts = [torch.tensor(10), torch.tensor(14)]
    merged = [merge_buffer(buffer_rule(values[0].dtype), values[0], values, [1.0, 1.0]) for values in (means, counts)]
    assert merged[0].tolist() == [1.0, 1.0]
    assert merged[1].dtype is torch.int64
    assert merged[1].item() == 14


def test_the_mean_is_weighted_and_keeps_its_type():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = [torch.tensor([0.0], dtype=dtype), torch.tensor([4.0], dtype=dtype)]
        merged = merge_buffer(BufferRule.MEAN, values[0], values, [3.0, 1.0])
        assert merged.dtype is dtype
        assert merged.item() == 1.0


def test_kept_buffers_are_bitwise_unchanged():
    local = torch.tensor([0.1, -0.0])
    kept = merge_buffer(BufferRule.KEEP, local, [torch.ones(2), torch.ones(2)], [1.0, 1.0])
    assert kept.numpy().tobytes() == local.numpy().tobytes()
    assert kept.data_ptr() != local.data_ptr()
    assert torch.equal(merge_buffer(BufferRule.MEAN, local, [], []), local)


def test_flags_are_kept():
    assert buffer_rule(torch.bool) is BufferRule.KEEP
    assert buffer_rule(torch.int32) is BufferRule.MAX
    assert buffer_rule(torch.bfloat16) is BufferRule.MEAN


def test_buffers_that_differ_in_shape_or_type_are_refused():
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="shape or type"):
            merge_buffer(BufferRule.MEAN, torch.zeros(2), [torch.zeros(2), other], [1.0, 1.0])
