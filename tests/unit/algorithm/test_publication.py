"""Publishing with the error carried on, installing, and digests."""

from __future__ import annotations

import struct

import pytest
import torch
import xxhash

from tests.support.merging import Delta, as_contribution, publish
from wan_diloco.algorithm.codec import CODEC_NAMES, codec_by_name
from wan_diloco.algorithm.merge import FragmentTensors, merge_and_publish
from wan_diloco.algorithm.publication import apply_update, digest, mix, rebase


@pytest.fixture
def table(make_fragment):
    return make_fragment((4, 200), (33,))[1]


def randoms(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_both_sides_hold_the_same_bits_after_every_update(table, name):
    codec = codec_by_name(name)
    exact = published = learner = randoms(table.numel)
    for step in range(5):
        exact = exact - 0.01 * randoms(table.numel, step)
        payload, published = publish(exact, published, codec, table)
        learner = apply_update(learner, payload, codec, table)
        assert digest(learner) == digest(published)


def test_a_lossless_codec_publishes_the_exact_value(table):
    exact, published = randoms(table.numel, 1), randoms(table.numel, 2)
    _, new = publish(exact, published, codec_by_name("f32"), table)
    assert digest(new) == digest(exact)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "e3m0"])
def test_what_quantisation_lost_is_sent_later_and_nothing_accumulates(table, name):
    codec = codec_by_name(name)
    exact, published = randoms(table.numel, 1), randoms(table.numel, 2)
    errors = []
    for _ in range(12):
        _, published = publish(exact, published, codec, table)
        errors.append(float((exact - published).norm() / exact.norm()))
    assert errors[0] > 1e-4
    assert errors[-1] < 1e-6


def test_publishing_changes_neither_value(table):
    exact, published = randoms(table.numel, 1), randoms(table.numel, 2)
    digests = digest(exact), digest(published)
    publish(exact, published, codec_by_name("int4"), table)
    assert (digest(exact), digest(published)) == digests


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_block_that_would_not_be_finite_stays_as_it_is_on_both_sides(make_fragment, name):
    """A step may overflow although every contribution is finite; then that block waits, and the others go on."""
    fragment, table = make_fragment((4, 200), (33,))
    codec, largest = codec_by_name(name), 3.0e38
    tensors = FragmentTensors(
        exact_N=randoms(table.numel), momentum_N=torch.zeros(table.numel), published_N=randoms(table.numel)
    )
    before = [part.clone() for part in (tensors.exact_N, tensors.momentum_N, tensors.published_N)]
    delta = torch.ones(table.numel)
    delta[150] = largest  # in the short block of the first row; ten times as much is beyond f32
    taken = [as_contribution(fragment, table, codec, Delta(delta=delta, tokens=1, steps=1))]
    payload, unstepped = merge_and_publish(fragment, table, codec, taken, tensors, lr=10.0, momentum=0.0)
    assert unstepped == 1
    held = slice(128, 200)
    after = (tensors.exact_N, tensors.momentum_N, tensors.published_N)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[held], new[held])
        assert bool(torch.isfinite(new).all())
        assert not torch.equal(old[:128], new[:128])
    assert digest(apply_update(before[2], payload, codec, table)) == digest(tensors.published_N)


def test_mixing_overwrites_by_default_and_keeps_a_share_otherwise():
    local, published = torch.tensor([2.0, -0.0]), torch.tensor([4.0, 0.1])
    overwritten = mix(local, published, 0.0)
    assert digest(overwritten) == digest(published)
    assert overwritten.data_ptr() != published.data_ptr()
    assert mix(local, published, 0.5).tolist() == pytest.approx([3.0, 0.05])
    assert mix(local, published, 0.25).tolist()[0] == 3.5


def test_rebasing_keeps_the_work_of_the_overlap():
    snapshot, local, published = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([10.0])
    assert rebase(local, published, snapshot).item() == 9.5


def test_digest_is_xxh3_of_the_little_endian_bytes():
    expected = xxhash.xxh3_128_hexdigest(struct.pack("<3f", 1.0, -2.5, 0.1))
    assert digest(torch.tensor([1.0, -2.5, 0.1])) == expected
    assert digest(torch.tensor([[1.0, 9.0], [-2.5, 9.0], [0.1, 9.0]])[:, 0]) == expected


def test_digest_tells_zeros_apart_by_their_sign():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
