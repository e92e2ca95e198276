"""What encoding a contribution takes, beside what it makes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.layout import MergeRule, TensorSpec, build_layout
from wan_diloco.config import WireSettings
from wan_diloco.learner.held import HeldFragment
from wan_diloco.learner.ipc import FragmentPosition
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.units import Epoch, LocalStep, Version
from wan_diloco.wire.frames import Assembler

MIB = 2**20


def held_fragment(shape):
    (fragment,) = build_layout([TensorSpec(name="w", shape=shape)], num_fragments=1, merge=MergeRule.MEAN).fragments
    slots = FragmentSlots.private([fragment.numel])
    generator = torch.Generator().manual_seed(0)
    slots.published(0, 0).normal_(generator=generator)
    slots.outbox(0).normal_(generator=generator)
    position = FragmentPosition(version=Version(Epoch(0), 0), resync=0, step_lo=LocalStep(0), tokens_lo=0, slot=0)
    return fragment, slots, HeldFragment(fragment, position, slots)


@pytest.mark.parametrize(("codec", "zstd"), [("int4", True), ("int4", False), ("bf16", True)])
def test_encoding_needs_little_more_memory_than_what_it_packs(codec, zstd):
    """Not the difference, nor its codes, and certainly no f32 copy: 32 MiB of those would show."""
    _, _, held = held_fragment((8192, 1024))
    job = held.encode_job(WireSettings(codec=codec, zstd=zstd))
    job()  # what stays, as workspaces do, is there now
    tracemalloc.start()
    frames = job()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes <= sum(map(len, frames)) + 6 * MIB


@pytest.mark.parametrize("codec_name", ["f32", "bf16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("shape", [(50, 300), (3, 129), (7,), (64, 256)])
def test_packing_piece_by_piece_gives_the_payload_of_the_whole(codec_name, shape):
    fragment, slots, held = held_fragment(shape)
    frames = held.encode_job(WireSettings(codec=codec_name, chunk_bytes="4KiB"))()
    codec, table = codec_by_name(codec_name), build_block_table(fragment)
    expected = codec.encode(slots.published(0, 0), table, slots.outbox(0))
    assembler = Assembler(expected.codes.size, expected.scales.size)
    for message in frames:
        assembler.add(message)
    result = assembler.result()
    assert np.array_equal(result.codes, expected.codes)
    assert np.array_equal(result.scales, expected.scales)
