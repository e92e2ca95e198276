"""Every error that the package raises on purpose, in one tree.

Whoever catches `WanDilocoError` catches what a user or a peer can cause; our own bugs raise
`AssertionError` and the like, and are not caught anywhere below the command line.

An error knows the exit code of a process that ends because of it (sysexits.h, documented in
`docs/reference/exit-codes.md`): supervisors and schedulers decide by the code whether to restart.
This module imports nothing, so that it can't be part of an import cycle.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "EXIT_AUTH",
    "EXIT_CONFIG",
    "EXIT_INTERNAL",
    "EXIT_OK",
    "EXIT_SIGINT",
    "EXIT_SIGTERM",
    "EXIT_TEMPORARY",
    "EXIT_UNAVAILABLE",
    "EXIT_USAGE",
    "AuthError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeadlineExceeded",
    "DecodeError",
    "JournalError",
    "LayoutMismatch",
    "LocalProtocolError",
    "NonFiniteError",
    "PeerUnavailable",
    "ProtocolError",
    "RemoteProtocolError",
    "StateDamaged",
    "StateTakenOver",
    "StorageError",
    "StorageLocked",
    "StorageUnusable",
    "StoreError",
    "StoreMissing",
    "TransportError",
    "UnitError",
    "UsageError",
    "WanDilocoError",
]

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_TEMPORARY = 75
EXIT_AUTH = 77
EXIT_CONFIG = 78
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class WanDilocoError(Exception):
    """Root of the tree; `str(error)` is one clear sentence for a person."""

    exit_code: ClassVar[int] = EXIT_INTERNAL


class UsageError(WanDilocoError):
    """A command was called with words that make no sense together."""

    exit_code = EXIT_USAGE


class ConfigError(WanDilocoError):
    """A configuration, or a file or folder that it names, can't be used.

    Args:
        problem: What is wrong, one sentence without a full stop.
        where: The key ("sync.quorum") or the path that it is about; empty when neither fits.
        hint: The nearest right name, or what to do; empty when there is none.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, problem: str, *, where: str = "", hint: str = "") -> None:
        """Join the three parts into one sentence."""
        self.problem = problem
        self.where = where
        self.hint = hint
        text = f"{where}: {problem}" if where else problem
        super().__init__(f"{text} ({hint})" if hint else text)


class UnitError(ConfigError):
    """A rate, size, duration or count isn't written in a form that `units` knows."""


class DataError(ConfigError):
    """A corpus is missing, empty, or too small for what is asked of it."""


class ProtocolError(WanDilocoError):
    """Abstract: somebody broke the protocol. Raise one of the two below, which say whose fault it is."""

    def __init__(self, *args: object) -> None:
        """Refuse to be raised directly."""
        if type(self) is ProtocolError:
            raise TypeError("ProtocolError is abstract: raise LocalProtocolError or RemoteProtocolError")
        super().__init__(*args)


class LocalProtocolError(ProtocolError):
    """We tried something that the protocol forbids: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol forbids.

    Args:
        reason: A short stable code ("wrong_length"), fit for a metric's label.
        detail: One sentence for a person.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        """Keep the stable reason beside the text."""
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


class LayoutMismatch(RemoteProtocolError):
    """Two ends don't agree about names, shapes, dtypes, fragments or merge rules."""

    exit_code = EXIT_CONFIG


class DecodeError(RemoteProtocolError):
    """Bytes from outside don't decode to what they claim to be."""


class NonFiniteError(RemoteProtocolError):
    """A value that must be finite is NaN or infinite."""

    def __init__(self, detail: str = "") -> None:
        """The reason is always `non_finite`."""
        super().__init__("non_finite", detail)


class TransportError(WanDilocoError):
    """A connection failed; gRPC's own codes don't leave `transport/`."""

    exit_code = EXIT_TEMPORARY


class PeerUnavailable(TransportError):
    """Nobody answers at that address."""

    exit_code = EXIT_UNAVAILABLE


class AuthError(TransportError):
    """The peer refuses who we are, or we refuse who it is; a fenced incarnation included."""

    exit_code = EXIT_AUTH


class DeadlineExceeded(TransportError):
    """The peer took longer than the deadline."""


class StorageError(WanDilocoError):
    """Something durable can't be read or written."""

    exit_code = EXIT_TEMPORARY


class StorageLocked(StorageError):
    """Another process owns this folder."""

    exit_code = EXIT_CONFIG


class StorageUnusable(StorageError):
    """A path can't be used for what it is needed for, and waiting doesn't change it: a folder in a file's place."""

    exit_code = EXIT_CONFIG


class JournalError(StorageError):
    """The journal is damaged somewhere else than at its torn tail."""


class CheckpointError(StorageError):
    """A snapshot or checkpoint is missing, incomplete or doesn't match its digests."""


class StateDamaged(StorageError):
    """A run can't be taken up from what is on the disk, and won't be the next time either."""

    exit_code = EXIT_CONFIG


class StateTakenOver(StorageError):
    """Another process has taken a run's state over, and may write it; we may not any more."""

    exit_code = EXIT_AUTH


class StoreError(StorageError):
    """An object store can't be reached, or refuses; what is on the disk isn't touched by it."""


class StoreMissing(StoreError):
    """An object store isn't there at all: its bucket doesn't exist, and nobody but its owner will make it."""

    exit_code = EXIT_CONFIG
