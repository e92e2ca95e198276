"""What the drivers see of a transport, whichever it is.

All of it lives on one event loop: nothing here may be called from another thread. Implementations:
`grpc_server` and `grpc_client` for real networks, `memory` in one process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wan_diloco.protocol.events import SessionId
from wan_diloco.protocol.messages import (
    ContributionHeader,
    LearnerMessage,
    RefusalReason,
    SyncerMessage,
    UpdateHeader,
)
from wan_diloco.units import TransferId
from wan_diloco.wire.frames import Buffers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wan_diloco.transport.state_calls import StateSink

__all__ = [
    "Connection",
    "ConnectionFactory",
    "Counters",
    "Frames",
    "Session",
    "SyncerHandler",
    "SyncerServer",
    "UploadSink",
]

# Bulk messages as `wire.frames.pack` makes them, in order.
Frames = Sequence[bytes]


@dataclass(slots=True, kw_only=True)
class Counters:
    """What one connection moved, cumulative, counted where messages meet the network.

    Owner: the transport; everybody else reads. Headers are included, what TCP, TLS and HTTP/2 add is not.

    Attributes:
        uplink_bytes: Bulk from the learner, including what was sent twice.
        downlink_bytes: Bulk to the learner.
        control_bytes: Control messages, both ways.
    """

    uplink_bytes: int = 0
    downlink_bytes: int = 0
    control_bytes: int = 0

    def add(self, other: Counters) -> None:
        """What another one moved belongs to this as well."""
        self.uplink_bytes += other.uplink_bytes
        self.downlink_bytes += other.downlink_bytes
        self.control_bytes += other.control_bytes


class Session(Protocol):
    """The syncer's end of one learner's connection."""

    @property
    def session(self) -> SessionId:
        """Never used again, also not by the same learner."""
        ...

    @property
    def peer(self) -> str:
        """Where the learner is, for logs."""
        ...

    @property
    def counters(self) -> Counters:
        """What this session moved so far."""
        ...

    def set_downlink_rate(self, rate_bytes_per_s: float | None) -> None:
        """Cap the updates of this session; None (the state at its birth) for no cap.

        To be called when a Hello told whose session it is.
        """
        ...

    def set_round_trip(self, rtt_s: float) -> None:
        """How long a round trip takes, by what the learner has measured; 0 (the state at birth) when nobody knows."""
        ...

    def send(self, message: SyncerMessage) -> None:
        """Queue a control message; never blocks.

        An unsent `Pace` is replaced by a newer one. After the session's end this does nothing: the handler
        hears of the end by `disconnected`. A peer that lets the queue run full is cut off.
        """
        ...

    async def send_update(self, header: UpdateHeader, segments: Sequence[Frames], spread_s: float = 0.0) -> None:
        """Send an update; returns when its last byte was handed to the network.

        Updates of a session go one after the other, in the order of the calls. One that has begun goes on
        to its end also when the caller is cancelled, since a half couldn't be told from the next.

        Args:
            header: What it is.
            segments: The packed buffers of each of the header's segments, in order.
            spread_s: Over how long to spread the bytes, unless others wait behind them that are due earlier; 0 for as
                fast as the caps allow.

        Raises:
            TransportError: The session ended before.
        """
        ...

    def close(self, reason: str) -> None:
        """End the session after the control messages queued so far have left; idempotent."""
        ...


class UploadSink(Protocol):
    """Where the bytes of one accepted contribution go; the handler makes it, one stream at a time feeds it.

    It outlives a stream that breaks: the next one that offers the same snapshot goes on where that stopped.
    """

    @property
    def gap(self) -> tuple[int, int]:
        """The first part [start, end) of the row of codes and scales that is missing; empty when none is."""
        ...

    @property
    def stored_bytes(self) -> int:
        """How much of the row is there."""
        ...

    async def put(self, message: bytes) -> None:
        """Check a bulk message and store what it carries; returns when there is room for the next.

        It may be cancelled: its chunks are then there or not, but never in part.

        Raises:
            DecodeError: As `wire.frames.Assembler.add`.
            TransportError: It can't be stored now, and the upload has to be begun again.
        """
        ...

    def rest(self) -> None:
        """The stream broke; another may go on with `resume`."""
        ...

    def resume(self) -> bool:
        """Another stream came: whether what is there can be built on; then nobody lets go of it until it rests again.

        A sink that rests for long may have been let go of.
        """
        ...

    def complete(self, session: Session, header: ContributionHeader, wire_bytes: int) -> None:
        """All bytes are here, each with a good checksum; the last call.

        Args:
            session: Where the last of them came from.
            header: As it was offered last.
            wire_bytes: What crossed the wire for it, headers and repeated chunks included.
        """
        ...

    def abandon(self) -> None:
        """Nothing more comes of it; the last call."""
        ...


class SyncerHandler(Protocol):
    """What a syncer's service does about what arrives. Called on the event loop; must not block."""

    def connected(self, session: Session) -> None:
        """A learner opened a session; it hasn't said anything yet."""
        ...

    def said(self, session: Session, message: LearnerMessage) -> None:
        """A control message, in the order sent."""
        ...

    def disconnected(self, session: Session, reason: str) -> None:
        """The session ended, whoever ended it; the last call about it."""
        ...

    def may_relay(self, session: Session, transfer: TransferId, *, giving: bool) -> bool:
        """Whether a session may give, or take, the state that this transfer is about."""
        ...

    async def upload_offered(self, session: Session, header: ContributionHeader) -> UploadSink | None:
        """Where the bytes of a contribution are to go; None when they aren't wanted.

        The transport may go on with an older sink of the same contribution instead, and not use this one.
        """
        ...

    def upload_failed(self, session: Session, header: ContributionHeader, reason: RefusalReason, detail: str) -> None:
        """An accepted contribution's bytes turned out bad beyond repair. A broken stream isn't this."""
        ...

    def refused(self, peer: str, reason: RefusalReason, detail: str) -> None:
        """Something was refused that no learner answers for: a call without a Hello, or one of garbage.

        Args:
            peer: Where it came from.
            reason: To be counted under.
            detail: One sentence; it may quote what a stranger sent, and is of bounded length.
        """
        ...

    def status(self) -> dict[str, object]:
        """What to answer to `fetch_status`: anything that JSON can write."""
        ...


