"""The one reader of this process's environment variables.

Everything else takes a mapping, so that tests and the supervisor decide what a configuration sees.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEBUG_VARIABLE", "PREFIX", "process_environment", "quiet_grpc"]

PREFIX: Final = "WAN_DILOCO_"
DEBUG_VARIABLE: Final = "WAN_DILOCO_DEBUG"
"""`1` shows tracebacks; it is no setting of a run."""
_GRPC_VERBOSITY: Final = "GRPC_VERBOSITY"


def process_environment() -> Mapping[str, str]:
    """A copy of the environment as it is now."""
    return dict(os.environ)


def quiet_grpc() -> None:
    """Have gRPC's core, which writes lines of its own to stderr, leave it to us to say what went wrong with a peer.

    Ordering: before gRPC is imported. Processes that this one starts inherit it; what the user has set stands.
    """
    os.environ.setdefault(_GRPC_VERBOSITY, "NONE")
