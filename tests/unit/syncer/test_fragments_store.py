"""The store's values and the maths on them."""

from __future__ import annotations

import pytest
import torch

from tests.support.syncer import contribution, maths_of, small_delta, tiny_config
from wan_diloco.algorithm.codec import Payload
from wan_diloco.errors import CheckpointError, NonFiniteError
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol.tape import MergeEntry
from wan_diloco.syncer.fragments_store import (
    FragmentStore,
    MergedFragment,
    published_tensors,
    snapshot_tensors,
)
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Version

FIRST = FragmentId(0)
V0, V1, V2 = (Version(Epoch(0), count) for count in range(3))


def _entries(maths, payloads):
    return [
        (
            MergeEntry(
                header=contribution(maths, learner, FIRST, step_lo=0, step_hi=4, base=V0),
                ref="1:20:9",
                payload_bytes=1,
                staleness=0,
            ),
            payload,
        )
        for learner, payload in payloads
    ]


def _fresh(**tables):
    config = tiny_config(**tables)
    return maths_of(config), FragmentStore.fresh(maths_of(config).layout, model_tensors(build_model(config)))


def _merge(maths, store, seeds=(1, 2), to_version=V1, step=8) -> MergedFragment:
    payloads = [(f"learner-{seed}", small_delta(maths, FIRST, seed)) for seed in seeds]
    return maths.merge(FIRST, store.value(FIRST), to_version, GlobalStep(step), _entries(maths, payloads))


def test_one_learner_without_outer_momentum_becomes_the_new_value():
    maths, store = _fresh(outer={"lr": 1.0, "momentum": 0.0}, wire={"codec": "f32"})
    delta_N = torch.full((maths.fragment(FIRST).numel,), 0.125)
    payload = maths.codec.encode(delta_N, maths.table(FIRST))
    merged = maths.merge(FIRST, store.value(FIRST), V1, GlobalStep(4), _entries(maths, [("east", payload)]))
    assert torch.equal(merged.value.exact_N, store.value(FIRST).exact_N - delta_N)
    assert torch.equal(merged.value.published_N, merged.value.exact_N)


def test_merging_again_gives_the_same_bits():
    maths, store = _fresh()
    first, second = _merge(maths, store), _merge(maths, store)
    assert first.value.digest == second.value.digest
    assert torch.equal(first.value.momentum_N, second.value.momentum_N)
    assert first.payload.codes.tobytes() == second.payload.codes.tobytes()


def test_what_quantisation_lost_is_published_in_the_next_round():
    maths, store = _fresh(outer={"lr": 1.0, "momentum": 0.0})
    store.install(_merge(maths, store))
    behind_N = store.value(FIRST).exact_N - store.value(FIRST).published_N
    assert float(behind_N.abs().max()) > 0.0
    zero = maths.codec.encode(torch.zeros_like(behind_N), maths.table(FIRST))
    store.install(maths.merge(FIRST, store.value(FIRST), V2, GlobalStep(8), _entries(maths, [("east", zero)])))
    left_N = store.value(FIRST).exact_N - store.value(FIRST).published_N
    assert float(left_N.norm()) < 0.3 * float(behind_N.norm())


def test_values_read_before_an_install_stay_as_they_were():
    maths, store = _fresh()
    before = store.values()
    digests = [value.digest for value in before]
    copies = [value.exact_N.clone() for value in before]
    store.install(_merge(maths, store))
    assert [value.digest for value in before] == digests
    assert all(torch.equal(value.exact_N, copy) for value, copy in zip(before, copies, strict=True))
    assert store.value(FIRST).version == V1


def test_a_merge_with_a_non_finite_contribution_changes_nothing():
    maths, store = _fresh()
    good = small_delta(maths, FIRST, 1)
    scales = good.scales.copy()
    scales[:2] = 0xFF  # a NaN in bf16
    bad = Payload(codes=good.codes, scales=scales)
    before = store.value(FIRST)
    with pytest.raises(NonFiniteError):
        maths.merge(FIRST, before, V1, GlobalStep(4), _entries(maths, [("a", good), ("b", bad)]))
    assert store.value(FIRST) is before


def test_the_momentum_rises_with_the_global_step():
    maths, store = _fresh(outer={"momentum": 0.5, "momentum_warmup_steps": 100})
    early = _merge(maths, store, step=1).value.exact_N
    late = _merge(maths, store, step=100).value.exact_N
    start = store.value(FIRST).exact_N
    assert float((late - start).norm()) > 1.4 * float((early - start).norm())


def test_tensors_of_a_snapshot_come_back_to_the_same_values():
    maths, store = _fresh()
    store.install(_merge(maths, store))
    versions = [value.version for value in store.values()]
    again = FragmentStore.restore(maths.layout, snapshot_tensors(store.values()), versions)
    for old, new in zip(store.values(), again.values(), strict=True):
        assert (old.version, old.digest) == (new.version, new.digest)
        assert torch.equal(old.exact_N, new.exact_N)
        assert torch.equal(old.momentum_N, new.momentum_N)


def test_a_snapshot_without_a_tensor_is_refused_by_its_name():
    maths, store = _fresh()
    tensors = snapshot_tensors(store.values())
    del tensors["momentum.1"]
    with pytest.raises(CheckpointError, match=r"momentum\.1"):
        FragmentStore.restore(maths.layout, tensors, [V0, V0])


def test_the_published_model_has_the_models_names_and_shapes():
    config = tiny_config()
    model = build_model(config)
    maths = maths_of(config)
    store = FragmentStore.fresh(maths.layout, model_tensors(model))
    tensors = published_tensors(maths.layout, store.values())
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensors.pop(name), tensor)
    assert not tensors


def test_a_stored_payload_of_the_wrong_length_is_refused():
    maths, _ = _fresh()
    with pytest.raises(CheckpointError, match="fragment 0 has 3 bytes"):
        maths.split(FIRST, b"abc")
