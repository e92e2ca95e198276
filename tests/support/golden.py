"""Golden files: what was right once, kept to be compared with."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["Golden"]

HOW_TO_UPDATE = "run pytest with --update-golden, and read the diff before you commit it"


class Golden:
    """Compares with files in one folder, or writes them.

    Args:
        folder: Where the files are.
        update: Write instead of comparing.
    """

    def __init__(self, folder: Path, *, update: bool) -> None:
        self._folder = folder
        self._update = update

    def check(self, name: str, text: str) -> None:
        """Fail when the text isn't what the file holds, to the character."""
        path = self._folder / name
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} doesn't exist: {HOW_TO_UPDATE}"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: {HOW_TO_UPDATE}"

    def check_json(self, name: str, value: object) -> None:
        """The same for a value, written as JSON that is easy to compare by eye."""
        self.check(name, json.dumps(value, indent=2, sort_keys=True) + "\n")
