"""What is said about the state that a learner takes from a peer when it comes back: its inner moments.

Part of `messages`, which says what all of them have in common. The bytes themselves travel on bulk calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wan_diloco.units import Epoch, GlobalStep, LearnerId, Term, TransferId, Version

__all__ = [
    "Donate",
    "DonationOver",
    "LearnerStateMessage",
    "MomentsSource",
    "NoDonor",
    "StateDeclined",
    "StateManifest",
    "StateOffered",
    "StateReady",
    "StateRefusal",
    "StateSettled",
    "StateWanted",
    "SyncerClock",
    "SyncerStateMessage",
]


class MomentsSource(StrEnum):
    """Where the inner moments come from that a new life begins with."""

    OWN = "own"
    PEER = "peer"
    # They begin at zero.
    NONE = "none"


class StateRefusal(StrEnum):
    """Why a learner that was asked to be a donor isn't one."""

    # It belongs to another term or epoch of the syncer.
    OTHER_CLOCK = "other_clock"
    # Its own moments aren't there yet.
    NO_MOMENTS = "no_moments"
    NON_FINITE = "non_finite"
    # What others are taking from it is too old for this one.
    BUSY = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerClock:
    """A moment in the life of a run, as the syncer counts."""

    term: Term
    epoch: Epoch
    global_step: GlobalStep

    def has_seen(self, other: SyncerClock) -> bool:
        """Whether who stands here has been there."""
        return self.is_of(other) and self.global_step >= other.global_step

    def is_of(self, other: SyncerClock) -> bool:
        """Whether both are of the same syncer's process, and of a state that didn't go back."""
        return (self.term, self.epoch) == (other.term, other.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateManifest:
    """What a donor has pinned, as of one step boundary.

    Attributes:
        global_step: Of that boundary.
        versions: The published bases that it stood on, of each fragment.
        layout: Fingerprint of names, shapes and types.
        size_bytes: Of all moments in a row.
        digest: Of that row.
    """

    global_step: GlobalStep
    versions: tuple[Version, ...]
    layout: str
    size_bytes: int
    digest: str

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        if min(self.global_step, self.size_bytes) < 0:
            raise ValueError("steps and sizes are never negative")


# ---- learner to syncer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWanted:
    """A new life asks for a donor.

    Attributes:
        failed: The transfer that broke; 0 at the first time, and after a reconnect.
        digest: Of the row of which it has a part already; empty if it has none.
    """

    failed: TransferId
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReady:
    """A donor has pinned what it was asked for, and gives it."""

    transfer: TransferId
    manifest: StateManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDeclined:
    """A learner can't be the donor that it was asked to be."""

    transfer: TransferId
    reason: StateRefusal


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettled:
    """A new life has its moments, and takes steps as soon as it has its bases.

    Attributes:
        donor: Whose they were, with `PEER`; else empty.
        global_step: As of when they are; 0 with `NONE`.
    """

    source: MomentsSource
    donor: LearnerId
    global_step: GlobalStep


LearnerStateMessage = StateWanted | StateReady | StateDeclined | StateSettled


# ---- syncer to learner ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Donate:
    """Asks a learner to pin its moments and give them to another.

    Attributes:
        clock: What the joiner was told at its Welcome or later: a donor must have seen it.
    """

    transfer: TransferId
    joiner: LearnerId
    clock: SyncerClock


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOffered:
    """A donor is ready: take its state; what was offered before is over."""

    transfer: TransferId
    donor: LearnerId
    manifest: StateManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDonor:
    """Nobody can give moments: begin with what there is."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DonationOver:
    """A transfer has come to its end, one way or another: the donor stops giving."""

    transfer: TransferId


SyncerStateMessage = Donate | StateOffered | NoDonor | DonationOver
