"""Inner moments as a row: all of them, in their places, whoever reads it; and which step a learner's own are of."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.learner.conftest import MakeTrainer
from wan_diloco.learner.moments import MomentsLayout
from wan_diloco.protocol.events import AllowSteps, InstallMoments, PinState, SetPace
from wan_diloco.units import GlobalStep, LearnerId, TransferId


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "step.w": torch.tensor(float(seed)),
        "exp_avg.w": torch.rand(3, 5, generator=generator),
        "exp_avg.b": torch.rand(7, generator=generator),
    }


def test_what_is_written_is_read_in_the_same_shapes() -> None:
    layout = MomentsLayout.of(tensors(1))
    row = np.full(layout.size_bytes, 255, np.uint8)
    layout.write(row, tensors(2))
    found = layout.read(row)
    assert found.keys() == tensors(2).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(2).items())
    assert layout.size_bytes == 4 * (1 + 15 + 7)


def test_other_shapes_have_another_fingerprint_and_other_values_the_same() -> None:
    assert MomentsLayout.of(tensors(1)).fingerprint == MomentsLayout.of(tensors(2)).fingerprint
    turned = {**tensors(1), "exp_avg.w": torch.rand(5, 3)}
    assert MomentsLayout.of(turned).fingerprint != MomentsLayout.of(tensors(1)).fingerprint


def test_what_one_trainer_pins_another_takes_over(make_trainer: MakeTrainer) -> None:
    donor, slots = make_trainer()
    donor.boundary([AllowSteps(until_step=None), SetPace(anchor=-10, total_steps=GlobalStep(40), lease=None)])
    for _ in range(3):
        donor.step()
    assert donor.boundary([PinState(number=4)]).pinned == 4
    before = {name: tensor.clone() for name, tensor in donor.moments.items()}
    donor.step()
    joiner, other = make_trainer()
    other.state[:] = slots.state
    assert joiner.position.moments_step is None
    install = InstallMoments(transfer=TransferId(9), donor=LearnerId("west"), global_step=GlobalStep(13))
    assert joiner.boundary([install]).moments_of == 9
    assert all(torch.equal(joiner.moments[name], tensor) for name, tensor in before.items())
    assert joiner.position.moments_step == 13


def test_a_checkpoints_moments_are_of_the_step_it_was_written_at(make_trainer: MakeTrainer) -> None:
    trainer, _ = make_trainer()
    pace = SetPace(anchor=-10, total_steps=GlobalStep(40), lease=None)
    trainer.boundary([AllowSteps(until_step=None), pace])
    for _ in range(3):
        trainer.step()
    assert trainer.position.moments_step == trainer.counters.global_step == 13
    again, _ = make_trainer()
    again.restore(trainer.counters, trainer.moments)
    assert again.position.moments_step == 13
    assert not again.position.has_trained
