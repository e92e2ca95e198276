"""The one reader of this process's environment variables.

Everything else takes a mapping, so that tests and the supervisor decide what a configuration sees.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEBUG_VARIABLE", "PREFIX", "process_environment"]

PREFIX: Final = "WAN_DILOCO_"
DEBUG_VARIABLE: Final = "WAN_DILOCO_DEBUG"
"""`1` shows tracebacks; it is no setting of a run."""


def process_environment() -> Mapping[str, str]:
    """A copy of the environment as it is now."""
    return dict(os.environ)
