"""What goes in and out of the learner's machine about inner moments: those it gives to a peer, those it takes.

Part of `learner_events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_diloco.protocol.rejoin_messages import StateOffered
from wan_diloco.units import GlobalStep, LearnerId, TransferId

__all__ = [
    "DescribeState",
    "EndGiving",
    "FetchState",
    "GiveState",
    "InstallMoments",
    "PinState",
    "ReleaseState",
    "StateBroken",
    "StateDescribed",
    "StateEffect",
    "StateEvent",
    "StateFetched",
    "StateProgress",
]

# ---- in ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescribed:
    """What the training loop pinned was looked at.

    Attributes:
        number: Of the pin.
        size_bytes, digest: Of the row.
        finite: Whether no moment is a NaN or an infinity.
    """

    number: int
    size_bytes: int
    digest: str
    finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateProgress:
    """More of a state came; told now and then."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
    """A state is here, whole, and its digest is that of its manifest."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBroken:
    """A state's transfer ended before its end, or brought something else than its manifest says."""

    transfer: TransferId
    reason: str


StateEvent = StateDescribed | StateProgress | StateFetched | StateBroken

# ---- out -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """Have the training loop copy its inner moments at its next boundary, in place of what was pinned before."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeState:
    """Look at what is pinned: `StateDescribed` tells of it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveState:
    """Send what is pinned, behind everything else that the uplink carries, until `EndGiving`."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGiving:
    """Stop sending; does nothing when it is over already."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """Take what is offered, in place of any other; a part of the very same row that is here isn't sent again."""

    offer: StateOffered


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallMoments:
    """Have the training loop take over what was fetched, at its next boundary.

    Attributes:
        donor, global_step: Whose they were, and when.
    """

    transfer: TransferId
    donor: LearnerId
    global_step: GlobalStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseState:
    """Let go of what is pinned or fetched, and end its fetching."""


StateEffect = PinState | DescribeState | GiveState | EndGiving | FetchState | InstallMoments | ReleaseState
