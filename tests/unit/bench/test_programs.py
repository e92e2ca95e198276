"""What is measured is the real thing: the benches of kernels, on vectors so short that they say nothing of time."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.layout import MergeRule

NUMEL = 2**14


@pytest.fixture
def merge(monkeypatch: pytest.MonkeyPatch) -> Any:
    program = importlib.import_module("merge")
    monkeypatch.setattr(program, "NUMEL", NUMEL)
    return program


def test_the_fused_kernel_that_is_timed_does_a_whole_merge(merge: Any) -> None:
    bench = merge.Bench(rounds=1)
    state = tuple(vector.copy() for vector in bench.state)
    bench.whole(MergeRule.MEAN, state=state)()
    bench.fused(4)()
    for ours, theirs, before in zip(bench.state, state, [bench.vector] * 3, strict=True):
        assert np.array_equal(ours.view(np.int32), theirs.view(np.int32))
        assert not np.array_equal(ours, before)


def test_threads_that_change_no_bit_are_timed(merge: Any) -> None:
    result: dict[str, float] = {}
    merge.Bench(rounds=2).threads(result)
    assert result["rda4_threads_speedup"] > 0


def test_a_payload_in_a_file_is_the_payload(merge: Any, tmp_path: Any) -> None:
    payload = merge.Bench(rounds=1).payloads[0]
    path = tmp_path / "000"
    path.write_bytes(payload.codes.tobytes() + payload.scales.tobytes())
    stored = merge.Stored(path, payload.codes.size)
    part = np.empty(100, np.uint8)
    stored.codes_into(50, part)
    assert np.array_equal(part, payload.codes[50:150])
    assert np.array_equal(stored.scales(), payload.scales)


def test_each_codec_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = importlib.import_module("codec")
    monkeypatch.setattr(codec, "NUMEL", NUMEL)
    result: dict[str, float] = {}
    bench = codec.Bench(rounds=1)
    for name in codec.TIMED:
        bench.kernels(result, codec_by_name(name))
    for name in ("int4", "e3m0", "int8", "bf16"):
        assert {f"{name}_encode_over_memcpy", f"{name}_decode_accumulate_over_memcpy"} <= result.keys()
    assert {"int4_encode_delta_over_memcpy", "numba_over_torch_int4_encode"} <= result.keys()


def test_losses_are_those_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, vectors = importlib.import_module("codec"), importlib.import_module("vectors")
    table = build_block_table(vectors.fragment_of(NUMEL, rule=MergeRule.MEAN))
    deltas = [(table, torch.from_numpy(vectors.gaussian(NUMEL, seed))) for seed in range(2)]
    exact = codec.loss_and_bits(codec_by_name("f32"), deltas)
    assert (exact["relative_l2_error"], exact["bits_raw"]) == (0.0, 32.0)
    four = codec.loss_and_bits(codec_by_name("int4"), deltas)
    assert four["bits_raw"] == 4.125  # codes, and 16 bits a block of 128
    assert four["bits_zstd"] < four["bits_raw"]
    assert 0.11 < four["relative_l2_error"] < 0.125  # of Gaussian values with the largest of 128 at 7 steps