class SyncerServer(Protocol):
    """Listens, and tells a handler."""

    async def start(self) -> str:
        """Begin to listen.

        Returns:
            The address bound, "host:port".

        Raises:
            ConfigError: The address can't be listened on.
        """
        ...

    def set_rates(self, *, ingress_bytes_per_s: float | None, egress_bytes_per_s: float | None) -> None:
        """Cap what all sessions together receive and are sent, from now on; None (the state at birth) for no cap.

        What comes in is slowed down by not reading it; control never waits.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Close all sessions, giving what was queued that long to leave; every handler call is over after."""
        ...


class Connection(Protocol):
    """A learner's end; used once: after its loss, make another."""

    @property
    def counters(self) -> Counters:
        """What this connection moved so far."""
        ...

    async def connect(self) -> None:
        """Open the session.

        Raises:
            PeerUnavailable: Nobody answers; trying again later makes sense.
            AuthError: The peer refuses us, or we it; trying again doesn't.
        """
        ...

    def send(self, message: LearnerMessage) -> None:
        """Queue a control message; never blocks.

        An unsent `Report` is replaced by a newer one. After the connection's loss this does nothing:
        `messages` tells of it.
        """
        ...

    def set_round_trip(self, rtt_s: float) -> None:
        """How long a round trip takes; 0 (the state at birth) when nobody knows."""
        ...

    def messages(self) -> AsyncIterator[SyncerMessage]:
        """What the syncer says, in order; ends by raising.

        To be iterated by one task, once.

        Raises:
            TransportError: The connection is lost, or was closed by either end.
        """
        ...

    def updates(self) -> AsyncIterator[tuple[UpdateHeader, list[Buffers]]]:
        """Updates that came whole, with the buffers of each of their segments; ends by raising.

        To be iterated by one task, once. The next is read only when it is asked for.

        Raises:
            TransportError: The connection is lost, or was closed by either end.
        """
        ...

    async def maintain(self) -> None:
        """See that there are as many calls for updates as the link needs; ends by raising.

        To be run by one task, beside `messages` and `updates`; without it updates come over one call.

        Raises:
            TransportError: The connection is lost, or was closed by either end.
        """
        ...

    async def upload(
        self, header: ContributionHeader, frames: Frames, spread_s: float, *, unasked: bool = False
    ) -> bool:
        """Send a contribution, until the syncer has it whole; it may be cancelled at any time.

        After a broken one, call it again with the same arguments, on this connection or another:
        what the syncer already has isn't sent twice.

        Args:
            header: What it is.
            frames: Its packed buffers.
            spread_s: Over how long to spread the bytes; 0 for as fast as the uplink's rate allows.
            unasked: Send them right behind the header, which saves a round trip. Not after a broken one, since
                the syncer may have a part already; and in vain if it refuses.

        Returns:
            False if the syncer refused it; a control message tells why.

        Raises:
            TransportError: The stream broke. Whether the connection lives on, `messages` tells.
        """
        ...

    async def give_state(self, transfer: TransferId, row: NDArray[np.uint8]) -> None:
        """Send a state to whom the syncer chose, behind everything else; it may be cancelled at any time.

        Args:
            transfer: As the syncer named it.
            row: Bytes that don't change meanwhile.

        Raises:
            TransportError: It isn't wanted any more, or the stream broke.
        """
        ...

    async def take_state(self, transfer: TransferId, sink: StateSink) -> None:
        """Take a state from whom the syncer chose, from where the sink stands; it may be cancelled at any time.

        Raises:
            TransportError: It broke before its end; what came is in the sink.
        """
        ...

    async def close(self) -> None:
        """Leave, after the control messages queued so far have left (for a bounded time); idempotent."""
        ...


# How a driver gets its next connection after losing one.
ConnectionFactory = Callable[[], Connection]
