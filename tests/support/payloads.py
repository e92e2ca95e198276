"""Payloads in the journal, as tests look at them."""

from __future__ import annotations

import numpy as np

from wan_diloco.algorithm.codec import Payload
from wan_diloco.syncer.payloads import StoredPayload

__all__ = ["whole_payload"]


def whole_payload(stored: StoredPayload) -> Payload:
    """All of it at once, in memory of its own."""
    codes = np.empty(stored.sizes.codes_bytes, dtype=np.uint8)
    stored.codes_into(0, codes)
    return Payload(codes=codes, scales=stored.scales())
