"""Every time limit of a run in one place: how long, and what that follows from.

Each is derived from the configuration, from the round trip and rate of a link, or from other limits; what is left is
fixed, for the reason that stands with it. Modules take their values from here, and `learner_deadlines` and
`syncer_deadlines` make tables of the same values for the operator. How often something is merely said or looked at is
no limit, and stands where it is done. What an object store may take for a request is its client's affair; the store's
lock and the last resort of a process that ends have limits of their own, which the tables are given.

No I/O, no clock: what was measured is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wan_diloco.protocol.link_plan import progress_timeout_s, window_bytes
from wan_diloco.protocol.pacing import DOWNLINK_SHARE, UPLINK_SHARE
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.units import format_duration, format_rate

__all__ = [
    "CLOSE_S",
    "CONNECT_S",
    "DONOR_KEEP_S",
    "DRAIN_S",
    "EVALUATOR_LEAVE_S",
    "EVALUATOR_SILENT_S",
    "FIRST_WINDOW_S",
    "GOODBYE_S",
    "GROUP_MEET_S",
    "HELLO_S",
    "JOURNAL_RETRY_FIRST_S",
    "JOURNAL_RETRY_MAX_S",
    "KEEPALIVE_ANSWER_S",
    "KEEPALIVE_QUIET_S",
    "LAST_SNAPSHOT_S",
    "LEARNERS_LEAVE_S",
    "LINK_BACK_S",
    "MEET_S",
    "RECONNECT_FIRST_S",
    "RECONNECT_MAX_S",
    "REJOIN_PATIENCE_S",
    "RESEND_MIN_S",
    "SHIP_LAST_S",
    "SPARE_S",
    "UPLINK_DYING_S",
    "UPLINK_RESTART",
    "WINDOW_MAX_S",
    "WORK_RETRY_S",
    "Deadline",
    "EndBudget",
    "LinkFacts",
    "heartbeat_s",
    "in_short",
    "in_words",
    "learner_deadlines",
    "member_lease_s",
    "reconnects",
    "syncer_deadlines",
]

# ---- of a connection

CONNECT_S = 10.0
"""A name's look-up, TCP, HTTP/2 and our own answer are some five round trips: 5 s on the worst line, twice."""
HELLO_S = 30.0
"""For a Hello on a session that is open; who needs longer than three times a whole connect is no learner."""
CLOSE_S = 2.0
"""For what is queued to leave; nobody who ends waits for a dead line longer."""
KEEPALIVE_QUIET_S = 5.0
"""Silence after which a connection is asked for a sign of life; half a usual lease."""
KEEPALIVE_ANSWER_S = 10.0
"""For that sign: several round trips of the slowest link, and what its buffers hold before it."""
RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 5.0
"""What a learner may stay away after its syncer is back, so seconds; two of them are within the usual lease."""
LINK_BACK_S = KEEPALIVE_QUIET_S + KEEPALIVE_ANSWER_S + RECONNECT_MAX_S + CONNECT_S
"""Who lost its connection in silence notices, waits, and connects: then it is back, or doesn't come."""

# ---- of membership

_HEARTBEATS_PER_LEASE = 4
"""A lost report or two must not end a lease."""
_LEASE_STEPS = 5
"""A step may be longer than the lease; a learner that is in the middle of one isn't dead."""

# ---- of rounds

FIRST_WINDOW_S = 10.0
"""How long an attempt is given before anything is known about steps and responses."""
WINDOW_MAX_S = 120.0
"""An attempt's window doubles from attempt to attempt up to this, and beyond it as far as answers are known to take, so
that a quorum that is slower than the schedule is reached in the end."""
WORK_RETRY_S = 1.0
"""Between two tries of a merge or a delivery that failed for a reason that won't be gone at once."""
RESEND_MIN_S = 10.0
"""An upload that nothing is heard of is offered again after this, or after so many times the usual duration; the syncer
knows repeated ones by their key."""

# ---- of moments that are given to a joiner

