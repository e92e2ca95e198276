"""Fragments as bytes: f32, bf16, int8, int4, e3m0."""

from wan_diloco.algorithm.codec.base import Codec, Payload, PayloadSizes, PayloadSource
from wan_diloco.algorithm.codec.registry import CODEC_NAMES, codec_by_name

__all__ = ["CODEC_NAMES", "Codec", "Payload", "PayloadSizes", "PayloadSource", "codec_by_name"]
