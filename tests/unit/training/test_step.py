"""A step learns, repeats to the bit, doesn't care how its batch is cut, and refuses what isn't finite."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from wan_diloco.data import IGNORED_TARGET, BatchReader, encode_documents
from wan_diloco.models import Decoder, DecoderConfig, build_decoder
from wan_diloco.training import (
    StepResult,
    accumulate_gradients,
    apply_gradients,
    build_adamw,
    evaluate,
    train_step,
)

CONFIG = DecoderConfig(dim=32, num_layers=2, num_heads=2, sequence_length=32)
TOKENS = encode_documents([b"The quick brown fox jumps over the lazy dog, and the dog doesn't mind. " * 40])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def trained(num_steps: int, seed: int = 1) -> tuple[Decoder, list[StepResult]]:
    """A small model after some steps."""
    model = build_decoder(CONFIG, seed)
    optimizer = build_adamw(model, learning_rate=1e-2)
    reader = BatchReader(TOKENS, sequence_length=32, batch_size=4, seed=seed)
    return model, [train_step(model, optimizer, [reader.batch(index)]) for index in range(num_steps)]


def sha(model: nn.Module) -> str:
    """One digest of every weight."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what the model's parameters have gathered."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_a_tiny_text_is_learned() -> None:
    model, results = trained(60)
    assert results[0].loss == pytest.approx(math.log(256), abs=0.6)
    assert results[-1].loss < 1.0
    assert all(result.finite and result.tokens == 128 for result in results)
    assert evaluate(model, TOKENS, sequence_length=32) < 1.0


def test_steps_repeat_to_the_bit() -> None:
    (first, results), (second, again), (other, _) = trained(8), trained(8), trained(8, seed=2)
    assert results == again
    assert sha(first) == sha(second) != sha(other)


def test_micro_batches_of_unequal_real_tokens_make_the_gradient_of_the_big_batch() -> None:
    inputs_BT, targets_BT = BatchReader(TOKENS, sequence_length=32, batch_size=6, seed=1).batch(0)
    targets_BT = targets_BT.clone()
    targets_BT[0, 5:] = IGNORED_TARGET
    targets_BT[3] = IGNORED_TARGET
    whole, cut = build_decoder(CONFIG, 1), build_decoder(CONFIG, 1)
    loss, tokens = accumulate_gradients(whole, [(inputs_BT, targets_BT)])
    parts = list(zip(inputs_BT.split([1, 2, 3]), targets_BT.split([1, 2, 3]), strict=True))
    cut_loss, cut_tokens = accumulate_gradients(cut, parts)
    assert tokens == cut_tokens == 5 + 4 * 32
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(cut)[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_that_counts_for_nothing_adds_nothing() -> None:
    batch = BatchReader(TOKENS, sequence_length=32, batch_size=2, seed=1).batch(0)
    empty = (batch[0], torch.full_like(batch[1], IGNORED_TARGET))
    one, two = build_decoder(CONFIG, 1), build_decoder(CONFIG, 1)
    assert accumulate_gradients(one, [batch]) == accumulate_gradients(two, [empty, batch])
    assert all(torch.equal(gradient, gradients(two)[name]) for name, gradient in gradients(one).items())
    with pytest.raises(ValueError, match="at least one target"):
        accumulate_gradients(one, [empty])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_neither_weights_nor_moments(bad: float) -> None:
    model, _ = trained(2)
    optimizer = build_adamw(model, learning_rate=1e-2)
    before = sha(model)
    model.embed.weight.register_hook(lambda gradient: gradient * bad)
    batch = BatchReader(TOKENS, sequence_length=32, batch_size=2, seed=1).batch(0)
    result = train_step(model, optimizer, [batch])
    assert not result.finite
    assert not math.isfinite(result.grad_norm)
    assert sha(model) == before
    assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_is_not_finite_anywhere_in_the_region_stops_the_update_here_too() -> None:
    model, _ = trained(1)
    optimizer = build_adamw(model, learning_rate=1e-2)
    before = sha(model)
    accumulate_gradients(model, [BatchReader(TOKENS, sequence_length=32, batch_size=2, seed=1).batch(0)])
    grad_norm, finite = apply_gradients(model, optimizer, clip_norm=1.0, loss=math.nan)
    assert math.isfinite(grad_norm)
    assert not finite
    assert sha(model) == before


@pytest.mark.parametrize(("clip_norm", "moved"), [(1.0, 1.0), (0.0, 10.0), (20.0, 10.0)])
def test_the_gradient_is_clipped_to_the_norm_and_no_further(clip_norm: float, moved: float) -> None:
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    model.weight.grad = torch.tensor([[6.0], [8.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    grad_norm, finite = apply_gradients(model, optimizer, clip_norm=clip_norm, loss=1.0)
    assert (grad_norm, finite) == (10.0, True)
    assert float(model.weight.detach().norm()) == pytest.approx(moved, rel=1e-5)


def test_evaluation_is_the_mean_over_all_bytes_and_leaves_the_model_alone() -> None:
    model, _ = trained(3)
    before, was_training = sha(model), model.training
    tokens = TOKENS[:100]
    total = 0.0
    for low in range(0, 99, 32):
        window = torch.from_numpy(tokens[low : low + 33].astype(np.int64))[None]
        logits_BTV = model(window[:, :-1])
        total += float(nn.functional.cross_entropy(logits_BTV[0], window[0, 1:], reduction="sum").detach())
    for batch_size in (1, 3, 32):
        nats = evaluate(model, tokens, sequence_length=32, batch_size=batch_size)
        assert nats == pytest.approx(total / 99, rel=1e-5)
    assert evaluate(model, tokens, sequence_length=32, tokens_max=32) != pytest.approx(total / 99, rel=1e-5)
    assert (sha(model), model.training) == (before, was_training)
