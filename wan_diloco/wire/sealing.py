"""Each message ends with a checksum of itself: links flip bits that TCP's own sum lets through.

A Hello with one of them names another layout, and would be refused for good; a pull names a round that nobody holds.
Bulk has a checksum in each frame, see `frames`.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from wan_diloco.errors import DecodeError

__all__ = ["SEAL_BYTES", "is_sealed", "seal"]

# The field `checksum` of proto/ as it lies at a message's end: fixed32, number 15.
_SEAL: Final = struct.Struct("<BI")
_TAG: Final = 15 << 3 | 5
SEAL_BYTES: Final = _SEAL.size


def seal(body: bytes) -> bytes:
    """A message with its checksum.

    Args:
        body: The protobuf's bytes, which lack that field.
    """
    return body + _SEAL.pack(_TAG, _checksum(body))


def is_sealed(data: bytes) -> bool:
    """Whether a message ends with its checksum; without one it may be of a peer that is older than checksums.

    Raises:
        DecodeError: It ends with one, and that is of other bytes.
    """
    body_bytes = len(data) - SEAL_BYTES
    if body_bytes < 0:
        return False
    tag, checksum = _SEAL.unpack_from(data, body_bytes)
    if tag != _TAG:
        return False
    if checksum != _checksum(memoryview(data)[:body_bytes]):
        raise DecodeError("bad_checksum", "bits were flipped on the way")
    return True


def _checksum(body: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF
