"""Small reference models, and sampling from them."""

from __future__ import annotations

from wan_diloco.models.decoder import Decoder, DecoderConfig, build_decoder, num_parameters
from wan_diloco.models.sample import generate

__all__ = ["Decoder", "DecoderConfig", "build_decoder", "generate", "num_parameters"]
