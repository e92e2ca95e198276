"""The decoder: the same bits from the same seed, causal, relative in position, with names to rely on."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from wan_diloco.config import ModelSettings
from wan_diloco.models import Decoder, DecoderConfig, build_decoder, generate, num_parameters

EMBEDDING_START = ["0x1.c8f0c80000000p-3", "-0x1.876b2c0000000p-3", "-0x1.57d62c0000000p-4"]
SHA = "87f1618e07328fc66527e47067912831271fb9cc830319ca652f881ab80684d4"
SMALL = DecoderConfig(dim=16, num_layers=2, num_heads=2, vocab_size=256, sequence_length=32)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tokens_BT(seed: int, batch_size: int = 2, length: int = 32) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(256, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def sha(model: Decoder) -> str:
    """One digest of every weight, by name."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (sha(build_decoder(SMALL, seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_have_the_same_bits_on_every_machine() -> None:
    # Written down once; a machine that draws other bits would start a run from another model than its peers.
    model = build_decoder(SMALL, 1)
    assert [value.hex() for value in model.embed.weight[0, :3].tolist()] == EMBEDDING_START
    assert sha(model) == SHA


def test_names_and_shapes_are_what_checkpoints_and_merge_rules_rely_on() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in build_decoder(SMALL, 1).state_dict().items()}
    block = {
        "attention_norm.weight": (16,),
        "attention.wq.weight": (16, 16),
        "attention.wk.weight": (16, 16),
        "attention.wv.weight": (16, 16),
        "attention.wo.weight": (16, 16),
        "ffn_norm.weight": (16,),
        "ffn.w_gate.weight": (48, 16),
        "ffn.w_up.weight": (48, 16),
        "ffn.w_down.weight": (16, 48),
    }
    expected = {"embed.weight": (256, 16), "norm.weight": (16,)}
    expected |= {f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in block.items()}
    assert shapes == expected


def test_an_untied_head_is_a_tensor_of_its_own() -> None:
    config = DecoderConfig(dim=16, num_layers=1, num_heads=2, tied=False)
    tied = DecoderConfig(dim=16, num_layers=1, num_heads=2, tied=True)
    model = build_decoder(config, 1)
    assert "lm_head.weight" in model.state_dict()
    assert num_parameters(model) - num_parameters(build_decoder(tied, 1)) == 256 * 16
    assert not torch.equal(model.state_dict()["lm_head.weight"], model.embed.weight)


def test_the_default_size() -> None:
    assert DecoderConfig().hidden_dim == 176
    assert num_parameters(build_decoder(DecoderConfig(), 1)) == 167_360


def test_a_fresh_model_knows_nothing() -> None:
    logits_BTV = build_decoder(DecoderConfig(), 1)(tokens_BT(1))
    loss = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT(1)[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.6)


@pytest.mark.parametrize("place", [0, 1, 15, 31])
def test_a_later_token_never_changes_an_earlier_prediction(place: int) -> None:
    model = build_decoder(SMALL, 1)
    before = tokens_BT(1)
    after = before.clone()
    after[:, place] = (after[:, place] + 1) % 256
    old_BTV, new_BTV = model(before), model(after)
    assert torch.equal(old_BTV[:, :place], new_BTV[:, :place])
    assert not torch.equal(old_BTV[:, place], new_BTV[:, place])


def test_attention_goes_by_distance_not_by_place() -> None:
    attention = build_decoder(SMALL, 1).layers[0].attention
    x_BTC = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(1))
    out_BTC = attention(x_BTC)
    q = functional.linear(x_BTC, attention.wq.weight).unflatten(-1, (2, 8))
    k = functional.linear(x_BTC, attention.wk.weight).unflatten(-1, (2, 8))
    v = functional.linear(x_BTC, attention.wv.weight).unflatten(-1, (2, 8))
    # The same by hand, as if the window began 5 places later: only differences of places may matter.
    places = torch.arange(12, dtype=torch.float64) + 5
    angle = places[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]

    def turn(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2].double(), x[..., 1::2].double()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).float()

    scores = torch.einsum("bthd,bshd->bhts", turn(q), turn(k)) / 8**0.5
    scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(-2)
    torch.testing.assert_close(out_BTC, functional.linear(mixed, attention.wo.weight), rtol=1e-4, atol=1e-5)


def test_a_model_that_was_first_evaluated_can_still_be_trained() -> None:
    # A theta of its own, so that no other test has filled the cache of rotations.
    model = build_decoder(DecoderConfig(dim=16, num_layers=1, num_heads=2, rope_theta=4321.0), 1)
    with torch.inference_mode():
        model(tokens_BT(1))
    model(tokens_BT(1)).sum().backward()
    assert model.embed.weight.grad is not None


@pytest.mark.parametrize(
    "sizes",
    [
        {"dim": 30, "num_heads": 4},
        {"dim": 12, "num_heads": 4},
        {"num_layers": 0},
        {"hidden_dim": -1},
        {"vocab_size": 0},
    ],
)
def test_sizes_that_cannot_be_built_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        DecoderConfig(**sizes)


def test_text_depends_on_the_seed_and_on_nothing_else() -> None:
    model = build_decoder(SMALL, 1)
    texts = [generate(model, b"The", 40, temperature=1.0, seed=seed) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 40


def test_at_temperature_zero_the_likeliest_byte_is_taken() -> None:
    model = build_decoder(SMALL, 1)
    text = generate(model, b"The", 2, temperature=0.0, seed=1)
    for end in (0, 1):
        logits_V = model(torch.tensor([list(b"The" + text[:end])]))[0, -1]
        assert text[end] == int(logits_V.argmax())


@pytest.mark.parametrize(("prompt", "temperature", "says"), [(b"", 1.0, "empty prompt"), (b"a", -1.0, "temperature")])
def test_what_cannot_be_continued_is_refused(prompt: bytes, temperature: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        generate(build_decoder(SMALL, 1), prompt, 1, temperature=temperature, seed=1)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3).map(lambda heads: 4 * heads),
    st.integers(1, 3),
    st.integers(2, 40),
    st.integers(0, 20),
    st.booleans(),
)
def test_the_configuration_knows_the_size_of_the_model(
    dim: int, layers: int, vocab: int, hidden: int, tied: bool
) -> None:
    written = ModelSettings(dim=dim, heads=2, layers=layers, vocab=vocab, hidden=hidden, tied=tied)
    config = DecoderConfig(
        dim=dim, num_heads=2, num_layers=layers, vocab_size=vocab, hidden_dim=written.hidden, tied=tied
    )
    assert written.num_parameters == num_parameters(Decoder(config))
