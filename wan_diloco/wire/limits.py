"""How much a peer may say at most; whatever is longer is refused before it is looked at."""

from __future__ import annotations

from typing import Final

__all__ = [
    "COUNT_MAX",
    "FRAGMENTS_MAX",
    "LAYOUT_LINES_MAX",
    "MERGED_MAX",
    "MESSAGE_BYTES_MAX",
    "NAME_CHARS_MAX",
    "SEGMENTS_MAX",
    "SETTINGS_MAX",
    "TEXT_CHARS_MAX",
]

# gRPC's own default; we state it, so that nobody raises it by accident.
MESSAGE_BYTES_MAX: Final = 4 * 2**20
# Counters are 64 bit on the wire, and signed wherever they end up.
COUNT_MAX: Final = 2**63 - 1
FRAGMENTS_MAX: Final = 65_536
LAYOUT_LINES_MAX: Final = 65_536
SETTINGS_MAX: Final = 1_024
SEGMENTS_MAX: Final = 256
MERGED_MAX: Final = 4_096
# Identifiers, codecs, digests.
NAME_CHARS_MAX: Final = 256
# Reasons, lines of a layout, values of settings.
TEXT_CHARS_MAX: Final = 16_384
