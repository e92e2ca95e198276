"""What goes into the syncer's machine and what comes out: closed unions of frozen values.

Effects come out **in the order in which they must be done**. A driver may run the sends of one list side by
side with later ones, but a `Record` with `durable` must be on disk before any later effect of the same list
begins. An effect that concerns weights carries a reference into the journal, never a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from wan_diloco.protocol.common_events import ShowReason, TimerFired
from wan_diloco.protocol.grants import Ingress
from wan_diloco.protocol.messages import (
    ContributionHeader,
    ContributionKey,
    LearnerMessage,
    RefusalReason,
    SyncerMessage,
    UpdateHeader,
)
from wan_diloco.protocol.tape import MergeEntry, TapeRecord
from wan_diloco.units import FragmentId, GlobalStep, LearnerId, LocalStep, RoundId, Term, Version

__all__ = [
    "AcceptUpload",
    "CallsRefused",
    "CloseSession",
    "ContributionsUnreadable",
    "EndRun",
    "IngressChanged",
    "LearnerConnected",
    "LearnerDisconnected",
    "LearnerSaid",
    "MergeFailed",
    "MergeFinished",
    "Record",
    "RefuseUpload",
    "SendToLearner",
    "SendUpdate",
    "SessionId",
    "StartMerge",
    "StateMissing",
    "SyncerEffect",
    "SyncerEvent",
    "TakenOver",
    "TransferBroken",
    "UpdateSource",
    "UploadFailed",
    "UploadOffered",
    "UploadStored",
]

# One connection of a learner; never used again, also not by the same learner.
SessionId = NewType("SessionId", int)


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
class CallsRefused:
    """The transport refused calls, or messages, of nobody in particular; it tells of many at once."""

    reason: RefusalReason
    number: int


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
class ContributionsUnreadable:
    """A merge could not be done and never can be: the bytes of some of its contributions are damaged.

    Attributes:
        keys: Of those; at least one.
    """

    round_id: RoundId
    keys: tuple[ContributionKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBroken:
    """An update did not reach the learner whole, while its session lives on.

    Attributes:
        unreadable: Since a publication of its chain can't be read any more.
    """

    session: SessionId
    fragment_id: FragmentId
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressChanged:
    """The operator changed what may come in; the next questions say so."""

    ingress: Ingress


SyncerEvent = (
    LearnerConnected
    | LearnerDisconnected
    | LearnerSaid
    | CallsRefused
    | UploadOffered
    | UploadStored
    | UploadFailed
    | MergeFinished
    | MergeFailed
    | ContributionsUnreadable
    | TransferBroken
    | IngressChanged
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
        spread_s: Over how long the bytes should be spread; 0 for as fast as the caps let them.
    """

    session: SessionId
    header: UpdateHeader
    chain: tuple[UpdateSource, ...]
    spread_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """The run has reached its last step and every round is done."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMissing:
    """A learner has taken part in this run, and this state, which has just begun, knows nothing of it: the driver ends.

    Attributes:
        learner_id: Who.
        local_step: How far it is.
    """

    learner_id: LearnerId
    local_step: LocalStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """Another process has this run: the driver ends, as it stands.

    Attributes:
        learner_id: Who has heard of it.
        term: The other's, as heard.
    """

    learner_id: LearnerId
    term: Term


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
    | StateMissing
    | TakenOver
)
