"""What does a merge cost? The kernel over memcpy, RDA over the mean, threads, and memory.

    python bench/merge.py [--quick] [--json] [--rounds 25] [--threads]

Times are processor time of one thread, over the time of `np.copyto` of the same 64 MiB of f32, taken right before each.

- `fusedM_over_memcpy`: M int4 contributions decoded and averaged, the outer step and the publication, all in one pass.
- `three_vectors_over_memcpy`: copying three such vectors. The kernel reads and writes value, momentum and published
  value, so where memory is the limit nothing that does its work can be quicker.
- `rda4_over_plain4`: a whole merge of four contributions, reading them included, by RDA over one by the mean.
- `peak_memory_m16_over_m2`: peak memory of a process that holds 64M parameters (12 bytes each) and merges a fragment of
  8M from sixteen files, over two.
- `fused4_threads_speedup`, `rda4_threads_speedup` with `--threads`: how many times faster a merge is on all cores, by
  the clock on the wall; it is an error if a single bit differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from rounds import Job, note, ratios, show, wall_s
from vectors import Vector, fragment_of, gaussian

from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import Payload, PayloadSource, codec_by_name
from wan_diloco.algorithm.codec.base import as_halves
from wan_diloco.algorithm.kernels import merging
from wan_diloco.algorithm.kernels.memory import workspace
from wan_diloco.algorithm.kernels.segments import BlockMap
from wan_diloco.algorithm.layout import MergeRule
from wan_diloco.algorithm.merge import Contribution, FragmentTensors, inspect_payload, merge_and_publish

NUMEL = 2**24
COUNTS = (1, 4, 8, 16)
VARIANTS = 4
# Several, as fragments of real models have.
PIECES = 8
RATE, MOMENTUM = 0.7, 0.6
CODEC = codec_by_name("int4")
MODEL_NUMEL, MERGED_NUMEL = 2**26, 2**23


# ---- time ----------------------------------------------------------------------------------------


class Bench:
    """What all merges work on."""

    def __init__(self, rounds: int) -> None:
        """Encode what the learners sent, and touch what is written to."""
        self.rounds = rounds
        self.vector = gaussian(NUMEL, 0)
        self.copy = self.vector.copy()
        self.table = build_block_table(fragment_of(NUMEL, rule=MergeRule.MEAN, num_pieces=PIECES))
        self.payloads = [CODEC.encode(torch.from_numpy(gaussian(NUMEL, 1 + i)), self.table) for i in range(VARIANTS)]
        self.state = tuple(self.vector.copy() for _ in range(3))

    def memcpy(self) -> None:
        """The yardstick."""
        np.copyto(self.copy, self.vector)

    def copy_three(self) -> None:
        """Move as much as the kernel must."""
        for vector in self.state:
            np.copyto(self.copy, vector)

    def fused(self, count: int) -> Job:
        """The kernel by itself."""
        chosen = [self.payloads[index % VARIANTS] for index in range(count)]
        codes = np.stack([payload.codes for payload in chosen])
        scales = np.stack([as_halves(payload.scales) for payload in chosen])
        weights, nothing = np.full(count, 1 / count, np.float32), np.empty(0, np.float32)
        blocks, zero, rule = BlockMap(CODEC.kind, self.table), np.float32(0.0), (np.float32(MOMENTUM), np.float32(RATE))
        new = Payload(codes=self.payloads[0].codes.copy(), scales=self.payloads[0].scales.copy())
        halves = as_halves(new.scales)

        def merge() -> None:
            merging.merge_and_publish(
                CODEC.kind,
                codes,
                scales,
                weights,
                nothing,
                (zero, zero),
                blocks.segments,
                0,
                self.table.num_blocks,
                self.state,
                rule,
                new.codes,
                halves,
                workspace(),
            )

        return merge

    def whole(self, rule: MergeRule, *, state: tuple[Vector, ...], threads: Executor | None = None) -> Job:
        """A merge of four as the syncer does it; the job gives the publication."""
        fragment = fragment_of(NUMEL, rule=rule, num_pieces=PIECES)
        sources = [payload.source() for payload in self.payloads]
        contributions = [
            Contribution(
                source=source, tokens=1024, steps=1, norms=inspect_payload(fragment, self.table, CODEC, source)
            )
            for source in sources
        ]
        exact_N, momentum_N, published_N = map(torch.from_numpy, state)
        tensors = FragmentTensors(exact_N=exact_N, momentum_N=momentum_N, published_N=published_N)

        def merge() -> Payload:
            return merge_and_publish(
                fragment,
                self.table,
                CODEC,
                contributions,
                tensors,
                lr=RATE,
                momentum=MOMENTUM,
                threads=threads,
                num_threads=os.cpu_count() or 1,
            )[0]

        return merge

    def times(self, result: dict[str, Any]) -> None:
        """All that one thread does."""
        for count in COUNTS:
            over, times_s = ratios(self.fused(count), self.memcpy, self.rounds)
            note(result, f"fused{count}_over_memcpy", over)
            note(result, f"fused{count}_ns_per_parameter", [1e9 * time_s / NUMEL for time_s in times_s])
        note(result, "three_vectors_over_memcpy", ratios(self.copy_three, self.memcpy, self.rounds)[0])
        mean, rda = (self.whole(rule, state=self.state) for rule in (MergeRule.MEAN, MergeRule.RDA))
        over, times_s = ratios(rda, mean, self.rounds)
        note(result, "rda4_over_plain4", over)
        note(result, "rda4_ns_per_parameter", [1e9 * time_s / NUMEL for time_s in times_s])

    def threads(self, result: dict[str, Any]) -> None:
        """All cores against one.

        Raises:
            AssertionError: They don't give the same bits.
        """
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for name, rule in (("fused4", MergeRule.MEAN), ("rda4", MergeRule.RDA)):
                ones, twos = [self.vector.copy() for _ in range(3)], [self.vector.copy() for _ in range(3)]
                one = self.whole(rule, state=tuple(ones))
                several = self.whole(rule, state=tuple(twos), threads=threads)
                # As often as the other, so that both states are equal in the end.
                over, _ = ratios(one, several, self.rounds, clock=wall_s)
                note(result, f"{name}_threads_speedup", over)
                if any(not np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(ones, twos, strict=True)):
                    raise AssertionError(f"{name}: threads change bits")


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored(PayloadSource):
    """A payload in a file: codes, then scales."""

    path: Path
    codes_bytes: int

    def codes_into(self, start: int, out: Any) -> None:
        """Read a range."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            if file.readinto(out) != out.size:
                raise AssertionError(f"{self.path} is too short")

    def scales(self) -> Any:
        """Read them all."""
        return np.fromfile(self.path, np.uint8, offset=self.codes_bytes)


