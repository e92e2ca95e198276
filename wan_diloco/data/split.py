"""Who gets which document: training shards for the regions, validation, and a test set kept for final figures.

Everything is decided per document, before any window is cut, so that no window of a held-out document was trained
on. All of it is a pure function of the corpus and the arguments: every region computes the same answer by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from wan_diloco.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wan_diloco.data.corpus import Corpus

__all__ = ["ShardOrder", "Split", "cut_document", "shard_documents", "split_corpus"]

ShardOrder = Literal["iid", "era"]

# Every 20th document is held out for validation, and every 20th, half way between, for the test.
_HOLDOUT_EVERY = 20
_TEST_RESIDUE = 0
_VALIDATION_RESIDUE = 10
# Below five documents held out a validation figure hangs on single authors: cut documents up instead.
_DOCUMENTS_MIN = 100
# What a corpus that has to be cut is cut into: enough to spread over many regions.
_PIECES = 400
_PIECE_BYTES_MIN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A corpus, divided by document; the order of the corpus is kept in each part.

    Attributes:
        training: What regions may train on.
        validation: For curves and comparisons while one works.
        test: For final figures only.
    """

    training: tuple[bytes, ...]
    validation: tuple[bytes, ...]
    test: tuple[bytes, ...]


def split_corpus(corpus: Corpus) -> Split:
    """Divide a corpus into training, validation and test documents.

    A corpus of few documents is first cut into some hundred pieces, at the ends of paragraphs where it has any.

    Args:
        corpus: What to divide.

    Raises:
        DataError: The corpus is too small to be divided.
    """
    documents = corpus.documents
    if len(documents) < _DOCUMENTS_MIN:
        size_bytes = max(_PIECE_BYTES_MIN, corpus.size_bytes // _PIECES)
        documents = tuple(piece for document in documents for piece in cut_document(document, size_bytes))
    if len(documents) <= _HOLDOUT_EVERY:
        raise DataError(
            f"the corpus {corpus.name!r} is too small: {corpus.size_bytes} bytes make {len(documents)} documents, "
            f"more than {_HOLDOUT_EVERY} are needed to hold some out",
            where="data.source",
            hint=f"use a text of at least {_PIECE_BYTES_MIN * 2 * _HOLDOUT_EVERY} bytes",
        )
    parts: dict[str, list[bytes]] = {"training": [], "validation": [], "test": []}
    for index, document in enumerate(documents):
        residue = index % _HOLDOUT_EVERY
        part = {_TEST_RESIDUE: "test", _VALIDATION_RESIDUE: "validation"}.get(residue, "training")
        parts[part].append(document)
    return Split(training=tuple(parts["training"]), validation=tuple(parts["validation"]), test=tuple(parts["test"]))


def cut_document(document: bytes, size_bytes: int) -> tuple[bytes, ...]:
    """Cut a document into pieces of at least about `size_bytes`, which joined give the document again.

    Cuts at the first end of a paragraph after that size; where none comes within as much again, at the end of a line;
    where none comes either, anywhere.

    Args:
        document: Any bytes.
        size_bytes: The least size of a piece, but for the last; at least 1.
    """
    pieces = []
    start = 0
    while len(document) - start > 2 * size_bytes:
        low, high = start + size_bytes, start + 2 * size_bytes
        for mark in (b"\n\n", b"\n"):
            found = document.find(mark, low, high)
            if found >= 0:
                end = found + len(mark)
                break
        else:
            end = low
        pieces.append(document[start:end])
        start = end
    if start < len(document):
        pieces.append(document[start:])
    return tuple(pieces)


def shard_documents(documents: Sequence[bytes], num_shards: int, order: ShardOrder) -> tuple[tuple[bytes, ...], ...]:
    """Divide training documents among regions: each document goes to exactly one.

    Args:
        documents: In the order of the corpus.
        num_shards: Regions; at least 1.
        order: "iid" deals them out in turn, so that all shards are alike; "era" gives each region one contiguous
            stretch of about equal bytes, so that regions see different text.

    Returns:
        One tuple of documents a region, in the order of the regions.

    Raises:
        DataError: Some shard would get no document.
    """
    if order == "iid":
        shards = [list(documents[index::num_shards]) for index in range(num_shards)]
    else:
        shards = [[] for _ in range(num_shards)]
        total_bytes = sum(map(len, documents))
        before_bytes = 0
        for document in documents:
            # A document belongs where its middle lies.
            middle_twice = 2 * before_bytes + len(document)
            shards[min(num_shards - 1, middle_twice * num_shards // (2 * total_bytes))].append(document)
            before_bytes += len(document)
    empty = [index for index, shard in enumerate(shards) if not shard]
    if empty:
        raise DataError(
            f"the corpus is too small for its shards: {len(documents)} training documents don't fill {num_shards} "
            f"{order} shards, {len(empty)} would be empty",
            where="data.source",
            hint="use fewer regions or more text",
        )
    return tuple(map(tuple, shards))
