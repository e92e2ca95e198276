"""The outer step against its vectors and torch's own optimizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.merging import step_outer as outer_step
from wan_diloco.algorithm.outer import momentum_at
from wan_diloco.units import GlobalStep


def test_nesterov_takes_the_published_steps(vectors):
    case = vectors["nesterov_sgd"]
    theta, momentum = torch.tensor([case["theta0"]]), torch.zeros(1)
    for expected in case["theta_after"]:
        theta, momentum = outer_step(theta, momentum, torch.tensor([case["g"]]), lr=case["eta"], momentum=case["mu"])
        assert theta.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.3)])
def test_twenty_random_rounds_equal_a_strict_reference_to_the_bit_and_torch_nearly(lr, mu):
    generator = torch.Generator().manual_seed(3)
    theta = torch.randn(1000, generator=generator)
    momentum = torch.zeros(1000)
    parameter = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=mu > 0)
    ref_theta, ref_b = theta.numpy().copy(), np.zeros(1000, np.float32)
    for _ in range(20):
        delta = torch.randn(1000, generator=generator) * 0.01
        theta, momentum = outer_step(theta, momentum, delta, lr=lr, momentum=mu)
        ref_b = np.float32(mu) * ref_b + delta.numpy()
        ref_theta = ref_theta - np.float32(lr) * (delta.numpy() + np.float32(mu) * ref_b)
        parameter.grad = delta.clone()
        optimizer.step()
        assert theta.numpy().tobytes() == ref_theta.tobytes()
        assert momentum.numpy().tobytes() == ref_b.tobytes()
    assert torch.allclose(theta, parameter.detach(), rtol=0, atol=1e-6)


def test_a_step_leaves_its_inputs_alone():
    theta, momentum, delta = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 0.5)
    outer_step(theta, momentum, delta, lr=0.7, momentum=0.9)
    assert theta.tolist() == [1.0] * 3
    assert momentum.tolist() == [2.0] * 3
    assert delta.tolist() == [0.5] * 3


def test_steps_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(4)
    theta, momentum, delta = (torch.randn(300_000, generator=generator) for _ in range(3))
    one = outer_step(theta, momentum, delta, lr=0.7, momentum=0.9)
    torch.set_num_threads(2)
    two = outer_step(theta, momentum, delta, lr=0.7, momentum=0.9)
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def test_momentum_rises_in_a_straight_line_and_then_stays():
    assert [momentum_at(GlobalStep(step), 0.8, 4) for step in range(6)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])
    assert momentum_at(GlobalStep(0), 0.9, 0) == 0.9
