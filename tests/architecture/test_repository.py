"""What no file of the repository may hold: paths of one machine, and talk about how the text came to be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import REPOSITORY

NOT_OURS = {".git", ".venv", "__pycache__", "runs", "build", "dist", "htmlcov"}

# Each holds a one-letter class, so that this file may be searched too.
FORBIDDEN = [
    r"/wor[k]/",
    r"/roo[t]/",
    r"/hom[e]/\w",
    r"\bsub-?agen[t]s?\b",
    r"\bclaud[e]\b",
    r"\bdesig[n]\.md\b",
    r"\bguard[s]\.md\b",
    r"\bmeasure[d]\.md\b",
    r"\bTOD[O]\b",
    r"\bFIXM[E]\b",
    r"\bextra-index-ur[l]\b",
]
PATTERN = re.compile("|".join(FORBIDDEN), re.IGNORECASE)


def files(root: Path) -> Iterator[Path]:
    """Everything that is, or may be, under version control."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in NOT_OURS and not re.fullmatch(r"\..*_cache|\.hypothesis", name)
        )
        yield from (Path(folder) / name for name in sorted(names) if not name.startswith(".coverage"))


def found_in(text: str) -> list[str]:
    return [match[0] for match in PATTERN.finditer(text)]


@pytest.mark.parametrize(
    "text",
    ["see /{}/main".format("work"), "cd /{}/x".format("root"), "# {}DO: later".format("TO"), "{}.md".format("design")],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert found_in(text)


def test_no_file_speaks_of_one_machine_or_of_its_making() -> None:
    found = {
        str(path.relative_to(REPOSITORY)): words
        for path in files(REPOSITORY)
        if (words := found_in(path.read_bytes().decode("utf-8", errors="ignore")))
    }
    assert found == {}


def test_every_text_file_ends_in_a_newline() -> None:
    suffixes = {".py", ".md", ".toml", ".proto", ".pyi", ".yaml", ".yml", ".txt"}
    texts = [path for path in files(REPOSITORY) if path.suffix in suffixes and path.stat().st_size]
    assert [str(path) for path in texts if not path.read_bytes().endswith(b"\n")] == []
