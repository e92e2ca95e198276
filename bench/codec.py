"""What do the codecs cost, and what do they lose?

    python bench/codec.py [--quick] [--json] [--rounds 40]

Times are processor time of one thread, over the time of `np.copyto` of the same 64 MiB of f32, taken right before each.
All memory is touched beforehand. Blocks have 128 elements.

- `X_encode_over_memcpy`: f32 to packed codes and scales; `int4_encode_delta_over_memcpy`: of the difference of two.
- `X_decode_accumulate_over_memcpy`: packed codes and scales, times a weight, added to a vector.
- `numba_over_torch_int4_encode`: how many times faster the kernel encodes than torch does, on one thread.

Losses are the L2 norm of the error over that of the values; bits a parameter are those of codes and scales, and those
of the messages that are sent, after zstd and with all headers. Deltas are those of a model in training (`real_deltas`),
Gaussian values with a scale for each row, and values with heavy tails.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
from machine import machine
from real_deltas import real_deltas
from rounds import note, processor_s, ratios, show
from vectors import Vector, fragment_of, gaussian, student_t

from wan_diloco.algorithm.blocks import BlockTable, build_block_table
from wan_diloco.algorithm.codec import CODEC_NAMES, Codec, codec_by_name
from wan_diloco.algorithm.codec.base import as_halves
from wan_diloco.algorithm.kernels import passes
from wan_diloco.algorithm.kernels.memory import workspace
from wan_diloco.algorithm.kernels.segments import BlockMap
from wan_diloco.algorithm.layout import MergeRule
from wan_diloco.wire.frames import pack

TIMED = ("int4", "e3m0", "int8", "bf16")
NUMEL = 2**24
TORCH_ROUNDS = 5
SAMPLE_NUMEL = 2**22


class Bench:
    """What all jobs work on."""

    def __init__(self, rounds: int) -> None:
        """Make the vectors, and touch what is written to."""
        self.rounds = rounds
        self.values, self.base = gaussian(NUMEL, 0), gaussian(NUMEL, 1)
        self.out = self.values.copy()
        self.table = build_block_table(fragment_of(NUMEL, rule=MergeRule.MEAN))

    def memcpy(self) -> None:
        """The yardstick."""
        np.copyto(self.out, self.values)

    def kernels(self, result: dict[str, Any], codec: Codec) -> None:
        """One codec's figures."""
        blocks, payload = BlockMap(codec.kind, self.table), codec.encode(torch.from_numpy(self.values), self.table)
        codes, scales, halves = payload.codes, payload.scales, as_halves(payload.scales)
        values_N, minus_N = torch.from_numpy(self.values), torch.from_numpy(self.base)
        last, weight, sums = self.table.num_blocks, np.float32(0.25), self.base.copy()

        def encode(minus_N: torch.Tensor | None = None) -> None:
            codec.encode_range(values_N, self.table, blocks, 0, last, codes, scales, minus_N)

        def add() -> None:
            passes.add(codec.kind, codes, halves, blocks.segments, 0, last, weight, sums, 0, 0, 0, workspace())

        over, times_s = ratios(encode, self.memcpy, self.rounds)
        note(result, f"{codec.name}_encode_over_memcpy", over)
        note(result, f"{codec.name}_encode_ns_per_parameter", [1e9 * time_s / NUMEL for time_s in times_s])
        over, times_s = ratios(add, self.memcpy, self.rounds)
        note(result, f"{codec.name}_decode_accumulate_over_memcpy", over)
        note(result, f"{codec.name}_decode_accumulate_ns_per_parameter", [1e9 * time_s / NUMEL for time_s in times_s])
        if codec.name == "int4":
            over, _ = ratios(lambda: encode(minus_N), self.memcpy, self.rounds)
            note(result, "int4_encode_delta_over_memcpy", over)
            over, _ = ratios(lambda: codec.encode_on_device(values_N, self.table), encode, TORCH_ROUNDS)
            note(result, "numba_over_torch_int4_encode", over)


def loss_and_bits(codec: Codec, deltas: list[tuple[BlockTable, torch.Tensor]]) -> dict[str, float]:
    """What a codec makes of deltas: all fragments together."""
    error = whole = 0.0
    raw_bytes = sent_bytes = numel = 0
    for table, delta_N in deltas:
        payload = codec.encode(delta_N, table)
        values_N = delta_N.double()
        error += float((codec.decode(payload, table).double() - values_N).square().sum())
        whole += float(values_N.square().sum())
        numel += table.numel
        raw_bytes += payload.codes.size + payload.scales.size
        sent_bytes += sum(map(len, pack(payload.codes, payload.scales)))
    return {
        "relative_l2_error": round((error / whole) ** 0.5, 5),
        "bits_raw": round(8 * raw_bytes / numel, 3),
        "bits_zstd": round(8 * sent_bytes / numel, 3),
    }


def losses(*, quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    """By kind of delta and codec."""
    table = build_block_table(fragment_of(SAMPLE_NUMEL, rule=MergeRule.MEAN))

    def whole(values: Vector) -> list[tuple[BlockTable, torch.Tensor]]:
        return [(table, torch.from_numpy(values))]

    kinds = {
        "real": real_deltas(quick=quick),
        "gaussian": whole(gaussian(SAMPLE_NUMEL, 2)),
        "student_t3": whole(student_t(SAMPLE_NUMEL, 3)),
    }
    return {
        kind: {name: loss_and_bits(codec_by_name(name), deltas) for name in CODEC_NAMES}
        for kind, deltas in kinds.items()
    }


def loss_table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """For people; a row a kind and codec."""
    rows = ["| deltas | codec | relative L2 error | bits a parameter | after zstd |", "|---|---|---|---|---|"]
    for kind, codecs in found.items():
        rows += [
            f"| {kind} | {name} | {loss['relative_l2_error']:.4f} | {loss['bits_raw']:.2f} | {loss['bits_zstd']:.2f} |"
            for name, loss in codecs.items()
        ]
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and a smaller model in training")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine()}
    bench = Bench(15 if chosen.quick else chosen.rounds)
    memcpy_s = [processor_s(bench.memcpy) for _ in range(bench.rounds)]
    note(result, "memcpy_ns_per_parameter", [1e9 * time_s / NUMEL for time_s in memcpy_s[1:]])
    for name in TIMED:
        bench.kernels(result, codec_by_name(name))
        print(f"{name} is timed", file=sys.stderr)
    result["losses"] = losses(quick=chosen.quick)
    show(result, as_json=chosen.json)
    if not chosen.json:
        print(loss_table(result["losses"]))


if __name__ == "__main__":
    main()
