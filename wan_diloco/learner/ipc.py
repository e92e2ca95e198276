"""What the training process and its uplink tell each other, one line of JSON a message; values travel in `slots`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wan_diloco.protocol.events import (
    AllowSteps,
    BoundaryPassed,
    ExitLearner,
    InstallMoments,
    InstallUpdate,
    PinState,
    RequestSnapshot,
    SetPace,
    ShowReason,
)
from wan_diloco.units import Incarnation, LocalStep, ShardId, Term, Version

__all__ = [
    "Admitted",
    "Command",
    "CommandSink",
    "FragmentPosition",
    "InstallValue",
    "LearnerPosition",
    "Leaving",
    "TrainerMessage",
    "UplinkChanged",
    "UplinkStart",
]

_NO_TERM = Term(0)


# ---- trainer to uplink ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentPosition:
    """Where the trainer stands with one fragment.

    Attributes:
        version, resync: Of the last install.
        step_lo, tokens_lo: The learner's counters at it.
        slot: Which of the two published slots holds the installed value: the base.
    """

    version: Version
    resync: int
    step_lo: LocalStep
    tokens_lo: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPosition:
    """Where the trainer stands: what an uplink has to know to speak for it, at the first start and at any later.

    Attributes:
        incarnation: 0 before the syncer has given one.
        life_id: Of the training process; see `Hello`.
        local_step, tokens, unit: Cumulative counters.
        initial_digests: Of each fragment of the initial weights.
        has_trained: Whether this life has taken a step.
        moments_step: The global step that its inner moments are of; None while they are at zero.
        state_bytes, state_layout: Length and fingerprint of the row of its inner moments.
        shard: Of the data, which it reads; None before it was told.
        term, term_id: The highest that an uplink of this process was welcomed in, and who began it; see `Hello`.
    """

    incarnation: Incarnation
    local_step: LocalStep
    tokens: int
    unit: int
    initial_digests: tuple[str, ...]
    fragments: tuple[FragmentPosition, ...]
    has_trained: bool = False
    moments_step: int | None = None
    state_bytes: int = 0
    state_layout: str = ""
    life_id: str = ""
    shard: ShardId | None = None
    term: Term = _NO_TERM
    term_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkStart:
    """The first line that an uplink gets.

    Attributes:
        config: The resolved configuration as JSON.
        region: The learner's own.
        run_folder: Where the syncer's address is found when `syncer` is empty.
        syncer: The syncer's address, or empty.
    """

    config: str
    region: str
    run_folder: str
    syncer: str
    position: LearnerPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The trainer ends on purpose; the syncer is to be told."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkChanged:
    """The operator changed the region's cap."""

    rate_bytes_per_s: float


TrainerMessage = UplinkStart | BoundaryPassed | UplinkChanged | Leaving


# ---- uplink to trainer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The syncer took the learner in; a later uplink reconnects as this incarnation, and knows that term."""

    incarnation: Incarnation
    term: Term
    term_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallValue:
    """A published value to install at the next boundary.

    Attributes:
        install: What the machine asked for.
        slot: The published slot that holds the value.
    """

    install: InstallUpdate
    slot: int


Command = (
    Admitted
    | InstallValue
    | InstallMoments
    | RequestSnapshot
    | PinState
    | AllowSteps
    | SetPace
    | ShowReason
    | ExitLearner
)


class CommandSink(Protocol):
    """How an uplink reaches its trainer: a socket, or a list in the same process."""

    def send(self, command: Command) -> None:
        """Hand a command over, in order; never blocks."""
        ...
