"""Codecs by the name that configuration and headers know them by."""

from __future__ import annotations

from typing import Final

from wan_diloco.algorithm.codec.base import Codec
from wan_diloco.algorithm.codec.blockwise import E3m0Codec, Int4Codec, Int8Codec
from wan_diloco.algorithm.codec.plain import Bf16Codec, F32Codec
from wan_diloco.errors import ConfigError

__all__ = ["CODEC_NAMES", "codec_by_name"]

_CODECS: Final[dict[str, Codec]] = {
    codec.name: codec for codec in (F32Codec(), Bf16Codec(), Int8Codec(), Int4Codec(), E3m0Codec())
}
CODEC_NAMES: Final = tuple(_CODECS)


def codec_by_name(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _CODECS:
        raise ConfigError(f"there is no codec {name!r}", where="wire.codec", hint=f"one of {', '.join(CODEC_NAMES)}")
    return _CODECS[name]
