"""What learners and syncers say to each other, as values that can't be built wrong.

Control messages travel in order on one stream a session; `wire/` turns them into bytes. The two headers
at the end announce a bulk transfer; its payload travels on other channels and never passes through here.

Validation happens at birth, so a machine never sees a message that makes no sense by itself; whether it
makes sense *now* is the machine's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wan_diloco.protocol.reasons import DeclineReason, RefusalReason
from wan_diloco.protocol.rejoin_messages import LearnerStateMessage, SyncerStateMessage
from wan_diloco.units import (
    Epoch,
    FragmentId,
    GlobalStep,
    Incarnation,
    LearnerId,
    LocalStep,
    RoundId,
    ShardId,
    Term,
    Version,
)

__all__ = [
    "PROTOCOL_VERSION",
    "Acknowledged",
    "ContributionHeader",
    "ContributionKey",
    "ContributionRefused",
    "DeclineReason",
    "Declined",
    "FragmentReport",
    "Goodbye",
    "Hello",
    "LearnerMessage",
    "MergedNote",
    "Pace",
    "Pull",
    "RefusalReason",
    "Refused",
    "Report",
    "ResyncRequest",
    "SegmentKind",
    "Start",
    "Stop",
    "SyncerMessage",
    "UpdateHeader",
    "UpdateReceived",
    "UpdateSegment",
    "Welcome",
]

# Both ends must speak the same version; it rises with any change of meaning, and of what every message must have.
PROTOCOL_VERSION = 3
_NO_TERM = Term(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionKey:
    """What makes a contribution unique within a run; it is merged at most once, ever.

    Attributes:
        step_lo: The learner's local step at its last install of the fragment; the contribution covers
            the steps after it.
    """

    learner_id: LearnerId
    incarnation: Incarnation
    fragment_id: FragmentId
    step_lo: LocalStep

    def __post_init__(self) -> None:
        """Refuse numbers that no learner has."""
        _check(bool(self.learner_id), "a key names its learner")
        _check(self.incarnation >= 1, "incarnations start at 1")
        _check(self.fragment_id >= 0 and self.step_lo >= 0, "fragments and steps are never negative")


# ---- learner to syncer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a session.

    Attributes:
        incarnation: 0 asks for a new life; any other is a reconnect of that life.
        layout: Canonical lines of the layout, in order.
        settings: The settings that all ends must share, as (key, canonical value), sorted.
        initial_digests: Digest of each fragment of the initial weights, in order.
        local_step, tokens: The learner's counters at the start of this session.
        life_id: Drawn by chance for each training process: whoever asks for a new life again before it was told of the
            first gets that one. Without any, each Hello asks for another.
        term: The highest that this process was welcomed in; 0 for none. A syncer of a lower one has been taken over.
        term_id: Of the syncer's process that began that term, as it said; empty where that isn't known.
    """

    protocol_version: int
    run: str
    learner_id: LearnerId
    incarnation: Incarnation
    layout: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    initial_digests: tuple[str, ...]
    local_step: LocalStep
    tokens: int
    life_id: str = ""
    term: Term = _NO_TERM
    term_id: str = ""

    def __post_init__(self) -> None:
        """Refuse what no learner sends."""
        _check(bool(self.learner_id) and bool(self.run), "a Hello names its learner and its run")
        _check(min(self.incarnation, self.local_step, self.tokens, self.term) >= 0, "counters are never negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentReport:
    """Where a learner stands with one fragment.

    Attributes:
        version: The version installed.
        pending: A newer version that has arrived and will be installed at the next step boundary.
        resync: Number of the last resync installed or pending; 0 for none.
        step_lo, tokens_lo: The learner's cumulative counters at that install, so that
            steps = local_step - step_lo and tokens = tokens - tokens_lo.
    """

    fragment_id: FragmentId
    version: Version
    pending: Version | None
    resync: int
    step_lo: LocalStep
    tokens_lo: int

    def __post_init__(self) -> None:
        """Refuse negative counters."""
        _check(min(self.fragment_id, self.resync, self.step_lo, self.tokens_lo) >= 0, "counters are never negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A learner's progress, after each step; a newer one replaces an unsent older one.

    Attributes:
        local_step: Steps taken since the learner's first life.
        tokens: Tokens trained on, cumulative with `local_step`.
        step_time_s: Smoothed duration of a step; 0 before the first.
        loss: Training loss of the last step, nats a token; NaN is told as None.
        learning_rate: Of the last step.
        echo: Not 0: to be said back at once, by a `Pace`.
        rtt_s: A round trip as the learner has measured it; 0 before the first.
    """

    local_step: LocalStep
    tokens: int
    step_time_s: float
    loss: float | None
    learning_rate: float
    fragments: tuple[FragmentReport, ...]
    echo: int = 0
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative counters and durations."""
        _check(min(self.local_step, self.tokens) >= 0, "counters are never negative")
        _check(all(0 <= each < float("inf") for each in (self.step_time_s, self.rtt_s)), "durations are finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """The answer to a pull that brings no contribution now. With `BUSY` one may follow later."""

    round_id: RoundId
    attempt: int
    fragment_id: FragmentId
    reason: DeclineReason


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReceived:
    """An update arrived whole and decoded to its digest; it is installed at the next boundary."""

    fragment_id: FragmentId
    version: Version
    resync: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResyncRequest:
    """The learner asks for the published value in f32, because what it has can't be right."""

    fragment_id: FragmentId
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The learner leaves on purpose."""

    reason: str


LearnerMessage = Hello | Report | Declined | UpdateReceived | ResyncRequest | Goodbye | LearnerStateMessage


# ---- syncer to learner ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to a Hello that is taken in.

    Attributes:
        incarnation: The life that this session belongs to. Another than the Hello names is a new one: whatever was
            under way for the old is void, and every fragment comes anew.
        global_step: Now.
        anchor: local_step - global_step of this learner, now.
        total_steps: T, fixed at the start of the run.
        versions: Current version of each fragment, the syncer's clock.
        data_shard: The shard of the data that this life reads.
        next_unit: The first unit of that shard which no journalled contribution contains.
        shards: Address of the shard that owns each fragment; "" is this address.
        started: Whether `Start` has been given already.
        term_id: Drawn by chance by the process that began the term: two that were started from copies of one state
            have the same term. Empty where it wasn't drawn.
    """

    incarnation: Incarnation
    term: Term
    epoch: Epoch
    global_step: GlobalStep
    anchor: int
    total_steps: GlobalStep
    versions: tuple[Version, ...]
    data_shard: ShardId
    next_unit: int
    shards: tuple[str, ...]
    started: bool
    term_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The session is refused; the learner must not try again with the same Hello.

    Attributes:
        detail: One sentence that names the first difference.
    """

    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Steps may be taken from now on."""

    global_step: GlobalStep
    anchor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The global step, at each change and when a report asks; a newer one replaces an unsent older one.

    Attributes:
        anchor: local_step - global_step of the receiving learner at its last change of membership.
        echo: The number of the report that is answered; 0 when none is.
        rate_bytes_per_s: What the learner may send in all from now on, on the line; 0 for no other cap than its own.
    """

    global_step: GlobalStep
    anchor: int
    echo: int = 0
    rate_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative rates."""
        _check(self.rate_bytes_per_s >= 0, "a rate is never negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Asks for a contribution at the next step boundary.

    Attributes:
        version: The fragment's current version.
        window_s: How long the round is expected to stay open, from now.
        upload_s: The uplink's share of the window: over how long the upload should be spread.
    """

    round_id: RoundId
    attempt: int
    fragment_id: FragmentId
    version: Version
    window_s: float
    upload_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """A contribution is in the journal up to `step_hi`; its data units are committed."""

    fragment_id: FragmentId
    step_lo: LocalStep
    step_hi: LocalStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionRefused:
    """A contribution is refused whole and will never be merged."""

    fragment_id: FragmentId
    step_lo: LocalStep
    step_hi: LocalStep
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The run has ended."""

    reason: str
    global_step: GlobalStep


SyncerMessage = Welcome | Refused | Start | Pace | Pull | Acknowledged | ContributionRefused | Stop | SyncerStateMessage


# ---- headers of bulk transfers -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionHeader:
    """What a learner says about a contribution before its bytes.

    Attributes:
        round_id, attempt: The pull that it answers.
        base: The published version that the delta is relative to.
        step_hi, tokens_lo, tokens_hi: Cumulative counters; the contribution covers (step_lo, step_hi].
        unit_hi: One past the last unit of its life's shard that it contains; a step takes one.
        codec: Name of the codec.
        codes_bytes, scales_bytes: Length of the two buffers before zstd; they follow from the layout.
    """

    key: ContributionKey
    round_id: RoundId
    attempt: int
    base: Version
    step_hi: LocalStep
    tokens_lo: int
    tokens_hi: int
    unit_hi: int
    codec: str
    codes_bytes: int
    scales_bytes: int

    def __post_init__(self) -> None:
        """Refuse counters that run backwards and negative sizes."""
        _check(self.step_hi >= self.key.step_lo, "steps don't run backwards")
        _check(self.tokens_hi >= self.tokens_lo >= 0, "tokens don't run backwards")
        _check(min(self.unit_hi, self.codes_bytes, self.scales_bytes) >= 0, "sizes are never negative")

    @property
    def steps(self) -> int:
        """Local steps covered."""
        return self.step_hi - self.key.step_lo

    @property
    def tokens(self) -> int:
        """Tokens covered."""
        return self.tokens_hi - self.tokens_lo


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedNote:
    """A contribution that an update contains, so that its sender knows its fate."""

    learner_id: LearnerId
    incarnation: Incarnation
    step_lo: LocalStep
    step_hi: LocalStep


class SegmentKind(StrEnum):
    """What a segment of an update carries."""

    DIFFERENCE = "difference"
    VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSegment:
    """One step from a published version to a newer one.

    Attributes:
        kind: An encoded difference, to be decoded and added; or the value itself.
        from_version: Ignored with a value.
        digest: Of the published value at `to_version`, f32.
        codes_bytes, scales_bytes: Length of the two buffers before zstd.
        merged: The contributions that this version contains and the one before doesn't.
    """

    kind: SegmentKind
    from_version: Version
    to_version: Version
    digest: str
    codec: str
    codes_bytes: int
    scales_bytes: int
    merged: tuple[MergedNote, ...]

    def __post_init__(self) -> None:
        """Refuse negative sizes and differences that go nowhere."""
        _check(min(self.codes_bytes, self.scales_bytes) >= 0, "sizes are never negative")
        _check(
            self.kind is SegmentKind.VALUE or self.from_version < self.to_version,
            "a difference leads to a newer version",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHeader:
    """What the syncer says about an update before its bytes.

    Attributes:
        resync: 0, or the number of the resync: install it even if the version is there already.
        segments: In order, each starting where the one before ends.
    """

    fragment_id: FragmentId
    resync: int
    segments: tuple[UpdateSegment, ...]

    def __post_init__(self) -> None:
        """Refuse an empty or broken chain."""
        _check(bool(self.segments), "an update has segments")
        _check(self.fragment_id >= 0 and self.resync >= 0, "counters are never negative")
        for earlier, later in zip(self.segments, self.segments[1:], strict=False):
            _check(later.kind is SegmentKind.DIFFERENCE, "only the first segment may be a value")
            _check(later.from_version == earlier.to_version, "a chain has no gaps")

    @property
    def to_version(self) -> Version:
        """The version that the whole update leads to."""
        return self.segments[-1].to_version


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
