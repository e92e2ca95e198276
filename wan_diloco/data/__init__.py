"""From a corpus to numbered batches: documents, their split and shards, bytes as tokens, units of data."""

from __future__ import annotations

from wan_diloco.data.batches import IGNORED_TARGET, BatchReader, evaluation_batches
from wan_diloco.data.corpus import Corpus, load_corpus
from wan_diloco.data.split import ShardOrder, Split, shard_documents, split_corpus
from wan_diloco.data.tokens import DOCUMENT_END, VOCAB_SIZE, decode_tokens, encode_documents

__all__ = [
    "DOCUMENT_END",
    "IGNORED_TARGET",
    "VOCAB_SIZE",
    "BatchReader",
    "Corpus",
    "ShardOrder",
    "Split",
    "decode_tokens",
    "encode_documents",
    "evaluation_batches",
    "load_corpus",
    "shard_documents",
    "split_corpus",
]
