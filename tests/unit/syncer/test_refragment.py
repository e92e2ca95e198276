"""A run that is cut into other fragments keeps each element's three values, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.syncer import close, maths_of, open_tiny, tiny_config
from tests.support.values import PARTS, bits_by_tensor
from wan_diloco.algorithm.fragments import write_fragment
from wan_diloco.algorithm.layout import Layout, MergeRule, TensorSpec, build_layout
from wan_diloco.algorithm.publication import digest
from wan_diloco.config import parse_config
from wan_diloco.errors import ConfigError, StateDamaged
from wan_diloco.protocol import serial
from wan_diloco.protocol.ledger import DiscardReason
from wan_diloco.protocol.tape import LearnerAdmitted, ProgressNoted, Refragmented, ShardsAssigned
from wan_diloco.syncer.fragments_store import FragmentValue
from wan_diloco.syncer.journal_keeper import KIND_TAPE
from wan_diloco.syncer.plan import cutting_for
from wan_diloco.syncer.refragment import plan_cut, recut
from wan_diloco.syncer.restore import Restored
from wan_diloco.units import Epoch, Incarnation, LearnerId, LocalStep, Version

TWO, THREE = tiny_config(), tiny_config(sync={"fragments": 3})

specs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.booleans()), min_size=1, max_size=6).map(
    lambda shapes: [
        TensorSpec(name=f"{'embed' if mean else 'layer'}.{index}", shape=(rows, columns) if rows > 1 else (columns,))
        for index, (rows, columns, mean) in enumerate(shapes)
    ]
)


def values_of(layout: Layout, seed: int) -> tuple[FragmentValue, ...]:
    generator = torch.Generator().manual_seed(seed)
    values = []
    for fragment in layout.fragments:
        exact_N, published_N, momentum_N = torch.randn(3, fragment.numel, generator=generator)
        # Bits that aren't numbers, or numbers in one form only, are bits all the same.
        exact_N[0], momentum_N[-1] = -0.0, 1e-45
        values.append(
            FragmentValue(
                version=Version(Epoch(0), 3),
                digest=digest(published_N),
                exact_N=exact_N.clone(),
                published_N=published_N.clone(),
                momentum_N=momentum_N.clone(),
            )
        )
    return tuple(values)


@settings(deadline=None)
@given(specs, st.integers(1, 8), st.integers(1, 8), st.sampled_from(MergeRule), st.integers(0, 2**31))
def test_every_element_keeps_its_bits(
    tensors: list[TensorSpec], many: int, others: int, merge: MergeRule, seed: int
) -> None:
    before = build_layout(tensors, num_fragments=many, merge=merge)
    after = build_layout(tensors, num_fragments=others, merge=merge)
    values = values_of(before, seed)
    versions = [Version(Epoch(1), index) for index in range(after.num_fragments)]
    cut = recut(before, after, values, versions)
    assert [value.version for value in cut] == versions
    assert all(value.digest == digest(value.published_N) for value in cut)
    assert bits_by_tensor(after, cut) == bits_by_tensor(before, values)
    again = recut(after, before, cut, [value.version for value in values])
    for left, right in zip(again, values, strict=True):
        for part in PARTS:
            assert getattr(left, part).numpy().tobytes() == getattr(right, part).numpy().tobytes()


def tape(restored: Restored, *records: object) -> None:
    """Put records on the tape of a run that is open."""
    for record in records:
        restored.journal.append(KIND_TAPE, serial.dumps(record))
    restored.journal.sync()


def begun(folder: Path, config=TWO) -> dict[str, dict[str, bytes]]:
    """A run with two learners that have done some steps; each part of its values, by tensor."""
    restored = open_tiny(folder, config)
    for index, name in enumerate(("east", "west")):
        learner, incarnation = LearnerId(name), Incarnation(1)
        tape(
            restored,
            LearnerAdmitted(learner_id=learner, incarnation=incarnation, local_step=LocalStep(0), tokens=0),
            ProgressNoted(positions=((learner, incarnation, 7 + index, 70 + index),), rejected=()),
        )
    values = restored.store.values()
    close(restored)
    return bits_by_tensor(maths_of(config).layout, values)


def test_a_changed_number_is_refused_by_a_word_that_helps_and_nothing_changes(tmp_path):
    begun(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"sync\.fragments: is 3 now, and the run in .* has 2 .*--refragment"):
        open_tiny(tmp_path, THREE, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_run_goes_on_in_other_fragments(tmp_path):
    tensors = begun(tmp_path)
    restored = open_tiny(tmp_path, THREE, resume=True, refragment=True)
    layout, state = maths_of(THREE).layout, restored.state
    assert bits_by_tensor(layout, restored.store.values()) == tensors
    assert state.versions == [value.version for value in restored.store.values()]
    assert {version.epoch for version in state.versions} == {1}
    assert state.digests == [value.digest for value in restored.store.values()]
    assert state.parameters == tuple(fragment.numel for fragment in layout.fragments)
    totals = state.ledger.totals(state.parameters)
    assert (totals.balance, totals.trained_tokens) == (0, 141.0)
    assert totals.discarded_tokens == {DiscardReason.REFRAGMENTED: 141.0}
    assert any("cut into 3 fragments" in note for note in restored.notes)
    assert restored.new_epoch == "the parameters are cut into other fragments"
    close(restored)
    # Once it is so it needs no word, whether or not a snapshot was taken since; and the word does nothing.
    for refragment in (False, True):
        again = open_tiny(tmp_path, THREE, resume=True, refragment=refragment)
        assert again.state.epoch == 1
        assert sum(isinstance(record, Refragmented) for record in again.tape) == 1
        assert bits_by_tensor(layout, again.store.values()) == tensors
        close(again)


def test_it_can_be_cut_again_and_back(tmp_path):
    tensors = begun(tmp_path)
    for config in (THREE, tiny_config(sync={"fragments": 1}), TWO):
        close(open_tiny(tmp_path, config, resume=True, refragment=True))
    restored = open_tiny(tmp_path, TWO, resume=True)
    assert restored.state.epoch == 3
    assert bits_by_tensor(maths_of(TWO).layout, restored.store.values()) == tensors
    assert restored.state.ledger.totals(restored.state.parameters).balance == 0
    close(restored)


def test_with_the_number_of_before_it_is_refused_from_then_on(tmp_path):
    begun(tmp_path)
    close(open_tiny(tmp_path, THREE, resume=True, refragment=True))
    with pytest.raises(ConfigError, match=r"is 2 now, and the run in .* has 3"):
        open_tiny(tmp_path, TWO, resume=True)


def test_no_other_setting_changes_with_it(tmp_path):
    begun(tmp_path)
    with pytest.raises(ConfigError, match=r"sync\.period_steps"):
        open_tiny(tmp_path, tiny_config(sync={"fragments": 3, "period_steps": 5}), resume=True, refragment=True)


def test_rounds_that_are_due_by_then_count_as_done(tmp_path):
    restored = open_tiny(tmp_path, TWO)
    restored.state.global_step = 9
    values, initial = restored.store.values(), {}
    layout = maths_of(TWO).layout
    for spec in layout.tensors:
        initial[spec.name] = torch.empty(spec.shape)
    for fragment, value in zip(layout.fragments, values, strict=True):
        write_fragment(fragment, initial, value.published_N)
    record = plan_cut(cutting_for(THREE), 2, restored.state, values, initial)
    # With H = 4 and three fragments: due at 4, 8; 1, 5, 9; 2, 6.
    assert record.counts == (2, 3, 2)
    assert record.due_steps == (8, 9, 6)
    other = {name: tensor + 1 for name, tensor in initial.items()}
    with pytest.raises(ConfigError, match="initial weights"):
        plan_cut(cutting_for(THREE), 2, restored.state, values, other)
    close(restored)


def test_a_record_that_doesnt_fit_the_values_is_damage(tmp_path):
    begun(tmp_path)
    restored = open_tiny(tmp_path, THREE, resume=True, refragment=True)
    (record,) = [record for record in restored.tape if isinstance(record, Refragmented)]
    wrong = serial.loads(Refragmented, serial.dumps(record).replace(record.digests[0].encode(), b"another"))
    tape(restored, wrong)
    close(restored)
    with pytest.raises(StateDamaged, match="aren't those that they were"):
        open_tiny(tmp_path, THREE, resume=True)


def test_a_shard_is_its_owners_also_when_that_is_gone_for_long(tmp_path):
    config = tiny_config(data={"shards": 4})
    east, west, north = LearnerId("east"), LearnerId("west"), LearnerId("north")
    restored = open_tiny(tmp_path, config)
    tape(
        restored,
        ShardsAssigned(shards=((east, 0), (west, 1), (north, 2))),
        ShardsAssigned(shards=((east, 0), (west, 1))),
    )
    close(restored)
    tree = config.model_dump(mode="json", by_alias=True)
    regions = [{"name": "east"}, {"name": "west"}]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for fragments in (2, 3):
        sync = {**tree["sync"], "fragments": fragments}
        wrong = parse_config({**tree, "sync": sync, "regions": [*regions, {"name": "south"}]})
        with pytest.raises(ConfigError, match=r"regions\.south\.shard: is 2, which is north's for good"):
            open_tiny(tmp_path, wrong, resume=True, refragment=True)
        # A start that is refused cuts nothing anew.
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name, shard in (("south", 3), ("north", 2)):
        other = parse_config({**tree, "regions": [*regions, {"name": name, "shard": shard}]})
        close(open_tiny(tmp_path, other, resume=True))
