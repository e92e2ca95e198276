"""Documents go to exactly one place each, and everybody computes the same places."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.data import Corpus, shard_documents, split_corpus
from wan_diloco.data.split import ShardOrder, cut_document
from wan_diloco.errors import DataError

ORDERS = st.sampled_from(["iid", "era"])


def numbered(count: int) -> tuple[bytes, ...]:
    """Distinct documents of equal size."""
    return tuple(b"%06d" % index for index in range(count))


@given(count=st.integers(min_value=100, max_value=400))
def test_every_document_is_in_exactly_one_part_and_held_out_by_its_number(count: int) -> None:
    documents = numbered(count)
    split = split_corpus(Corpus(name="n", documents=documents))
    assert Counter(split.training + split.validation + split.test) == Counter(documents)
    assert split.validation == documents[10::20]
    assert split.test == documents[::20]


@given(count=st.integers(min_value=60, max_value=300), num_shards=st.integers(min_value=1, max_value=16), order=ORDERS)
def test_shards_are_disjoint_and_complete(count: int, num_shards: int, order: ShardOrder) -> None:
    documents = numbered(count)
    shards = shard_documents(documents, num_shards, order)
    assert len(shards) == num_shards
    assert Counter(document for shard in shards for document in shard) == Counter(documents)
    sizes = [sum(map(len, shard)) for shard in shards]
    assert max(sizes) - min(sizes) <= 2 * len(documents[0])


@given(sizes=st.lists(st.integers(min_value=1, max_value=50), min_size=40, max_size=120))
def test_eras_are_contiguous_and_balanced_by_bytes(sizes: list[int]) -> None:
    documents = [bytes([65 + index % 26]) * size for index, size in enumerate(sizes)]
    shards = shard_documents(documents, 3, "era")
    assert [document for shard in shards for document in shard] == documents
    for shard in shards:
        assert abs(sum(map(len, shard)) - sum(sizes) / 3) <= max(sizes)


def test_iid_shards_deal_documents_out_in_turn() -> None:
    assert shard_documents(numbered(5), 2, "iid") == ((b"000000", b"000002", b"000004"), (b"000001", b"000003"))


@given(order=ORDERS)
def test_more_shards_than_documents_is_refused_with_the_numbers(order: ShardOrder) -> None:
    with pytest.raises(DataError, match=r"too small for its shards: 3 training documents don't fill 5"):
        shard_documents(numbered(3), 5, order)


@given(
    document=st.lists(st.sampled_from([b"a", b"word ", b"\n", b"\n\n", b"x" * 40]), max_size=80).map(b"".join),
    size_bytes=st.integers(min_value=1, max_value=60),
)
def test_pieces_join_to_the_document_and_have_about_the_size(document: bytes, size_bytes: int) -> None:
    pieces = cut_document(document, size_bytes)
    assert b"".join(pieces) == document
    assert all(size_bytes <= len(piece) <= 2 * size_bytes for piece in pieces[:-1])
    assert all(0 < len(piece) <= 2 * size_bytes for piece in pieces[-1:])


def test_a_document_is_cut_at_paragraphs_else_lines_else_anywhere() -> None:
    assert cut_document(b"aaaaa\nb\n\ncccccccccc", 5) == (b"aaaaa\nb\n\n", b"cccccccccc")
    assert cut_document(b"aaaaa\nbbbbbbb", 4) == (b"aaaaa\n", b"bbbbbbb")
    assert cut_document(b"cccccccccc", 4) == (b"cccc", b"cccccc")


def test_one_file_is_cut_into_enough_pieces_for_many_regions() -> None:
    text = b"".join(b"Paragraph %d says a few words of its own.\n\n" % index for index in range(20_000))
    corpus = Corpus(name="book", documents=(text,))
    split = split_corpus(corpus)
    assert split == split_corpus(corpus)
    assert len(split.training) > 200
    assert len(split.validation) >= 10
    assert all(piece.endswith(b"\n\n") for piece in split.training)
    assert len(shard_documents(split.training, 8, "iid")) == 8


def test_a_corpus_too_small_to_hold_anything_out_is_refused_with_its_size() -> None:
    with pytest.raises(DataError, match=r"too small: 3000 bytes make \d+ documents") as caught:
        split_corpus(Corpus(name="note", documents=(b"x" * 3000,)))
    assert "at least" in caught.value.hint
