"""Bytes as tokens: a vocabulary of 256, nothing to install, and nats per token that are exact nats per byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

__all__ = ["DOCUMENT_END", "VOCAB_SIZE", "decode_tokens", "encode_documents"]

VOCAB_SIZE = 256
# Real text has no byte 0 (corpora that do are refused), so it can end a document.
DOCUMENT_END = 0


def encode_documents(documents: Iterable[bytes]) -> npt.NDArray[np.uint8]:
    """One array of tokens, each document followed by `DOCUMENT_END`.

    Args:
        documents: Without byte 0.

    Returns:
        uint8 (N,), where N is the bytes of all documents and one more for each; read-only.
    """
    end = bytes([DOCUMENT_END])
    return np.frombuffer(b"".join(part for document in documents for part in (document, end)), dtype=np.uint8)


def decode_tokens(tokens: Iterable[int]) -> str:
    """Text for a person: broken UTF-8 becomes a mark, the end of a document an empty line."""
    return bytes(tokens).replace(bytes([DOCUMENT_END]), b"\n\n").decode("utf-8", errors="replace")