def merge_files(folder: Path) -> None:
    """Merge what lies in a folder into a fragment of a large model; say the peak, in bytes.

    This is the process that is measured, so it makes nothing that a syncer wouldn't hold.
    """
    fragment = fragment_of(MERGED_NUMEL, rule=MergeRule.RDA, num_pieces=PIECES)
    table = build_block_table(fragment)
    state = torch.full((3, MODEL_NUMEL), 0.5)
    tensors = FragmentTensors(
        exact_N=state[0, :MERGED_NUMEL], momentum_N=state[1, :MERGED_NUMEL], published_N=state[2, :MERGED_NUMEL]
    )
    codes_bytes = CODEC.sizes(table).codes_bytes
    contributions = []
    for path in sorted(folder.iterdir()):
        source = Stored(path, codes_bytes)
        norms = inspect_payload(fragment, table, CODEC, source)
        contributions.append(Contribution(source=source, tokens=1024, steps=1, norms=norms))
    merge_and_publish(fragment, table, CODEC, contributions, tensors, lr=RATE, momentum=MOMENTUM)
    # Not getrusage: that also counts what the parent had when it started this process.
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(int(line.split()[1]) * 1024)


def peak_bytes(count: int) -> int:
    """Of a process that merges so many contributions."""
    table = build_block_table(fragment_of(MERGED_NUMEL, rule=MergeRule.RDA, num_pieces=PIECES))
    with tempfile.TemporaryDirectory(prefix="bench-merge-") as name:
        for index in range(count):
            payload = CODEC.encode(torch.from_numpy(gaussian(MERGED_NUMEL, index)), table)
            (Path(name) / f"{index:03}").write_bytes(payload.codes.tobytes() + payload.scales.tobytes())
        command = [sys.executable, __file__, "--merge-files", name]
        return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def memory(result: dict[str, Any], repeats: int) -> None:
    """Sixteen over two."""
    pairs = [(peak_bytes(16), peak_bytes(2)) for _ in range(repeats)]
    note(result, "peak_memory_m16_over_m2", [many / few for many, few in pairs])
    note(result, "peak_memory_m2_mib", [few / 2**20 for _, few in pairs])


def main() -> None:
    """Measure and print; or be the process whose memory is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", action="store_true", help="also merge on all cores")
    parser.add_argument("--merge-files", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.merge_files:
        merge_files(chosen.merge_files)
        return
    result: dict[str, Any] = {"machine": machine()}
    bench = Bench(9 if chosen.quick else chosen.rounds)
    bench.times(result)
    if chosen.threads:
        bench.threads(result)
    memory(result, 1 if chosen.quick else 3)
    show(result, as_json=chosen.json)


if __name__ == "__main__":
    main()
