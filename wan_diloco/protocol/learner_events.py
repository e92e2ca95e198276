"""What goes into the learner's machine and what comes out: closed unions of frozen values.

Effects come out **in the order in which they must be done**. The training loop is on the far side of a
pipe: what is asked of it happens at its next step boundary, and comes back with `BoundaryPassed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_diloco.protocol.common_events import ShowReason, TimerFired
from wan_diloco.protocol.fence import same_term
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.messages import (
    ContributionHeader,
    LearnerMessage,
    RefusalReason,
    SyncerMessage,
    UpdateHeader,
)
from wan_diloco.protocol.state_events import StateEffect, StateEvent
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LearnerId, LocalStep, Term, TransferId, Version

__all__ = [
    "AllowSteps",
    "ApplyUpdate",
    "BoundaryPassed",
    "Connect",
    "Connected",
    "ConnectionLost",
    "DropUpload",
    "ExitLearner",
    "Identity",
    "InstallUpdate",
    "Installed",
    "LearnerEffect",
    "LearnerEvent",
    "LimitUplink",
    "RefuseSyncer",
    "RequestSnapshot",
    "SendToSyncer",
    "SetPace",
    "SetRoundTrip",
    "SnapshotTaken",
    "StartUpload",
    "SyncerSaid",
    "UpdateApplied",
    "UpdateArrived",
    "UpdateBroken",
    "UploadBroken",
]

_NO_TERM = Term(0)

_NO_TRANSFER = TransferId(0)

# ---- into the learner's machine ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The control stream to the syncer is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    """A connection attempt failed, or the control stream ended. All transfers of it ended too.

    Attributes:
        refused: The far end said no for good (a certificate, say); trying again is useless.
    """

    reason: str
    refused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSaid:
    """A control message."""

    message: SyncerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A fragment that the training loop installed at this boundary.

    Attributes:
        step_lo, tokens_lo: Where its counters restart: at this boundary when it overwrote; at the merged
            snapshot's counters when it rebased, because the overlap's work was kept.
    """

    fragment_id: FragmentId
    version: Version
    resync: int
    step_lo: LocalStep
    tokens_lo: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """A fragment that the training loop copied at this boundary, after installing.

    The counters that belong to it are those of the boundary and of the fragment's last install.
    """

    fragment_id: FragmentId


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPassed:
    """The training loop stands between two steps.

    Ordering: installs came first, snapshots after them; both are of this very boundary.

    Attributes:
        local_step, tokens, unit: Cumulative counters: steps, tokens, data units consumed.
        pinned: Number of the pin of the inner moments that was made at it; 0 for none.
        moments_of: The transfer whose moments were taken over at it; 0 for none.
    """

    local_step: LocalStep
    tokens: int
    unit: int
    step_time_s: float
    loss: float | None
    learning_rate: float
    installed: tuple[Installed, ...]
    snapshots: tuple[SnapshotTaken, ...]
    pinned: int = 0
    moments_of: TransferId = _NO_TRANSFER

    @property
    def carries_more(self) -> bool:
        """Whether it tells more than how far training is, so that a later one can't stand in for it."""
        return bool(self.installed or self.snapshots or self.pinned or self.moments_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateArrived:
    """An update came whole; nothing has been decoded yet."""

    header: UpdateHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateApplied:
    """An update decoded to the digest that its header names; it waits to be installed."""

    fragment_id: FragmentId
    version: Version
    resync: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBroken:
    """An update did not decode, or not to its digest."""

    fragment_id: FragmentId
    version: Version
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadBroken:
    """An upload's stream ended before its end, while the control stream lives on."""

    header: ContributionHeader


LearnerEvent = (
    Connected
    | ConnectionLost
    | SyncerSaid
    | BoundaryPassed
    | UpdateArrived
    | UpdateApplied
    | UpdateBroken
    | UploadBroken
    | StateEvent
    | TimerFired
)

# ---- out of the learner's machine ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open a connection to the syncer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseSyncer:
    """Who answers isn't the one to be believed, and doesn't know it: end the connection, and tell of its end.

    It has been taken over, or was started from a copy of the state of the one that this learner met first.

    Attributes:
        said: Its term.
        heard: The one that this learner was welcomed in before.
    """

    said: Term
    heard: Term

    @property
    def reason(self) -> str:
        """In one sentence."""
        if self.said == self.heard:
            return same_term(self.said)
        return f"a syncer of term {self.said} answers, and one of term {self.heard} has taken its run over"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToSyncer:
    """Send a control message."""

    message: LearnerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """Have the training loop copy a fragment at its next boundary."""

    fragment_id: FragmentId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpload:
    """Encode the snapshot that the boundary event just brought, and send it; or send it on.

    The delta is base - snapshot, where the base is the published value of `header.base`. The driver keeps
    the encoded bytes until `DropUpload`, since the same header may be started again after a broken
    connection; the syncer says at which offset to go on. Starting one that still runs changes nothing.

    Attributes:
        spread_s: Over how long the bytes should be spread; 0 for as fast as the pacer lets them.
    """

    header: ContributionHeader
    spread_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DropUpload:
    """Forget the encoded bytes of a contribution, and end its stream if it still runs."""

    header: ContributionHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyUpdate:
    """Decode an update that arrived onto the newest value held (pending, else installed), check its digest.

    A value segment replaces whatever is there.
    """

    header: UpdateHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallUpdate:
    """Have the training loop install the pending value at its next boundary.

    Attributes:
        resync: Not 0: install it even at the same version, and zero inner moments that aren't finite.
        merged_hi: The local step up to which this learner's own contribution, counted from the interval
            that runs now, is contained; None when it isn't. Rebasing needs it, overwriting doesn't.
    """

    fragment_id: FragmentId
    version: Version
    resync: int
    merged_hi: LocalStep | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowSteps:
    """How far the training loop may go.

    Attributes:
        until_step: It may take steps while its local step is below this; None for no bound.
    """

    until_step: LocalStep | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPace:
    """The argument of the learning-rate schedule: global_step = local_step - anchor from now on.

    Attributes:
        lease: Not None: the data to go on with (at the first Welcome of a life).
    """

    anchor: int
    total_steps: GlobalStep
    lease: Lease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRoundTrip:
    """How long a round trip to the syncer takes: windows and deadlines of transfers follow it.

    Attributes:
        rtt_s: >= 0.
    """

    rtt_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitLearner:
    """The learner's part is over.

    Attributes:
        reason: One sentence.
        exit_code: Of the process.
    """

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUplink:
    """Send no faster than the syncer grants, all together.

    Attributes:
        rate_bytes_per_s: On the line; None for no other cap than the uplink's own.
    """

    rate_bytes_per_s: float | None


LearnerEffect = (
    Connect
    | RefuseSyncer
    | SendToSyncer
    | RequestSnapshot
    | StartUpload
    | DropUpload
    | ApplyUpdate
    | InstallUpdate
    | AllowSteps
    | SetPace
    | SetRoundTrip
    | LimitUplink
    | StateEffect
    | ExitLearner
    | ShowReason
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a learner is, as it says in its Hello: see there.

    Attributes:
        term, term_id: That an earlier uplink of the same process heard.
    """

    run: str
    learner_id: LearnerId
    incarnation: Incarnation
    layout: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    initial_digests: tuple[str, ...]
    life_id: str = ""
    term: Term = _NO_TERM
    term_id: str = ""
