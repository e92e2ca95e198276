"""Small reference models, and sampling from them."""

from __future__ import annotations

from wan_diloco.models.decoder import Decoder, DecoderConfig, build_decoder, num_parameters
from wan_diloco.models.from_config import build_model, decoder_config, model_tensors, run_layout
from wan_diloco.models.sample import generate

__all__ = [
    "Decoder",
    "DecoderConfig",
    "build_decoder",
    "build_model",
    "decoder_config",
    "generate",
    "model_tensors",
    "num_parameters",
    "run_layout",
]
