"""The words with which this program was started, to be typed again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["invocation", "resume_command"]

_PACKAGE = "wan_diloco"


def invocation(words: Sequence[str], program: str, search_path: str | None) -> list[str]:
    """What starts this program the way it was started.

    Args:
        words: The whole command line, the interpreter first (`sys.orig_argv`).
        program: The script that runs (`sys.argv[0]`).
        search_path: Of the shell ($PATH).
    """
    if Path(program).name == "__main__.py":
        # python -m wan_diloco
        place = next(
            (index for index, word in enumerate(words[:-1]) if (word, words[index + 1]) == ("-m", _PACKAGE)), 0
        )
        return list(words[: place + 2]) if place else [words[0], "-m", _PACKAGE]
    found = shutil.which(Path(program).name, path=search_path)
    on_path = found is not None and os.path.realpath(found) == os.path.realpath(program)
    return [Path(program).name if on_path else program]


def resume_command(
    files: Sequence[Path],
    overrides: Sequence[str] | None,
    run_folder: Path | None,
    *,
    as_json: bool,
    refragment: bool = False,
) -> str:
    """What to type to go on with a run that this process was started for with these arguments."""
    from wan_diloco.config import process_environment

    words = invocation(sys.orig_argv, sys.argv[0], process_environment().get("PATH"))
    words += ["run", *map(str, files)]
    for override in overrides or ():
        words += ["--set", override]
    if run_folder is not None:
        words += ["--run-folder", str(run_folder)]
    if as_json:
        words.append("--json")
    if refragment:
        words.append("--refragment")
    return shlex.join([*words, "--resume"])
