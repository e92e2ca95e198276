"""The optimizer's state as named tensors, and what AdamW may and may not decay."""

from __future__ import annotations

import pytest
import torch

from wan_diloco.data import BatchReader, encode_documents
from wan_diloco.errors import CheckpointError
from wan_diloco.models import Decoder, DecoderConfig, build_decoder
from wan_diloco.training import (
    build_adamw,
    load_optimizer_tensors,
    optimizer_tensors,
    train_step,
    zero_nonfinite_moments,
)

CONFIG = DecoderConfig(dim=16, num_layers=1, num_heads=2, sequence_length=16)
READER = BatchReader(encode_documents([b"to be or not to be, " * 30]), sequence_length=16, batch_size=2, seed=1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def learner(num_steps: int) -> tuple[Decoder, torch.optim.AdamW]:
    """A model and its optimizer after some steps."""
    model = build_decoder(CONFIG, 1)
    optimizer = build_adamw(model, learning_rate=1e-2)
    for index in range(num_steps):
        train_step(model, optimizer, [READER.batch(index)])
    return model, optimizer


def test_a_copy_of_weights_and_state_trains_on_to_the_same_bits() -> None:
    donor, donor_optimizer = learner(5)
    joiner, joiner_optimizer = learner(0)
    joiner.load_state_dict(donor.state_dict())
    copies = {name: tensor.clone() for name, tensor in optimizer_tensors(donor_optimizer, donor).items()}
    load_optimizer_tensors(joiner_optimizer, joiner, copies)
    for index in range(5, 8):
        for model, optimizer in ((donor, donor_optimizer), (joiner, joiner_optimizer)):
            train_step(model, optimizer, [READER.batch(index)])
    assert all(torch.equal(tensor, joiner.state_dict()[name]) for name, tensor in donor.state_dict().items())


def test_state_has_the_same_layout_before_and_after_the_first_step() -> None:
    shapes = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in optimizer_tensors(optimizer, model).items()}
        for model, optimizer in (learner(0), learner(1))
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0]["exp_avg.layers.0.attention.wq.weight"] == (torch.Size([16, 16]), torch.float32)
    names = {name for name, _ in build_decoder(CONFIG, 1).named_parameters()}
    assert {name.split(".", 1)[1] for name in shapes[0]} == names
    assert len(shapes[0]) == 3 * len(names)


def test_state_at_zero_steps_like_torchs_own() -> None:
    model, optimizer = learner(2)
    plain = build_decoder(CONFIG, 1)
    groups = [
        {"params": [parameter for parameter in plain.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in plain.parameters() if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for index in range(2):
        train_step(plain, reference, [READER.batch(index)])
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    assert optimizer.defaults["betas"] == (0.9, 0.95)


def test_without_a_gradient_matrices_decay_and_gains_stand_still() -> None:
    model = build_decoder(CONFIG, 1)
    optimizer = build_adamw(model, learning_rate=0.1, weight_decay=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in model.state_dict().items():
        shrunk = 1.0 if tensor.dim() == 1 else 1 - 0.1 * 0.5
        torch.testing.assert_close(tensor, before[name] * shrunk)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("step.norm.weight", None, "missing"),
        ("exp_avg.elsewhere", torch.zeros(1), "unknown"),
        ("exp_avg.norm.weight", torch.zeros(3), "wants"),
        ("exp_avg.norm.weight", torch.zeros(16, dtype=torch.bfloat16), "wants"),
    ],
)
def test_state_that_does_not_fit_is_refused_whole(name: str, tensor: torch.Tensor | None, says: str) -> None:
    model, optimizer = learner(2)
    given = {key: torch.ones_like(value) for key, value in optimizer_tensors(optimizer, model).items()}
    if tensor is None:
        del given[name]
    else:
        given[name] = tensor
    before = {key: value.clone() for key, value in optimizer_tensors(optimizer, model).items()}
    with pytest.raises(CheckpointError, match=says):
        load_optimizer_tensors(optimizer, model, given)
    assert all(torch.equal(value, before[key]) for key, value in optimizer_tensors(optimizer, model).items())


def test_only_moments_that_are_not_finite_start_over() -> None:
    model, optimizer = learner(2)
    optimizer_tensors(optimizer, model)["exp_avg_sq.norm.weight"][3] = float("nan")
    assert zero_nonfinite_moments(optimizer, model) == ("norm.weight",)
    state = optimizer_tensors(optimizer, model)
    assert not any(state[f"{key}.norm.weight"].any() for key in ("step", "exp_avg", "exp_avg_sq"))
    assert float(state["step.embed.weight"]) == 2
    assert zero_nonfinite_moments(optimizer, model) == ()
