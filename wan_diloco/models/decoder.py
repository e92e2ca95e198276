"""A small decoder-only transformer: RMSNorm before, rotary positions, causal attention, SwiGLU, no biases.

Shapes in names: B batch, T time, C model width (`dim`), H heads, D head width, F feed-forward width, V vocabulary.

Plain torch modules, so that DDP, FSDP2 and the fragment layout all see the same thing: one tensor a projection (RDA
takes norms per tensor), one name a tensor, and no buffers (nothing to broadcast, nothing left behind on meta).
This module must not read data, take steps, or draw from torch's global generator.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Decoder", "DecoderConfig", "build_decoder", "num_parameters"]

# Feed-forward widths are rounded up to this, which keeps rows whole vectors on every CPU of today.
_HIDDEN_MULTIPLE = 16
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What a decoder is made of.

    Attributes:
        dim: Model width; a multiple of `2 * num_heads`.
        num_layers: Blocks of attention and feed-forward.
        num_heads: Attention heads.
        vocab_size: Tokens known.
        hidden_dim: Feed-forward width; 0 takes 8/3 of `dim`, rounded up, which costs what a plain 4x one does.
        tied: Whether the output head is the embedding itself.
        rope_theta: Base of the rotary wavelengths.
        sequence_length: The most tokens that the model is meant to see at once.
    """

    dim: int = 64
    num_layers: int = 3
    num_heads: int = 4
    vocab_size: int = 256
    hidden_dim: int = 0
    tied: bool = True
    rope_theta: float = 10_000.0
    sequence_length: int = 128

    def __post_init__(self) -> None:
        """Refuse sizes that can't be built, and settle the feed-forward width."""
        for name in ("dim", "num_layers", "num_heads", "vocab_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden_dim < 0:
            raise ValueError(f"hidden_dim must be 0 (automatic) or more, not {self.hidden_dim}")
        if self.dim % (2 * self.num_heads):
            # Rotary positions turn pairs of values, so a head's width is even.
            raise ValueError(f"dim {self.dim} isn't a multiple of twice the {self.num_heads} heads")
        if self.hidden_dim == 0:
            width = math.ceil(8 * self.dim / 3 / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE
            object.__setattr__(self, "hidden_dim", width)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads


@functools.lru_cache(maxsize=32)
def _rotations(length: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Unit complex numbers (T, 1, D/2) by which positions turn pairs; from f64, cached, never part of a state."""
    # An evaluation may be the first to ask; a tensor born in its inference mode would break the training after it.
    with torch.inference_mode(mode=False):
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * theta**-exponent
        return torch.polar(torch.ones_like(angle), angle).to(device, torch.complex64).unsqueeze(1)


def _rotate(x_BTHD: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    # One complex product forward and one backward: 2.5 times faster on a CPU than halves, cat and two products.
    pairs = torch.view_as_complex(x_BTHD.float().reshape(*x_BTHD.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x_BTHD)


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        heads = (-1, self.head_dim)
        rotations = _rotations(x_BTC.shape[1], self.head_dim, self.rope_theta, x_BTC.device)
        q_BHTD = _rotate(self.wq(x_BTC).unflatten(-1, heads), rotations).transpose(1, 2)
        k_BHTD = _rotate(self.wk(x_BTC).unflatten(-1, heads), rotations).transpose(1, 2)
        v_BHTD = self.wv(x_BTC).unflatten(-1, heads).transpose(1, 2)
        out_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        out_BTC: torch.Tensor = self.wo(out_BHTD.transpose(1, 2).flatten(-2))
        return out_BTC


class _FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w_up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w_down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        hidden_BTF = functional.silu(self.w_gate(x_BTC)) * self.w_up(x_BTC)
        out_BTC: torch.Tensor = self.w_down(hidden_BTF)
        return out_BTC


class _Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=_NORM_EPS)
        self.attention = _Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=_NORM_EPS)
        self.ffn = _FeedForward(config)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        out_BTC: torch.Tensor = x_BTC + self.ffn(self.ffn_norm(x_BTC))
        return out_BTC


class Decoder(nn.Module):
    """The language model; call it with token ids, get logits for the token after each.

    Its weights are torch's own, from the global generator, until `init_weights`: use `build_decoder`.

    Args:
        config: What to build.
    """

    def __init__(self, config: DecoderConfig) -> None:
        """Lay the modules out."""
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=_NORM_EPS)
        self.lm_head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) for the token that follows each position.

        Args:
            tokens_BT: Token ids, int64; position t sees positions 0..t only.
        """
        x_BTC = self.embed(tokens_BT)
        for block in self.layers:
            x_BTC = block(x_BTC)
        head = self.embed if self.lm_head is None else self.lm_head
        return functional.linear(self.norm(x_BTC), head.weight)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw every weight anew, in the order of the names.

        Uniform, not normal, of the wanted deviation: 24 random bits times a constant has the same bits on every
        CPU, whereas the logarithm and cosine of a normal variate depend on its vector width.

        Args:
            generator: A CPU generator; the only source of chance.
        """
        for name, std in self._deviations():
            parameter = self.get_parameter(name)
            if std == 0:
                parameter.fill_(1.0)
                continue
            values = torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(2 * math.sqrt(3.0) * std)
            parameter.copy_(values)

    def _deviations(self) -> Iterator[tuple[str, float]]:
        """Each parameter's name and initial deviation; 0 stands for the constant 1 of a norm."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                yield name, 0.0
            elif name.endswith(("wo.weight", "w_down.weight")):
                # What writes into the residual stream shrinks with the number of writers, which keeps its size.
                yield name, parameter.shape[1] ** -0.5 / math.sqrt(2 * self.config.num_layers)
            else:
                # Embeddings too: a small tied model that starts at the usual 0.02 is 0.07 nats/byte behind after 2.5M.
                yield name, parameter.shape[1] ** -0.5


def build_decoder(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder with fresh weights, on the CPU in f32: the same bits for the same arguments, every time.

    Args:
        config: What to build.
        seed: The only source of chance.
    """
    # Modules initialise themselves from the global generator, which isn't ours to move. (Building on meta would avoid
    # it too, at the price of 2 seconds of imports.)
    with torch.random.fork_rng(devices=[]):
        model = Decoder(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def num_parameters(model: nn.Module) -> int:
    """How many trainable numbers a model has; a tied tensor counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
