"""A small text in which there is something to learn."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_text_corpus"]

_WORDS = ("the", "of", "and", "to", "in", "that", "we", "our", "for", "is", "it", "this", "with", "as", "by", "have")


def write_text_corpus(path: Path, num_lines: int = 600) -> Path:
    """Write about 50 bytes a line."""
    lines = [" ".join(_WORDS[(i * 7 + j * j) % len(_WORDS)] for j in range(12)) for i in range(num_lines)]
    path.write_text("".join(f"{line}.\n\n" if i % 5 == 0 else f"{line},\n" for i, line in enumerate(lines)))
    return path