DONOR_KEEP_S = LINK_BACK_S
"""A joiner that lost its connection is back before that, or never."""
MEET_S = LINK_BACK_S
"""Both ends of a transfer are told at the same time, and one may just have lost its connection."""
REJOIN_PATIENCE_S = 2 * LINK_BACK_S
"""Without an offer, and without a byte of what was offered: time for one donor that is gone and for another. Then it is
better to train. A transfer that is slow, and comes on, is waited for."""

# ---- of what runs on the same machine

GROUP_MEET_S = 600.0
"""For the processes of a group to meet, and for any of their collectives. None waits for the wide area, so this only
has to outlast the slowest start and the slowest step."""
JOURNAL_RETRY_FIRST_S = 0.2
JOURNAL_RETRY_MAX_S = 5.0
"""Short at first, since a rotation may fail once; a full disk is asked every few seconds."""
EVALUATOR_SILENT_S = 300.0
"""Without a word of an evaluator that has work. It speaks after every batch, so only a machine that is thousands of
times slower than ours would be taken for a dead one."""

# ---- of an end

EVALUATOR_LEAVE_S = 10.0
"""For an evaluator that has nothing left to do to end; then it is killed."""
LEARNERS_LEAVE_S = 10.0
"""For learners to leave after they were told that the run is over; then they hear of it by a lost connection."""
DRAIN_S = 6.0
"""After a syncer was told to end, for the merges under way. What isn't done by then the next process does again, from
the tape; the same holds for the snapshot."""
LAST_SNAPSHOT_S = 8.0
SHIP_LAST_S = 10.0
"""For the last snapshot's way to the store, where merges and the snapshot have left that much of a stop."""
SPARE_S = 5.0
"""What a stop takes after that: the store is given back, and all is closed."""
GOODBYE_S = 5.0
"""For an uplink to say goodbye and end; it has `CLOSE_S` for what is queued, and leaves what it uploads."""
UPLINK_RESTART = RetryPolicy(initial_s=0.1, max_s=5.0)
"""Between the death of an uplink and the start of the next, which takes seconds itself."""
UPLINK_DYING_S = 2.0
"""Between the end of an uplink's socket and the end of its process; then it is killed."""


def heartbeat_s(lease_s: float) -> float:
    """How often a silent learner repeats its last report.

    Args:
        lease_s: As configured.
    """
    return lease_s / _HEARTBEATS_PER_LEASE


def member_lease_s(lease_s: float, step_time_s: float) -> float:
    """How long a silent member counts as live.

    Args:
        lease_s: As configured.
        step_time_s: What it takes for a step; 0 where nobody knows.
    """
    return max(lease_s, _LEASE_STEPS * step_time_s)


def reconnects(lease_s: float) -> RetryPolicy:
    """When a learner that has no connection tries again: at least twice within a lease, and within seconds.

    Args:
        lease_s: As configured.
    """
    most_s = min(RECONNECT_MAX_S, lease_s / 2)
    return RetryPolicy(initial_s=RECONNECT_FIRST_S, max_s=max(RECONNECT_FIRST_S, most_s))


