"""The store's values and the maths on them."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import torch

from tests.support.syncer import BATCH_TOKENS, close, contribution, maths_of, open_tiny, small_delta, tiny_config
from wan_diloco.algorithm.codec import Payload
from wan_diloco.algorithm.publication import digest
from wan_diloco.errors import CheckpointError, JournalError, NonFiniteError, StorageError
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol.state_json import state_from_json
from wan_diloco.protocol.tape import (
    ContributionJournalled,
    FragmentPublished,
    LearnerAdmitted,
    MergeEntry,
    ProgressNoted,
    RoundClosed,
    RunStarted,
    TapeRecord,
)
from wan_diloco.storage import load_snapshot, tensor_file
from wan_diloco.syncer.fragments_store import (
    FragmentStore,
    InspectedSource,
    MergedFragment,
    published_tensors,
    snapshot_tensors,
)
from wan_diloco.syncer.journal_keeper import JournalKeeper, TapeMirror
from wan_diloco.syncer.restore import snapshot_manifest
from wan_diloco.syncer.snapshots import SnapshotKeeper
from wan_diloco.syncer.workers import Workers
from wan_diloco.units import (
    Epoch,
    FragmentId,
    GlobalStep,
    Incarnation,
    LearnerId,
    LocalStep,
    RoundId,
    ShardId,
    Version,
)

FIRST = FragmentId(0)
V0, V1, V2, V3 = (Version(Epoch(0), count) for count in range(4))
LEARNERS = (LearnerId("east"), LearnerId("west"))


def _entries(maths, payloads, *, step_lo=0, base=V0):
    return [
        (
            MergeEntry(
                header=contribution(maths, learner, FIRST, step_lo=step_lo, step_hi=step_lo + 4, base=base),
                ref="1:20:9",
                payload_bytes=1,
                staleness=0,
            ),
            maths.inspect(FIRST, payload.source()),
        )
        for learner, payload in payloads
    ]


def _fresh(**tables):
    config = tiny_config(**tables)
    return maths_of(config), FragmentStore.fresh(maths_of(config).layout, model_tensors(build_model(config)))


def _merge(maths, store, seeds=(1, 2), to_version=V1, step=8, *, copy=True) -> MergedFragment:
    payloads = [(f"learner-{seed}", small_delta(maths, FIRST, seed)) for seed in seeds]
    value = store.take(FIRST, copy=copy)
    return maths.merge(FIRST, value, to_version, GlobalStep(step), _entries(maths, payloads))


def test_one_learner_without_outer_momentum_becomes_the_new_value():
    maths, store = _fresh(outer={"lr": 1.0, "momentum": 0.0}, wire={"codec": "f32"})
    delta_N = torch.full((maths.fragment(FIRST).numel,), 0.125)
    payload = maths.codec.encode(delta_N, maths.table(FIRST))
    value = store.take(FIRST, copy=True)
    merged = maths.merge(FIRST, value, V1, GlobalStep(4), _entries(maths, [("east", payload)]))
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
    store.install(maths.merge(FIRST, store.take(FIRST), V2, GlobalStep(8), _entries(maths, [("east", zero)])))
    left_N = store.value(FIRST).exact_N - store.value(FIRST).published_N
    assert float(left_N.norm()) < 0.3 * float(behind_N.norm())


def test_a_merge_changes_the_values_in_place_and_nobody_else_may_look_meanwhile():
    maths, store = _fresh()
    before = store.value(FIRST)
    places = [tensor.data_ptr() for tensor in (before.exact_N, before.published_N, before.momentum_N)]
    merged = _merge(maths, store, copy=False)
    assert store.changing(FIRST)
    assert not store.settled
    for look in (store.values, store.hold, lambda: store.value(FIRST)):
        with pytest.raises(AssertionError, match="being changed"):
            look()
    store.install(merged)
    after = store.value(FIRST)
    assert [tensor.data_ptr() for tensor in (after.exact_N, after.published_N, after.momentum_N)] == places
    assert store.settled


@pytest.mark.parametrize("fragment_ids", [None, [FIRST]])
def test_what_is_held_stays_as_it_is_until_it_is_let_go(fragment_ids):
    maths, store = _fresh()
    hold = store.hold(fragment_ids)
    copies = {fragment_id: value.exact_N.clone() for fragment_id, value in hold.values.items()}
    held = dict(hold.values)
    store.install(_merge(maths, store, copy=False))
    assert store.settled
    assert all(torch.equal(value.exact_N, copies[fragment_id]) for fragment_id, value in held.items())
    assert store.value(FIRST).version == V1
    hold.let_go(FIRST)
    store.take(FIRST)
    assert store.changing(FIRST)
    store.give_back(FIRST)
    hold.end()
    hold.end()
    assert store.settled


def test_a_non_finite_contribution_is_found_when_it_comes_in():
    maths, _ = _fresh()
    good = small_delta(maths, FIRST, 1)
    scales = good.scales.copy()
    scales[:2] = 0xFF  # a NaN in bf16
    bad = Payload(codes=good.codes, scales=scales)
    with pytest.raises(NonFiniteError):
        maths.inspect(FIRST, bad.source())


def test_a_merge_that_cannot_read_a_contribution_changes_nothing():
    maths, store = _fresh()

    class Unreadable:
        def codes_into(self, start, out):
            raise JournalError("a chunk is damaged")

        def scales(self):
            return small_delta(maths, FIRST, 2).scales

    before = store.value(FIRST).exact_N.clone()
    (entry, good), (other, _) = _entries(maths, [(name, small_delta(maths, FIRST, 1)) for name in ("a", "b")])
    bad = InspectedSource(source=Unreadable(), norms=good.norms)
    with pytest.raises(JournalError):
        maths.merge(FIRST, store.take(FIRST), V1, GlobalStep(4), [(entry, good), (other, bad)])
    store.give_back(FIRST)
    assert torch.equal(store.value(FIRST).exact_N, before)


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


def _records_of_a_round(maths, store, to_version) -> list[TapeRecord]:
    """Merge another round of the first fragment in place, four steps of each learner on: what the tape says of it."""
    low = 4 * (to_version.count - 1)
    payloads = [(name, small_delta(maths, FIRST, seed)) for seed, name in enumerate(LEARNERS, to_version.count)]
    base = Version(to_version.epoch, to_version.count - 1)
    entries = _entries(maths, payloads, step_lo=low, base=base)
    merged = maths.merge(FIRST, store.take(FIRST), to_version, GlobalStep(low + 4), entries)
    store.install(merged)
    merges = tuple(entry for entry, _ in entries)
    closed = RoundClosed(
        round_id=RoundId(to_version.count),
        attempt=1,
        fragment_id=FIRST,
        from_version=base,
        to_version=to_version,
        global_step=GlobalStep(low + 4),
        members=LEARNERS,
        entries=merges,
        missing=(),
        quorum_s=0.0,
        grace_s=0.0,
    )
    published = FragmentPublished(
        round_id=closed.round_id,
        fragment_id=FIRST,
        version=to_version,
        digest=merged.value.digest,
        ref=f"1:{20 + to_version.count}:9",
        codes_bytes=merged.payload.codes.nbytes,
        scales_bytes=merged.payload.scales.nbytes,
        update_bytes=9,
    )
    journalled = [ContributionJournalled(header=entry.header, ref=entry.ref, payload_bytes=1) for entry in merges]
    progress = ProgressNoted(
        positions=tuple((name, Incarnation(1), low + 4, (low + 4) * BATCH_TOKENS) for name in LEARNERS), rejected=()
    )
    return [progress, *journalled, closed, published]


def test_a_snapshot_that_is_written_slowly_has_nothing_of_a_later_merge_in_it(tmp_path, monkeypatch):
    """Merges go on in place while a slow disk takes the state of an earlier one; another snapshot is skipped."""
    config = tiny_config()
    maths, restored = maths_of(config), open_tiny(tmp_path / "state", config)
    store, state = restored.store, restored.state
    writing, goes_on = threading.Event(), threading.Event()
    write_all = tensor_file.write_all

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        writing.set()
        assert goes_on.wait(10)
        return write_all(descriptor, buffers, offset)

    async def scenario() -> None:
        workers = Workers.threads(1)
        keeper = JournalKeeper(restored.journal, workers, TapeMirror(tmp_path / "tape.jsonl"), None, lambda _: None)
        folder = tmp_path / "state" / "snapshots"
        snapshots = SnapshotKeeper(folder, config.agreement(), keeper, workers, sequence=0, floor=1, keep_journal=False)

        async def happens(records: list[TapeRecord]) -> None:
            for record in records:
                state.apply(record)
            await keeper.record(records, durable=True)

        await happens(
            [
                RunStarted(present=LEARNERS, absent=()),
                *(
                    LearnerAdmitted(
                        learner_id=name,
                        incarnation=Incarnation(1),
                        local_step=LocalStep(0),
                        tokens=0,
                        shard=ShardId(shard),
                    )
                    for shard, name in enumerate(LEARNERS)
                ),
            ]
        )
        await happens(_records_of_a_round(maths, store, V1))
        # As text: it shares nothing with the state, also not by mistake.
        said = json.dumps(snapshot_manifest(state, config.agreement(), keeper.last_tape))
        capture = snapshots.capture(state, store)
        assert capture is not None
        expected = {name: tensor.clone() for name, tensor in snapshot_tensors(store.values()).items()}
        monkeypatch.setattr(tensor_file, "write_all", slow)
        async with asyncio.TaskGroup() as group:
            written = group.create_task(snapshots.write(capture))
            assert await asyncio.to_thread(writing.wait, 10)
            for version in (V2, V3):
                await happens(_records_of_a_round(maths, store, version))
            assert snapshots.capture(state, store) is None
            assert snapshots.skipped == 1
            goes_on.set()
        assert written.result() == ""
        loaded = load_snapshot(folder, "state-1")
        assert loaded.manifest == json.loads(said)
        found = state_from_json(loaded.manifest["state"])
        assert (found.versions[FIRST], found.totals.rounds, set(found.units.values())) == (V1, 1, {4})
        assert found.digests[FIRST] == digest(loaded.tensors["published.0"])
        assert found.ledger.totals(found.parameters).balance == 0
        assert (state.versions[FIRST], state.totals.rounds, set(state.units.values())) == (V3, 3, {12}), "it went on"
        assert loaded.tensors.keys() == expected.keys()
        assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items())
        now = snapshot_tensors(store.values())
        assert [name for name in expected if not torch.equal(now[name], expected[name])], "they did go on"
        workers.shutdown()

    asyncio.run(scenario())
    close(restored)


def test_a_snapshot_behind_which_nothing_can_be_removed_is_one_all_the_same(tmp_path, monkeypatch):
    config = tiny_config()
    restored = open_tiny(tmp_path / "state", config)
    shipped = []

    def refuses(*_):
        raise StorageError("it can't be removed")

    async def scenario() -> None:
        workers = Workers.inline()
        keeper = JournalKeeper(restored.journal, workers, TapeMirror(tmp_path / "tape.jsonl"), None, lambda _: None)
        folder = tmp_path / "state" / "snapshots"
        snapshots = SnapshotKeeper(
            folder,
            config.agreement(),
            keeper,
            workers,
            sequence=0,
            floor=1,
            keep_journal=False,
            ship=lambda name, _: shipped.append(name),
        )
        for number in (1, 2):
            await keeper.record([RunStarted(present=(), absent=())], durable=True)
            capture = snapshots.capture(restored.state, restored.store)
            assert capture is not None
            with monkeypatch.context() as patch:
                if number == 1:
                    patch.setattr("wan_diloco.syncer.snapshots.keep_last", refuses)
                problem = await snapshots.write(capture)
            assert load_snapshot(folder, f"state-{number}").manifest == capture.manifest
            # It is known to be there: nothing happened since.
            assert snapshots.capture(restored.state, restored.store) is None
            assert ("superfluous" in problem, "written" in problem) == (number == 1, False)
        assert shipped == ["state-1", "state-2"]
        assert sorted(path.name for path in folder.iterdir()) == shipped

    asyncio.run(scenario())
    close(restored)


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
