"""Boundaries: installs, then snapshots, then a report; and the steps between."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.learner.conftest import ConstantUnits, MakeConfig, MakeTrainer
from wan_diloco.algorithm.fragments import read_fragment
from wan_diloco.algorithm.publication import digest
from wan_diloco.learner.ipc import Admitted, InstallValue
from wan_diloco.learner.local_trainer import LocalTrainer
from wan_diloco.learner.replica import Replica
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.models import build_model, run_layout
from wan_diloco.protocol.events import AllowSteps, ExitLearner, InstallUpdate, RequestSnapshot, SetPace
from wan_diloco.protocol.leases import Lease
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Incarnation, LocalStep, ShardId, Term, Version

F = FragmentId(1)


def install(count: int, slot: int, *, resync: int = 0, merged_hi: int | None = None, fragment: int = F) -> InstallValue:
    merged = None if merged_hi is None else LocalStep(merged_hi)
    version = Version(Epoch(0), count)
    return InstallValue(
        install=InstallUpdate(fragment_id=FragmentId(fragment), version=version, resync=resync, merged_hi=merged),
        slot=slot,
    )


def local(trainer: LocalTrainer, fragment: int = F) -> torch.Tensor:
    return read_fragment(trainer._layout.fragments[fragment], trainer._replica.parameters)


def may_step(trainer: LocalTrainer) -> bool:
    return trainer.may_step


def steps(trainer: LocalTrainer, count: int) -> None:
    for _ in range(count):
        trainer.step()


def test_no_step_may_be_taken_before_leave(make_trainer: MakeTrainer) -> None:
    trainer, _ = make_trainer()
    assert not may_step(trainer)
    trainer.boundary([AllowSteps(until_step=LocalStep(2))])
    steps(trainer, 2)
    assert not may_step(trainer)
    trainer.boundary([AllowSteps(until_step=None)])
    assert may_step(trainer)
    trainer.boundary([ExitLearner(reason="the run has ended", exit_code=0)])
    assert not may_step(trainer)


def test_the_report_tells_cumulative_counters(make_trainer: MakeTrainer) -> None:
    trainer, _ = make_trainer()
    first = trainer.boundary([])
    assert (first.local_step, first.tokens, first.unit, first.loss) == (0, 0, 0, None)
    steps(trainer, 3)
    trainer.note_step_time(0.5)
    report = trainer.boundary([])
    assert (report.local_step, report.tokens, report.unit, report.step_time_s) == (3, 3 * 32, 3, 0.5)
    assert report.loss is not None
    assert report.loss > 0
    assert report.learning_rate > 0


def test_an_install_overwrites_to_the_bit_and_restarts_the_counters(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer()
    steps(trainer, 2)
    slots.published(F, 1).uniform_(-1, 1)
    report = trainer.boundary([install(1, slot=1)])
    assert digest(local(trainer)) == digest(slots.published(F, 1))
    (done,) = report.installed
    assert (done.fragment_id, done.version, done.step_lo, done.tokens_lo) == (F, Version(Epoch(0), 1), 2, 64)
    standing = trainer.position.fragments[F]
    assert (standing.version, standing.step_lo, standing.tokens_lo, standing.slot) == (done.version, 2, 64, 1)
    assert trainer.position.fragments[0].step_lo == 0


def test_installs_come_before_snapshots_at_the_same_boundary(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer()
    steps(trainer, 1)
    slots.published(F, 1).fill_(0.25)
    report = trainer.boundary([RequestSnapshot(fragment_id=F), install(1, slot=1)])
    assert torch.equal(slots.outbox(F), torch.full_like(slots.outbox(F), 0.25))
    assert [taken.fragment_id for taken in report.snapshots] == [F]


def test_a_snapshot_is_a_copy_that_training_leaves_alone(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer()
    steps(trainer, 1)
    trainer.boundary([RequestSnapshot(fragment_id=F), RequestSnapshot(fragment_id=F)])
    before = digest(slots.outbox(F))
    assert before == digest(local(trainer))
    steps(trainer, 1)
    assert digest(slots.outbox(F)) == before != digest(local(trainer))


def test_a_version_that_is_installed_already_changes_nothing(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer()
    steps(trainer, 1)
    slots.published(F, 1).fill_(0.5)
    trainer.boundary([install(2, slot=1)])
    steps(trainer, 1)
    before = digest(local(trainer))
    report = trainer.boundary([install(2, slot=1), install(1, slot=1)])
    assert report.installed == ()
    assert digest(local(trainer)) == before
    assert trainer.position.fragments[F].step_lo == 1


def test_mixing_keeps_the_stated_share_of_the_local_value(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer(sync={"alpha": 0.25})
    steps(trainer, 1)
    own = local(trainer)
    slots.published(F, 1).fill_(1.0)
    trainer.boundary([install(1, slot=1)])
    torch.testing.assert_close(local(trainer), 0.25 * own + 0.75, rtol=0, atol=1e-6)


def test_before_its_first_step_a_life_takes_values_as_they_are(make_trainer: MakeTrainer) -> None:
    """Initial weights are no work that mixing should keep."""
    trainer, slots = make_trainer(sync={"alpha": 0.25})
    slots.published(F, 1).fill_(1.0)
    trainer.boundary([install(7, slot=1)])
    assert torch.equal(local(trainer), torch.ones_like(local(trainer)))


def test_rebasing_keeps_the_overlap_where_the_snapshot_was_merged(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer(sync={"install": "rebase"})
    steps(trainer, 2)
    trainer.boundary([RequestSnapshot(fragment_id=F)])
    snapshot = slots.outbox(F).clone()
    steps(trainer, 1)
    own = local(trainer)
    slots.published(F, 1).copy_(snapshot + 0.5)
    (done,) = trainer.boundary([install(1, slot=1, merged_hi=2)]).installed
    torch.testing.assert_close(local(trainer), own + 0.5, rtol=0, atol=1e-6)
    assert (done.step_lo, done.tokens_lo) == (2, 64)


@pytest.mark.parametrize("merged_hi", [None, 1])
def test_rebasing_overwrites_where_another_or_no_snapshot_was_merged(
    make_trainer: MakeTrainer, merged_hi: int | None
) -> None:
    trainer, slots = make_trainer(sync={"install": "rebase"})
    steps(trainer, 2)
    trainer.boundary([RequestSnapshot(fragment_id=F)])
    steps(trainer, 1)
    slots.published(F, 1).fill_(0.5)
    (done,) = trainer.boundary([install(1, slot=1, merged_hi=merged_hi)]).installed
    assert torch.equal(local(trainer), torch.full_like(local(trainer), 0.5))
    assert done.step_lo == 3


def test_a_resync_replaces_weights_and_starts_broken_moments_over(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer(sync={"alpha": 0.5})
    steps(trainer, 2)
    name = trainer._layout.fragments[F].pieces[0].tensor
    healthy = next(key for key in trainer.moments if key.startswith("exp_avg.") and not key.endswith(name))
    kept = trainer.moments[healthy].clone()
    trainer.moments[f"exp_avg.{name}"].fill_(math.nan)
    trainer._replica.parameters[name].data.fill_(math.nan)
    slots.published(F, 1).fill_(0.5)
    report = trainer.boundary([install(0, slot=1, resync=1)])
    assert [done.resync for done in report.installed] == [1]
    assert torch.equal(local(trainer), torch.full_like(local(trainer), 0.5))
    assert torch.equal(trainer.moments[f"exp_avg.{name}"], torch.zeros_like(trainer.moments[f"exp_avg.{name}"]))
    assert torch.equal(trainer.moments[healthy], kept)
    assert trainer.boundary([install(0, slot=1, resync=1)]).installed == ()


def test_a_step_that_is_not_finite_is_told_honestly(make_trainer: MakeTrainer) -> None:
    trainer, _ = make_trainer()
    steps(trainer, 1)
    for parameter in trainer._replica.parameters.values():
        parameter.data.fill_(math.nan)
    steps(trainer, 1)
    report = trainer.boundary([])
    assert (report.local_step, report.tokens, report.unit, report.loss) == (2, 32, 2, None)


def test_after_a_rejoin_the_learning_rate_is_that_of_the_global_step(make_trainer: MakeTrainer) -> None:
    inner = {"lr": 1e-3, "warmup_steps": 100, "final_lr_fraction": 0.0}
    trainer, _ = make_trainer(inner=inner)
    trainer.boundary([SetPace(anchor=-700, total_steps=GlobalStep(1000), lease=None)])
    steps(trainer, 1)
    expected = 1e-3 * 0.5 * (1 + math.cos(math.pi * 600 / 900))
    assert trainer.boundary([]).learning_rate == pytest.approx(2.5e-4, rel=1e-6) == pytest.approx(expected)
    assert {group["lr"] for group in trainer._replica.optimizer.param_groups} == {trainer._learning_rate}
    steps(trainer, 1)
    assert trainer.boundary([]).learning_rate < 2.5e-4


def test_the_syncer_says_where_in_the_data_a_life_goes_on(make_trainer: MakeTrainer) -> None:
    """A contribution up to unit 700 is in the journal, and the learner died 40 units later: it goes on at 700."""
    trainer, _ = make_trainer()
    lease = Lease(shard=ShardId(0), first_unit=700)
    trainer.boundary([SetPace(anchor=0, total_steps=GlobalStep(1000), lease=lease)])
    steps(trainer, 2)
    trainer.boundary([SetPace(anchor=0, total_steps=GlobalStep(1000), lease=None)])
    steps(trainer, 1)
    assert trainer._replica.units.read == [700, 701, 702]  # type: ignore[attr-defined]
    assert trainer.boundary([]).unit == 703


def test_a_checkpoint_gives_counters_and_moments_but_no_weights(make_trainer: MakeTrainer) -> None:
    old, _ = make_trainer()
    steps(old, 3)
    new, _ = make_trainer()
    weights = digest(local(new))
    new.restore(old.counters, old.moments)
    assert new.counters == old.counters
    assert all(torch.equal(new.moments[name], moment) for name, moment in old.moments.items())
    assert digest(local(new)) == weights
    assert not new.may_step
    assert {(f.step_lo, f.tokens_lo) for f in new.position.fragments} == {(3, 96)}


def test_an_uplink_is_told_the_life_that_it_speaks_for(make_trainer: MakeTrainer) -> None:
    trainer, slots = make_trainer()
    assert trainer.position.incarnation == 0
    trainer.boundary([Admitted(incarnation=Incarnation(4), term=Term(2), term_id="who began it")])
    position = trainer.position
    assert (position.incarnation, position.term, position.term_id) == (4, 2, "who began it")
    assert trainer.position.initial_digests == tuple(digest(slots.published(i, 0)) for i in range(3))


def test_the_syncer_says_which_data_a_life_reads(make_config: MakeConfig) -> None:
    config = make_config()
    layout = run_layout(config)
    shards = {ShardId(number): ConstantUnits() for number in (0, 3)}
    replica = Replica(config, build_model(config), shards[ShardId(0)])
    slots = FragmentSlots.private([fragment.numel for fragment in layout.fragments])
    trainer = LocalTrainer(config, replica, layout, slots, read_shard=shards.__getitem__)
    assert trainer.position.shard is None, "before it was told"
    pace = {"anchor": 0, "total_steps": GlobalStep(1000)}
    trainer.boundary([SetPace(**pace, lease=Lease(shard=ShardId(0), first_unit=7))])  # type: ignore[arg-type] # by name
    steps(trainer, 2)
    trainer.boundary([SetPace(**pace, lease=Lease(shard=ShardId(3), first_unit=40))])  # type: ignore[arg-type] # by name
    steps(trainer, 1)
    assert (shards[ShardId(0)].read, shards[ShardId(3)].read) == ([7, 8], [40])
    assert (trainer.position.shard, trainer.position.unit) == (3, 41)
