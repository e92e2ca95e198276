"""What goes into the two machines and what comes out: closed unions of frozen values.

Effects come out **in the order in which they must be done**. A driver may run the sends of one list side by
side with later ones, but a `Record` with `durable` must be on disk before any later effect of the
same list begins. An effect that concerns weights carries a reference into the journal, never a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from wan_diloco.protocol.messages import (
    ContributionHeader,
    LearnerMessage,
    RefusalReason,
    SyncerMessage,
    UpdateHeader,
)
from wan_diloco.protocol.tape import MergeEntry, TapeRecord
from wan_diloco.units import FragmentId, GlobalStep, Incarnation, LearnerId, LocalStep, RoundId, Version

__all__ = [
    "AcceptUpload",
    "AllowSteps",
    "ApplyUpdate",
    "BoundaryPassed",
    "CloseSession",
    "Connect",
    "Connected",
    "ConnectionLost",
    "DropUpload",
    "EndRun",
    "ExitLearner",
    "Identity",
    "Installed",
    "InstallUpdate",
    "LearnerConnected",
    "LearnerDisconnected",
    "LearnerEffect",
    "LearnerEvent",
    "LearnerSaid",
    "MergeFailed",
    "MergeFinished",
    "Record",
    "RefuseUpload",
    "RequestSnapshot",
    "SendToLearner",
    "SendToSyncer",
    "SendUpdate",
    "SessionId",
    "SetPace",
    "ShowReason",
    "SnapshotTaken",
    "StartMerge",
    "StartUpload",
    "SyncerEffect",
    "SyncerEvent",
    "SyncerSaid",
    "TimerFired",
    "TransferBroken",
    "UpdateApplied",
    "UpdateArrived",
    "UpdateBroken",
    "UpdateSource",
    "UploadBroken",
    "UploadFailed",
    "UploadOffered",
    "UploadStored",
]

# One connection of a learner; never used again, also not by the same learner.
SessionId = NewType("SessionId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time that `deadline_s()` named has come."""


# ---- into the syncer's machine -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConnected:
    """A session opened its control stream; its Hello follows as `LearnerSaid`."""

    session: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerDisconnected:
    """A session's control stream ended, whoever ended it."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSaid:
    """A control message."""

    session: SessionId
    message: LearnerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOffered:
    """A contribution's header came; the driver holds its bytes back until accept or refuse."""

    session: SessionId
    header: ContributionHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStored:
    """A contribution is whole, valid, and appended to the journal; the record that follows makes it durable.

    Attributes:
        ref: Where, as the journal's driver writes it; opaque here.
        payload_bytes: What crossed the wire for it, headers included.
    """

    session: SessionId
    header: ContributionHeader
    ref: str
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailed:
    """A contribution's bytes turned out bad: refused whole. A broken connection is not this."""

    session: SessionId
    header: ContributionHeader
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFinished:
    """A merge is done and its publication appended to the journal; the record that follows makes it durable.

    Attributes:
        digest: Of the fragment's published value at the new version.
        ref: Where the encoded publication is.
        update_bytes: Its size on the wire, headers included.
    """

    round_id: RoundId
    digest: str
    ref: str
    codes_bytes: int
    scales_bytes: int
    update_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFailed:
    """A merge could not be done (the disk, say); its round is tried again."""

    round_id: RoundId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBroken:
    """An update did not reach the learner whole, while its session lives on."""

    session: SessionId
    fragment_id: FragmentId


SyncerEvent = (
    LearnerConnected
    | LearnerDisconnected
    | LearnerSaid
    | UploadOffered
    | UploadStored
    | UploadFailed
    | MergeFinished
    | MergeFailed
    | TransferBroken
    | TimerFired
)

# ---- out of the syncer's machine -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToLearner:
    """Send a control message."""

    session: SessionId
    message: SyncerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """End a session after what was sent before has left."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptUpload:
    """Let the bytes of an offered contribution come, spool them, check them, journal them."""

    session: SessionId
    header: ContributionHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseUpload:
    """Throw an offered contribution's bytes away; the learner is told by a message of its own."""

    session: SessionId
    header: ContributionHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Append to the tape.

    Attributes:
        durable: On disk before any later effect of the list begins.
    """

    record: TapeRecord
    durable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMerge:
    """Merge a closed round's contributions, take the outer step, publish.

    Attributes:
        entries: In the order in which they are summed: (learner id, step_lo).
        global_step: The step at which the round was due: the outer schedule's argument.
    """

    round_id: RoundId
    fragment_id: FragmentId
    from_version: Version
    to_version: Version
    global_step: GlobalStep
    entries: tuple[MergeEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSource:
    """A stored publication, one link of a chain."""

    from_version: Version
    to_version: Version
    digest: str
    ref: str
    codes_bytes: int
    scales_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendUpdate:
    """Bring a learner's fragment up to the current version.

    Attributes:
        chain: Stored publications to send in order; empty means: the published value in f32.
        header: Complete, also for the value.
    """

    session: SessionId
    header: UpdateHeader
    chain: tuple[UpdateSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowReason:
    """Why something does not happen, for the operator; given once per change.

    Attributes:
        topic: What it is about ("round", "start"); a newer reason of a topic replaces the older.
        text: One sentence; empty when there is nothing to wait for any more.
    """

    topic: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """The run has reached its last step and every round is done."""

    reason: str


SyncerEffect = (
    SendToLearner
    | CloseSession
    | AcceptUpload
    | RefuseUpload
    | Record
    | StartMerge
    | SendUpdate
    | ShowReason
    | EndRun
)

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
    """A fragment that the training loop installed at this boundary."""

    fragment_id: FragmentId
    version: Version
    resync: int


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
    """

    local_step: LocalStep
    tokens: int
    unit: int
    step_time_s: float
    loss: float | None
    learning_rate: float
    installed: tuple[Installed, ...]
    snapshots: tuple[SnapshotTaken, ...]


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
    | TimerFired
)

# ---- out of the learner's machine ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open a connection to the syncer."""


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
    connection; the syncer says at which offset to go on.

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
    """

    fragment_id: FragmentId
    version: Version
    resync: int


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
        next_unit: Not None: the data position to go on from (at the first Welcome of a life).
    """

    anchor: int
    total_steps: GlobalStep
    next_unit: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitLearner:
    """The learner's part is over.

    Attributes:
        reason: One sentence.
        exit_code: Of the process.
    """

    reason: str
    exit_code: int


LearnerEffect = (
    Connect
    | SendToSyncer
    | RequestSnapshot
    | StartUpload
    | DropUpload
    | ApplyUpdate
    | InstallUpdate
    | AllowSteps
    | SetPace
    | ExitLearner
    | ShowReason
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a learner is, as it says in its Hello."""

    run: str
    learner_id: LearnerId
    incarnation: Incarnation
    layout: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    initial_digests: tuple[str, ...]