# ---- tables for the operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """One time limit.

    Attributes:
        name: As logs call it.
        limit_s: How long; 0 where it counts in steps.
        limit_steps: In steps of now, whatever they take.
        follows: What it follows from, for a person.
    """

    name: str
    follows: str
    limit_s: float = 0.0
    limit_steps: float = 0.0

    def __post_init__(self) -> None:
        """Refuse one that is none."""
        if (self.limit_s > 0) == (self.limit_steps > 0):
            raise ValueError(f"{self.name} is a time in seconds or in steps, above 0")

    @property
    def limit(self) -> str:
        """How long, in words."""
        if self.limit_s:
            return format_duration(self.limit_s)
        return f"{self.limit_steps:.4g} {'step' if self.limit_steps == 1 else 'steps'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """What is known of a link in one direction.

    Attributes:
        rate_bytes_per_s: None if nobody knows.
        message_bytes: The longest bulk message.
        rtt_s: 0 as long as none was measured.
    """

    rate_bytes_per_s: float | None
    message_bytes: int
    rtt_s: float = 0.0

    @property
    def progress_s(self) -> float:
        """After how long without an acknowledgement a transfer counts as stuck."""
        window = window_bytes(self.rate_bytes_per_s, self.rtt_s, self.message_bytes)
        return progress_timeout_s(self.rate_bytes_per_s, self.rtt_s, window, self.message_bytes)

    @property
    def words(self) -> str:
        """What is known, for a person."""
        known = self.rate_bytes_per_s
        rate = "a link of unknown rate" if known is None else format_rate(known)
        trip = f"a round trip of {format_duration(self.rtt_s)}" if self.rtt_s else "no round trip measured yet"
        return f"{rate}, {trip}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndBudget:
    """What a syncer that is told to end may take, and the limits of its store's lock: constants of theirs.

    Attributes:
        within_s: All of it, at the very most.
        renew_s, watch_s: The lock says that it lives so often; after so long without, another may have it.
    """

    within_s: float
    renew_s: float
    watch_s: float


def learner_deadlines(*, lease_s: float, overlap_steps: int, uplink: LinkFacts) -> tuple[Deadline, ...]:
    """All limits that a learner goes by.

    Args:
        lease_s: `sync.membership_lease`.
        overlap_steps: tau.
        uplink: Of its region.
    """
    retry = reconnects(lease_s)
    return (
        Deadline(name="group_meets", limit_s=GROUP_MEET_S, follows="fixed; the processes of one region"),
        *_connection(),
        Deadline(
            name="reconnect_first",
            limit_s=retry.initial_s,
            follows="fixed, and doubled at each failure; half is chance",
        ),
        Deadline(
            name="reconnect_max",
            limit_s=retry.max_s,
            follows=f"half of sync.membership_lease, at most {RECONNECT_MAX_S:g} s",
        ),
        Deadline(
            name="heartbeat",
            limit_s=heartbeat_s(lease_s),
            follows=f"sync.membership_lease / {_HEARTBEATS_PER_LEASE}",
        ),
        *_in_steps("upload_spread", UPLINK_SHARE * overlap_steps, f"{UPLINK_SHARE:g} of sync.overlap_steps"),
        Deadline(name="upload_progress", limit_s=uplink.progress_s, follows=f"uplink: {uplink.words}"),
        Deadline(name="upload_resend", limit_s=RESEND_MIN_S, follows="fixed; longer where uploads usually take longer"),
        Deadline(name="donor_keep", limit_s=DONOR_KEEP_S, follows="keepalive, reconnect_max and connect together"),
        Deadline(name="rejoin_patience", limit_s=REJOIN_PATIENCE_S, follows="twice donor_keep: for two donors"),
        Deadline(name="uplink_restart_max", limit_s=UPLINK_RESTART.max_s, follows="fixed; doubled up to it"),
        Deadline(name="goodbye", limit_s=GOODBYE_S, follows="fixed, more than close; then the uplink is killed"),
        Deadline(name="uplink_dying", limit_s=UPLINK_DYING_S, follows="fixed; then an uplink that left is killed"),
    )


def syncer_deadlines(
    *,
    lease_s: float,
    start_timeout_s: float,
    overlap_steps: int,
    bound_steps: float,
    downlinks: Mapping[str, LinkFacts],
    end: EndBudget,
    has_store: bool,
) -> tuple[Deadline, ...]:
    """All limits that a syncer goes by.

    Args:
        lease_s: `sync.membership_lease`.
        start_timeout_s: `run.start_timeout`.
        overlap_steps: tau.
        bound_steps: `sync.overwritten_steps_max`.
        downlinks: To each configured learner.
        end: See there.
        has_store: Whether copies of the state go anywhere.
    """
    slowest = max(downlinks, key=lambda name: downlinks[name].progress_s)
    spread_steps = DOWNLINK_SHARE * overlap_steps
    store = (
        Deadline(name="store_renew", limit_s=end.renew_s, follows="fixed; at least three are within store_watch"),
        Deadline(name="store_watch", limit_s=end.watch_s, follows="fixed; a lock that is silent so long is free"),
        Deadline(name="end_ship", limit_s=SHIP_LAST_S, follows="fixed, and less where end_within leaves less"),
    )
    return (
        Deadline(name="start", limit_s=start_timeout_s, follows="run.start_timeout"),
        *_connection(),
        Deadline(name="hello", limit_s=HELLO_S, follows="fixed, three times connect"),
        Deadline(
            name="lease",
            limit_s=lease_s,
            follows=f"sync.membership_lease; {_LEASE_STEPS} steps of the learner where that is longer",
        ),
        Deadline(name="round_first_window", limit_s=FIRST_WINDOW_S, follows="fixed, until a step has been timed"),
        Deadline(
            name="round_window_max",
            limit_s=WINDOW_MAX_S,
            follows="fixed; windows double up to it, and last twice the slowest learner's usual answer",
        ),
        *_in_steps("grace_max", bound_steps, "sync.overwritten_steps_max, from a round's opening"),
        *_in_steps("update_spread", spread_steps, f"{DOWNLINK_SHARE:g} of sync.overlap_steps"),
        Deadline(
            name="update_progress",
            limit_s=downlinks[slowest].progress_s,
            follows=f"the slowest downlink, {slowest}'s: {downlinks[slowest].words}",
        ),
        Deadline(name="work_retry", limit_s=WORK_RETRY_S, follows="fixed; of merges and deliveries"),
        Deadline(name="donor_meets_joiner", limit_s=MEET_S, follows="keepalive, reconnect_max and connect together"),
        Deadline(name="journal_retry_max", limit_s=JOURNAL_RETRY_MAX_S, follows="fixed; doubled up to it"),
        Deadline(name="evaluator_silent", limit_s=EVALUATOR_SILENT_S, follows="fixed; it speaks after every batch"),
        *(store if has_store else ()),
        Deadline(name="learners_leave", limit_s=LEARNERS_LEAVE_S, follows="fixed, after the last round"),
        Deadline(name="evaluator_leaves", limit_s=EVALUATOR_LEAVE_S, follows="fixed; then it is killed"),
        Deadline(name="end_merges", limit_s=DRAIN_S, follows="fixed, from the signal on"),
        Deadline(name="end_snapshot", limit_s=LAST_SNAPSHOT_S, follows="fixed, after end_merges"),
        Deadline(
            name="end_within",
            limit_s=end.within_s,
            follows="said by what started it; else less than 30 s, when schedulers kill",
        ),
    )


def in_short(rows: Sequence[Deadline]) -> dict[str, str]:
    """A table as fields of the event with which a process begins: the limits alone, in one line."""
    limits = ", ".join(f"{row.name} {row.limit}" for row in sorted(rows, key=lambda row: row.name))
    return {"limits": limits, "detail": "`wan-diloco config show CONFIG --deadlines` says what each follows from"}


def in_words(rows: Sequence[Deadline]) -> dict[str, str]:
    """A table as fields of one event: how long each is, and what it follows from."""
    return {row.name: f"{row.limit}: {row.follows}" for row in rows}


def _connection() -> tuple[Deadline, ...]:
    return (
        Deadline(name="connect", limit_s=CONNECT_S, follows="fixed: five round trips of the worst line, twice"),
        Deadline(name="close", limit_s=CLOSE_S, follows="fixed"),
        Deadline(
            name="keepalive",
            limit_s=KEEPALIVE_QUIET_S + KEEPALIVE_ANSWER_S,
            follows=f"fixed: asked after {KEEPALIVE_QUIET_S:g} s of silence, {KEEPALIVE_ANSWER_S:g} s to answer",
        ),
    )


def _in_steps(name: str, limit_steps: float, follows: str) -> tuple[Deadline, ...]:
    """None in lockstep, where nothing overlaps."""
    return (Deadline(name=name, limit_steps=limit_steps, follows=follows),) if limit_steps else ()
