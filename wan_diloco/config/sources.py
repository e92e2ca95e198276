"""What `data.source` means, for those who only want to know where the text is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["text_path"]

_TEXT: Final = "text:"


def text_path(source: str) -> Path | None:
    """The file or folder of a `text:PATH` source; None for sources of another kind."""
    rest = source.removeprefix(_TEXT)
    if not rest or rest == source:
        return None
    try:
        return Path(rest).expanduser()
    except RuntimeError:
        # "~nobody/text": there is no such home, and so no such file.
        return Path(rest)
