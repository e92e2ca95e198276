"""A learner's end of its connection, whatever network carries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from wan_diloco.errors import AuthError, DecodeError, PeerUnavailable, TransportError
from wan_diloco.protocol.messages import ContributionHeader, LearnerMessage, Report, SyncerMessage, UpdateHeader
from wan_diloco.transport.beside import beside
from wan_diloco.transport.interface import Counters, Frames
from wan_diloco.transport.lifetime import Lifetime
from wan_diloco.transport.options import ConnectionOptions
from wan_diloco.transport.outbox import Outbox
from wan_diloco.transport.pacer import Pacer, chunk_bytes_for
from wan_diloco.transport.state_calls import StateSink, give_state, take_state
from wan_diloco.transport.streams import (
    SESSION_KEY,
    STRIPE_KEY,
    TOKEN_KEY,
    WINDOW_KEY,
    ClientStream,
    Dialer,
    Metadata,
    Method,
)
from wan_diloco.transport.update_reader import UpdateReader
from wan_diloco.transport.upload_sender import Lanes, UploadSender
from wan_diloco.transport.window import WindowPlan
from wan_diloco.units import TransferId
from wan_diloco.wire.convert import StateCall, decode_syncer, encode_learner
from wan_diloco.wire.frames import CHUNK_BYTES_DEFAULT, Buffers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ClientConnection"]

# Between two tries of a call that isn't needed, only of use.
_STRIPE_PAUSE_S: Final = 5.0


class ClientConnection:
    """Implements `interface.Connection`; used once, on one event loop. It starts no tasks of its own.

    Args:
        dialer: Opens calls; owned by this connection from now on.
        pacer: Of the uplink; shared with the connections before and after.
        options: Timeouts and limits.
    """

    def __init__(self, dialer: Dialer, pacer: Pacer, options: ConnectionOptions) -> None:
        """Not connected yet."""
        self._dialer = dialer
        self._pacer = pacer
        self._options = options
        self._counters = Counters()
        self._outbox = Outbox(Report, options.outbox_max)
        self._control: ClientStream | None = None
        self._download: ClientStream | None = None
        self._credentials: Metadata = {}
        self._lifetime = Lifetime()
        self._closing = False
        self._rtt_s = 0.0
        self._uploads = 0
        self._measured = asyncio.Event()
        self._reader = UpdateReader(self._counters, options.payload_bytes_max, pacer.acknowledge)
        # Whether `messages` is reading right now, and that it has read.
        self._reading = False
        self._read = asyncio.Event()

    @property
    def counters(self) -> Counters:
        """What this connection moved so far."""
        return self._counters

    async def connect(self) -> None:
        """Open the session.

        Raises:
            PeerUnavailable: Nobody answers; trying again later makes sense.
            AuthError: The peer refuses us, or we it; trying again doesn't.
        """
        if self._control is not None or self._closing:
            raise AssertionError("a connection is used once")
        self._control = self._dialer.control(self._outgoing())
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                metadata = await self._control.accepted()
        except BaseException as problem:
            self._lose(f"it couldn't connect: {problem}")
            await self._dialer.close()
            match problem:
                case AuthError() | PeerUnavailable():
                    raise
                case TimeoutError():
                    text = f"no answer within {self._options.connect_timeout_s:g} s"
                    raise PeerUnavailable(text) from problem
                case TransportError():
                    raise PeerUnavailable(str(problem)) from problem
                case _:
                    raise
        self._credentials = {key: metadata.get(key, "") for key in (SESSION_KEY, TOKEN_KEY)}
        self._download = self._dialer.call(Method.DOWNLOAD, self._credentials)

    def send(self, message: LearnerMessage) -> None:
        """Queue a control message; never blocks."""
        if not self._outbox.put(message, encode_learner(message)):
            self._lose("the syncer doesn't read what it is told")

    def set_round_trip(self, rtt_s: float) -> None:
        """How long a round trip takes; 0 when nobody knows."""
        self._rtt_s = rtt_s
        self._measured.set()

    async def messages(self) -> AsyncIterator[SyncerMessage]:
        """What the syncer says, in order; ends by raising.

        Raises:
            TransportError: The connection is lost, or was closed by either end.
        """
        control = self._opened(self._control)
        while not self._closing:
            yield await self._next_message(control)
        # Whoever closes is still waiting for what is queued to leave: the call must not be cancelled here.
        raise TransportError("closed")

    async def updates(self) -> AsyncIterator[tuple[UpdateHeader, list[Buffers]]]:
        """Updates that came whole, with the buffers of each of their segments; ends by raising.

        Raises:
            TransportError: The connection is lost, or was closed by either end.
        """
        incoming = self._reader.updates(self._opened(self._download))
        try:
            while True:
                with self._lifetime.bound():
                    update = await anext(incoming, None)
                if update is None:
                    raise TransportError("the syncer ended the download call")
                yield update
        except TransportError as problem:
            self._lose(str(problem))
            raise

    async def maintain(self) -> None:
        """Keep as many download calls as the link needs, from when a round trip is known; ends by raising.

        Raises:
            TransportError: The connection is lost, or was closed by either end.
        """
        with self._lifetime.bound():
            # What is open stays open, however the round trip changes: a call more costs nothing.
            while (stripes := self._downloads - 1) < 1:
                self._measured.clear()
                await self._measured.wait()
            async with beside(*(self._stripe(number + 1) for number in range(stripes))):
                await asyncio.Event().wait()

    async def upload(
        self, header: ContributionHeader, frames: Frames, spread_s: float, *, unasked: bool = False
    ) -> bool:
        """Send a contribution, until the syncer has it whole; it may be cancelled at any time.

        Args:
            header: What it is.
            frames: Its packed buffers.
            spread_s: Over how long to spread the bytes.
            unasked: Don't wait to be asked for them.

        Returns:
            False if the syncer refused it; a control message tells why.

        Raises:
            TransportError: The stream broke.
        """
        self._opened(self._control)
        sender = UploadSender(header, frames, self._lanes(frames), self._pacer, self._counters)
        with self._lifetime.bound():
            return await sender.send(spread_s, unasked=unasked)

    async def give_state(self, transfer: TransferId, row: NDArray[np.uint8]) -> None:
        """Send a state to whom the syncer chose, behind everything else; it may be cancelled at any time.

        Args:
            transfer: As the syncer named it.
            row: Bytes that don't change meanwhile.

        Raises:
            TransportError: It isn't wanted any more, or the stream broke.
        """
        self._opened(self._control)
        stream = self._dialer.call(Method.GIVE, self._credentials)
        try:
            with self._lifetime.bound():
                await give_state(stream, transfer, row, pacer=self._pacer, counters=self._counters, rtt_s=self._rtt_s)
        finally:
            stream.cancel()

    async def take_state(self, transfer: TransferId, sink: StateSink) -> None:
        """Take a state from whom the syncer chose, from where the sink stands; it may be cancelled at any time.

        Args:
            transfer: As the syncer named it.
            sink: Where to.

        Raises:
            TransportError: It broke before its end; what came is in the sink.
        """
        self._opened(self._control)
        stream = self._dialer.call(Method.TAKE, self._credentials)
        call = StateCall(
            transfer=transfer,
            start=sink.received_bytes,
            chunk_bytes=chunk_bytes_for(self._options.downlink_bytes_per_s, CHUNK_BYTES_DEFAULT),
            rtt_s=self._rtt_s,
        )
        try:
            with self._lifetime.bound():
                await take_state(stream, call, sink, counters=self._counters, heard=self._pacer.acknowledge)
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Leave, after the control messages queued so far have left (for a bounded time); idempotent."""
        self._outbox.close()
        self._closing = True
        try:
            if self._control is not None and self._credentials and self._lifetime.reason is None:
                async with asyncio.timeout(self._options.close_timeout_s):
                    await self._drain(self._control)
        except (TimeoutError, TransportError):
            # Nobody is left to tell; what matters is that we let go.
            pass
        finally:
            self._lose("closed")
            await self._dialer.close()
            # A network may hold sockets as long as its calls are held.
            self._control = self._download = None

    @property
    def _downloads(self) -> int:
        """How many download calls the link needs, as far as that is known."""
        return self._options.channels_for(self._options.downlink_bytes_per_s, self._rtt_s)

    async def _stripe(self, number: int) -> None:
        """Keep one more download call; without it everything comes over the others."""
        while True:
            stream = self._dialer.call(Method.DOWNLOAD, {**self._credentials, STRIPE_KEY: str(number)}, number)
            try:
                await self._reader.stripe(stream)
            except TransportError:
                await asyncio.sleep(_STRIPE_PAUSE_S)
            finally:
                stream.cancel()

    def _lanes(self, frames: Frames) -> Lanes:
        """Where an upload may go: each begins on another channel than the one before."""
        self._uploads += 1
        first = self._uploads
        rate = self._pacer.rate_bytes_per_s
        number = self._options.channels_for(rate, self._rtt_s)
        plan = WindowPlan.of(rate, self._rtt_s, len(frames[0]) if frames else 1, number)
        metadata = {**self._credentials, WINDOW_KEY: str(plan.limit_bytes)}

        def open_lane(lane: int) -> ClientStream:
            marked = {**metadata, STRIPE_KEY: str(lane)} if lane else metadata
            return self._dialer.call(Method.UPLOAD, marked, (first + lane) % number)

        return Lanes(open=open_lane, number=number, plan=plan)

    async def _next_message(self, control: ClientStream) -> SyncerMessage:
        try:
            with self._lifetime.bound():
                data = await self._read_control(control)
            if data is None:
                raise TransportError(f"the syncer ended the session: {control.reason()}")
            self._counters.control_bytes += len(data)
            return decode_syncer(data)
        except DecodeError as problem:
            reason = f"the syncer said something that makes no sense: {problem}"
            self._lose(reason)
            raise TransportError(reason) from problem
        except TransportError as problem:
            self._lose(str(problem))
            raise

    async def _read_control(self, control: ClientStream) -> bytes | None:
        self._reading = True
        try:
            return await control.read()
        finally:
            self._reading = False
            self._read.set()

    async def _drain(self, control: ClientStream) -> None:
        """Read until the syncer has seen our end and ended the call too."""
        while True:
            if self._reading:
                # `messages` does it, and stops after this one.
                self._read.clear()
                await self._read.wait()
            elif await control.read() is None:
                return

    async def _outgoing(self) -> AsyncIterator[bytes]:
        while (data := await self._outbox.get()) is not None:
            self._counters.control_bytes += len(data)
            self._pacer.spend(len(data))
            yield data

    def _lose(self, reason: str) -> None:
        """Everything that works over this connection ends; must not be called from inside `bound`."""
        self._outbox.close()
        self._lifetime.end(reason)
        for stream in (self._control, self._download):
            if stream is not None:
                stream.cancel()

    def _opened(self, stream: ClientStream | None) -> ClientStream:
        if stream is None:
            if self._closing:
                # What was under way when we left finds this out now, and isn't wrong for that.
                raise TransportError("closed")
            raise AssertionError("connect first")
        return stream
