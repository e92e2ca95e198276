"""Publishing with the error carried on, installing, and digests."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch

from wan_diloco.algorithm.codec import CODEC_NAMES, codec_by_name
from wan_diloco.algorithm.publication import apply_update, delta, digest, mix, publish, rebase
from wan_diloco.errors import NonFiniteError


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
def test_a_value_that_is_not_finite_is_never_published(table, name):
    exact = randoms(table.numel)
    exact[7] = float("nan")
    with pytest.raises(NonFiniteError):
        publish(exact, torch.zeros(table.numel), codec_by_name(name), table)


def test_a_learner_that_moved_downhill_has_a_positive_delta():
    assert delta(torch.tensor([1.0]), torch.tensor([0.75])).item() == 0.25


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


def test_digest_is_blake2b_of_the_little_endian_bytes():
    expected = hashlib.blake2b(struct.pack("<3f", 1.0, -2.5, 0.1), digest_size=16).hexdigest()
    assert digest(torch.tensor([1.0, -2.5, 0.1])) == expected
    assert digest(torch.tensor([[1.0, 9.0], [-2.5, 9.0], [0.1, 9.0]])[:, 0]) == expected


def test_digest_tells_zeros_apart_by_their_sign():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
