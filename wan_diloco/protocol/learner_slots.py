"""What the learner's machine keeps: its settings, and its standing with each fragment and with the syncer.

Owner of all that changes here: the learner's machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wan_diloco.protocol.events import Identity, LearnerEffect, SendToSyncer
from wan_diloco.protocol.intake import FragmentSizes
from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    ContributionHeader,
    Hello,
    LearnerMessage,
    Pull,
    UpdateHeader,
)
from wan_diloco.protocol.rejoin_messages import SyncerClock
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.protocol.round_trip import RoundTrip
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.units import Epoch, GlobalStep, Incarnation, LocalStep, Term, Version

__all__ = ["Counters", "FragmentState", "LearnerContext", "LearnerSettings", "Link", "Slot", "StepRatio"]

_NO_CLOCK = SyncerClock(term=Term(0), epoch=Epoch(0), global_step=GlobalStep(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """What is fixed for a run.

    Attributes:
        overlap_steps: tau; 0 is lockstep: the learner holds at each boundary at which a fragment is due
            until its new version is installed.
        heartbeat_s: A silent learner repeats its last report that often.
        sizes: Of each fragment's encoded contribution.
        state_layout: Fingerprint of the inner moments' names, shapes and types.
    """

    schedule: Schedule
    overlap_steps: int
    codec: str
    sizes: tuple[FragmentSizes, ...]
    heartbeat_s: float
    retry: RetryPolicy
    state_layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentState:
    """Where the training loop stands with a fragment.

    Attributes:
        step_lo, tokens_lo: Cumulative counters at its last install.
    """

    version: Version
    resync: int
    step_lo: LocalStep
    tokens_lo: int


@dataclass(slots=True)
class Slot:
    """One fragment, as the machine sees it.

    Attributes:
        pending: Version and resync applied and not installed yet.
        applying: An update that is being decoded.
        pull, pulled_s: The newest pull that waits for its turn.
        asked: The pull for which a snapshot was requested.
        upload: What is being sent; kept over lost connections until it is acknowledged or refused.
        started_s, again: When its sending began last, and whether it had begun before.
        sent_step: Local step at which the last upload began.
    """

    state: FragmentState
    pending: tuple[Version, int] | None = None
    applying: UpdateHeader | None = None
    pull: Pull | None = None
    pulled_s: float = 0.0
    asked: Pull | None = None
    upload: ContributionHeader | None = None
    started_s: float = 0.0
    again: bool = False
    retry_s: float | None = None
    failures: int = 0
    sent_step: int = 0

    @property
    def newest(self) -> tuple[Version, int]:
        """Version and resync of the newest value held."""
        return self.pending or (self.state.version, self.state.resync)

    @property
    def is_waiting(self) -> bool:
        """A pull waits for its turn."""
        return self.pull is not None

    @property
    def is_busy(self) -> bool:
        """An upload of the fragment is under way."""
        return self.asked is not None or self.upload is not None


@dataclass(slots=True)
class Counters:
    """The training loop's counters at the last boundary."""

    local_step: LocalStep
    tokens: int
    unit: int
    step_time_s: float = 0.0
    loss: float | None = None
    learning_rate: float = 0.0


@dataclass(slots=True)
class Link:
    """The connection to the syncer.

    Attributes:
        welcomed: The session is taken in; before that only a Hello may be sent.
        refused: Who answered isn't the one to be believed: what it says has no meaning, until the connection is gone.
        failures: Attempts that failed in a row.
        connect_s: When to try again; None while connecting or connected.
        heartbeat_s: When to repeat the last report.
        hello_s: When the Hello went out.
        round_trip: To the syncer and back: first by the Hello, then by the numbers that reports carry.
        granted_bytes_per_s: What the syncer lets this learner send; 0 for no cap of its own.
    """

    welcomed: bool = False
    refused: bool = False
    failures: int = 0
    connect_s: float | None = None
    heartbeat_s: float | None = None
    hello_s: float = 0.0
    round_trip: RoundTrip = field(default_factory=RoundTrip)
    granted_bytes_per_s: float = 0.0


@dataclass(slots=True)
class StepRatio:
    """How many steps the run takes while this learner takes one of its own: 1, or more where it is slower.

    Attributes:
        value: As of the last stretch that was long enough.
    """

    value: float = 1.0
    _since: tuple[int, int] | None = None

    def heard(self, global_step: int, local_step: int, *, stretch_steps: int) -> None:
        """The run is at one step, and this learner at another.

        Args:
            global_step: Of the run.
            local_step: Of this learner.
            stretch_steps: Over so many steps of the run at least.
        """
        since_global, since_local = self._since or (global_step, local_step)
        gone, taken = global_step - since_global, local_step - since_local
        if gone >= stretch_steps and taken > 0:
            self.value = max(1.0, gone / taken)
        # Who took no step was held, and says nothing of how fast it is; a step that fell back is of another process.
        if self._since is None or gone >= stretch_steps or gone < 0 or taken < 0:
            self._since = (global_step, local_step)


@dataclass(slots=True, kw_only=True)
class LearnerContext:
    """What the parts of the learner's machine share.

    Attributes:
        incarnation: The life that the syncer gave; 0 before the first Welcome.
        anchor: local_step - global_step, as well as it is known.
        clock: The syncer's, as heard last.
        term_id: Of the process that began that clock's term; empty where that isn't known.
        step_ratio: How many steps the run takes during one of this learner's.
        born_step: Where this life began, if the training loop had another before: work since older installs isn't its.
        work_until: The local step up to which a fragment that was asked for, and had nothing to give, needs work.
        effects: Of the event that is being handled, in order.
    """

    settings: LearnerSettings
    identity: Identity
    slots: list[Slot]
    counters: Counters
    incarnation: Incarnation
    link: Link = field(default_factory=Link)
    anchor: int = 0
    clock: SyncerClock = _NO_CLOCK
    term_id: str = ""
    step_ratio: StepRatio = field(default_factory=StepRatio)
    born_step: int = 0
    work_until: int = 0
    effects: list[LearnerEffect] = field(default_factory=list)

    def hello(self) -> Hello:
        """What a session begins with, now."""
        identity, counters = self.identity, self.counters
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run=identity.run,
            learner_id=identity.learner_id,
            incarnation=self.incarnation,
            layout=identity.layout,
            settings=identity.settings,
            initial_digests=identity.initial_digests,
            local_step=counters.local_step,
            tokens=counters.tokens,
            life_id=identity.life_id,
            term=self.clock.term,
            term_id=self.term_id,
        )

    def send(self, message: LearnerMessage) -> None:
        """Send a control message; without a session it is dropped, and the next report makes up for it."""
        if self.link.welcomed:
            self.effects.append(SendToSyncer(message=message))

    def take(self) -> list[LearnerEffect]:
        """The effects of the event just handled."""
        effects, self.effects = self.effects, []
        return effects

    def why_no_step(self, *, started: bool, joined: bool, settled: bool, total_steps: int) -> str:
        """Why a learner that was welcomed takes no step, in a sentence; empty where it may, or its moments say it.

        Args:
            started: The run has.
            joined: It has the values that it begins with.
            settled: It has its inner moments.
            total_steps: Of the run.
        """
        if not started:
            return "no step yet: the run starts when all regions are there, or run.start_timeout is over"
        if not joined:
            return "no step yet: takes the published values"
        is_done = settled and self.counters.local_step - self.anchor >= total_steps
        return f"holds: the run's {total_steps} steps are done, waits for the last rounds" if is_done else ""
