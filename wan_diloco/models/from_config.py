"""From a configuration to the run's model and its fragments: the same at the syncer, in every region, everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from wan_diloco.algorithm.layout import MergeRule, build_layout
from wan_diloco.algorithm.parameters import tensor_specs, unique_parameters
from wan_diloco.models.decoder import Decoder, DecoderConfig, build_decoder

if TYPE_CHECKING:
    from wan_diloco.algorithm.layout import Layout
    from wan_diloco.config import RunConfig

__all__ = ["build_model", "decoder_config", "model_tensors", "run_layout"]


def decoder_config(config: RunConfig) -> DecoderConfig:
    """The shape of the run's model."""
    model = config.model
    return DecoderConfig(
        dim=model.dim,
        num_layers=model.layers,
        num_heads=model.heads,
        vocab_size=model.vocab,
        hidden_dim=model.hidden,
        tied=model.tied,
        rope_theta=model.rope_theta,
        sequence_length=model.sequence_length,
    )


def build_model(config: RunConfig) -> Decoder:
    """The model with its initial weights: the same bits on every machine."""
    return build_decoder(decoder_config(config), config.run.seed)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's trainable tensors by their canonical names; they share the model's memory."""
    return {name: parameter.detach() for name, parameter in unique_parameters(model)}


def run_layout(config: RunConfig, *, fragments: int = 0) -> Layout:
    """The fragments of the run's model; no weights are made for it.

    Args:
        config: The run's.
        fragments: How many are asked for; 0 for what the configuration says.
    """
    with torch.device("meta"), _WithoutValues():
        model = Decoder(decoder_config(config))
    return build_layout(
        tensor_specs(unique_parameters(model, allow_meta=True)),
        num_fragments=fragments or config.sync.fragments,
        merge=MergeRule(config.outer.merge),
        # The configuration says "whose name contains"; the layout takes shell patterns.
        mean_patterns=tuple(f"*{part}*" for part in config.outer.mean_patterns),
    )


class _WithoutValues(TorchFunctionMode):
    """Draws no numbers for tensors that hold none: torch would import its compiler for that, which takes seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.nn.init.normal_:
            return args[0] if args else given["tensor"]
        return func(*args, **given)
