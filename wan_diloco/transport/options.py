"""Limits and timeouts of a transport, with the reason for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from wan_diloco.protocol.deadlines import CLOSE_S, CONNECT_S, HELLO_S, KEEPALIVE_ANSWER_S, KEEPALIVE_QUIET_S
from wan_diloco.protocol.link_plan import TcpLimits, channels_needed
from wan_diloco.transport.kernel import tcp_limits

__all__ = ["ConnectionOptions", "Keepalive", "ServerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """How much peers may make a syncer hold.

    Attributes:
        sessions_max: Learners at once, those that reconnect while their old session dies included. When that many
            are there, the oldest that said no Hello, or is to go and doesn't, makes room for the next.
        hello_timeout_s: For a Hello; several round trips of the slowest link.
        uploads_max: Of one session at once; `protocol.schedule.Schedule.uploads_max` says what a learner needs.
        outbox_max: Control messages that wait for a peer that doesn't read; then it is cut off.
        updates_max: Updates of one session that wait; one a fragment is the most that makes sense.
        payload_bytes_max: Of one contribution before zstd.
        partials_max: Broken uploads kept per learner, to be resumed.
        partial_bytes_max: Of all kept broken uploads together; the oldest goes first.
        bad_chunks_max: Chunks of one upload that may be asked for again.
    """

    sessions_max: int = 256
    hello_timeout_s: float = HELLO_S
    uploads_max: int = 8
    outbox_max: int = 1_024
    updates_max: int = 65_536
    payload_bytes_max: int = 8 * 2**30
    partials_max: int = 4
    partial_bytes_max: int = 2 * 2**30
    bad_chunks_max: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """How a learner's end behaves.

    Attributes:
        connect_timeout_s: For the whole of `connect`; several round trips of the slowest link.
        close_timeout_s: For what is queued to leave when closing.
        outbox_max: Control messages that wait; then the connection counts as lost.
        payload_bytes_max: Of one segment of an update before zstd; f32 of a big fragment must fit.
        channels: Connections over which an upload or an update may go; 0 for as many as the link needs.
        downlink_bytes_per_s: Of the line, as far as anybody knows.
        tcp: What the kernel lets each connection have.
    """

    connect_timeout_s: float = CONNECT_S
    close_timeout_s: float = CLOSE_S
    outbox_max: int = 1_024
    payload_bytes_max: int = 8 * 2**30
    channels: int = 0
    downlink_bytes_per_s: float | None = None
    tcp: TcpLimits = field(default_factory=tcp_limits)

    def channels_for(self, rate_bytes_per_s: float | None, rtt_s: float) -> int:
        """Over how many connections to go.

        Args:
            rate_bytes_per_s: Of the line in that direction; None if nobody knows.
            rtt_s: 0 if nobody knows: then it is one.
        """
        if rtt_s <= 0:
            return 1
        return self.channels or channels_needed(rate_bytes_per_s, rtt_s, self.tcp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """When a silent connection counts as dead.

    Attributes:
        time_s: Silence after which it is asked for a sign of life.
        timeout_s: For that sign; several round trips of the slowest link, and what its buffers hold before it.
    """

    time_s: float = KEEPALIVE_QUIET_S
    timeout_s: float = KEEPALIVE_ANSWER_S
