"""The uplink's work: drives the learner's machine, talks to the syncer, and does the maths of fragments aside.

Everything but the maths happens on one event loop: an event goes into the machine, its effects are performed in
order, and none of them waits. What takes time (encoding, decoding, transfers) comes back as an event. This runs as
a process of its own, and inside one process over the memory transport and virtual time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

from wan_diloco.errors import AuthError, DecodeError, NonFiniteError, PeerUnavailable, TransportError
from wan_diloco.learner.ipc import Admitted, CommandSink
from wan_diloco.learner.state_keeper import StateKeeper
from wan_diloco.learner.upload_keeper import UploadKeeper
from wan_diloco.protocol.events import (
    AllowSteps,
    ApplyUpdate,
    BoundaryPassed,
    Connect,
    Connected,
    ConnectionLost,
    DescribeState,
    DropUpload,
    EndGiving,
    ExitLearner,
    FetchState,
    GiveState,
    InstallMoments,
    InstallUpdate,
    LearnerEffect,
    LearnerEvent,
    LimitUplink,
    PinState,
    RefuseSyncer,
    ReleaseState,
    RequestSnapshot,
    SendToSyncer,
    SetPace,
    SetRoundTrip,
    ShowReason,
    StartUpload,
    SyncerSaid,
    TimerFired,
    UpdateApplied,
    UpdateArrived,
    UpdateBroken,
    UploadBroken,
)
from wan_diloco.protocol.messages import (
    ContributionHeader,
    ContributionRefused,
    Goodbye,
    RefusalReason,
    UpdateHeader,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Executor

    from wan_diloco.clock import Clock
    from wan_diloco.config import WireSettings
    from wan_diloco.learner.held import HeldFragment
    from wan_diloco.learner.ipc import InstallValue
    from wan_diloco.learner.state_area import StateArea
    from wan_diloco.learner.uplink_rate import UplinkRate
    from wan_diloco.protocol.learner_machine import LearnerMachine
    from wan_diloco.transport.interface import Connection, ConnectionFactory
    from wan_diloco.units import FragmentId
    from wan_diloco.wire.frames import Buffers

__all__ = ["UplinkService"]

T = TypeVar("T")


class UplinkService:
    """A learner, as the syncer sees it.

    Owner: the event loop that runs `run`; every method is called on it.

    Args:
        machine: Decides.
        connect: Makes the next connection; may raise what `Connection.connect` may.
        clock: For the machine; the timer runs by the loop's.
        worker: For maths; one thread that keeps the order of its jobs, or inline.
        rows: The same for rows of moments, so that no contribution waits behind them.
        sink: To the trainer.
        fragments: All, in order.
        wire: How contributions are written.
        rate: How fast they may leave.
        show: Told why something doesn't happen, once a change.
        state: The row of inner moments shared with the trainer.
        measured: Told a round trip, whenever it is another than before.
    """

    def __init__(
        self,
        *,
        machine: LearnerMachine,
        connect: ConnectionFactory,
        clock: Clock,
        worker: Executor,
        rows: Executor,
        sink: CommandSink,
        fragments: Sequence[HeldFragment],
        wire: WireSettings,
        rate: UplinkRate,
        show: Callable[[ShowReason], None],
        state: StateArea,
        measured: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Do nothing yet."""
        self._machine = machine
        self._connect = connect
        self._clock = clock
        self._worker = worker
        self._sink = sink
        self._fragments = fragments
        self._wire = wire
        self._rate = rate
        self._show = show
        self._measured = measured
        self._now_s = clock.now_s()
        self._events: deque[LearnerEvent] = deque()
        self._processing = False
        self._connection: Connection | None = None
        self._uploads = UploadKeeper(
            spawn=self._spawn, worker=worker, broken=self._upload_broke, unusable=self._contribution_unusable
        )
        self._states = StateKeeper(state, spawn=self._spawn, worker=rows, tell=self._process)
        # What an event carries that the machine must not see, until the event has been handled.
        self._buffers: dict[UpdateHeader, list[Buffers]] = {}
        self._deferred_snapshots: dict[FragmentId, RequestSnapshot] = {}
        # Why the connection is to be given up; empty while it isn't.
        self._refused = ""
        self._shown: dict[str, str] = {}
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._finished = asyncio.Event()

    async def run(self) -> None:
        """Work until the learner's part is over, or `leave` was called; then say goodbye and end the connection."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for effect in self._machine.start():
                self._perform(effect)
            self._arm_timer()
            await self._finished.wait()
            if self._timer is not None:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()

    def passed(self, boundary: BoundaryPassed) -> None:
        """The trainer stands between two steps."""
        self._process(boundary)

    def leave(self, reason: str | None) -> None:
        """End.

        Args:
            reason: What the syncer is told; None if the trainer died, and the syncer will find out by itself.
        """
        if self._connection is not None and reason is not None:
            self._connection.send(Goodbye(reason=reason))
        self._finished.set()

    # ---- events into the machine, effects out of it ----------------------------------------------

    def _process(self, event: LearnerEvent) -> None:
        """Handle an event and all that follow from it; one that comes up meanwhile waits its turn."""
        self._events.append(event)
        if self._processing:
            return
        self._processing = True
        try:
            while self._events and not self._finished.is_set():
                self._handle(self._events.popleft())
        finally:
            self._processing = False
        self._arm_timer()

    def _handle(self, event: LearnerEvent) -> None:
        self._now_s = max(self._now_s, self._clock.now_s())
        if isinstance(event, BoundaryPassed):
            for installed in event.installed:
                self._fragments[installed.fragment_id].confirmed(installed)
        for effect in self._machine.handle(event, self._now_s):
            self._perform(effect)
        if isinstance(event, BoundaryPassed):
            for installed in event.installed:
                self._send_install(installed.fragment_id)
        elif isinstance(event, SyncerSaid) and isinstance(event.message, Welcome):
            # Behind the data of the life: an uplink that dies between the two is followed by one that asks for both.
            machine = self._machine
            self._sink.send(Admitted(incarnation=machine.incarnation, term=machine.term, term_id=machine.term_id))
        elif isinstance(event, UpdateArrived):
            self._buffers.pop(event.header, None)

    def _perform(self, effect: LearnerEffect) -> None:
        match effect:
            case Connect():
                self._spawn(self._session())
            case RefuseSyncer(reason=reason):
                self._refused = reason
            case SendToSyncer(message=message):
                if self._connection is not None:
                    self._connection.send(message)
            case RequestSnapshot(fragment_id=fragment_id):
                if self._fragments[fragment_id].outbox_busy:
                    self._deferred_snapshots[fragment_id] = effect
                else:
                    self._sink.send(effect)
            case StartUpload(header=header, spread_s=spread_s):
                self._start_upload(header, spread_s)
            case DropUpload(header=header):
                self._uploads.drop(header)
            case ApplyUpdate(header=header):
                self._spawn(self._apply(header, self._buffers[header]))
            case InstallUpdate(fragment_id=fragment_id):
                self._fragments[fragment_id].wish(effect)
                self._send_install(fragment_id)
            case PinState():
                self._states.pin(partial(self._sink.send, effect))
            case AllowSteps() | SetPace() | InstallMoments():
                self._sink.send(effect)
            case DescribeState() | GiveState() | EndGiving() | FetchState() | ReleaseState():
                self._move_state(effect)
            case SetRoundTrip(rtt_s=rtt_s):
                self._measured(rtt_s)
                if self._connection is not None:
                    self._connection.set_round_trip(rtt_s)
            case LimitUplink(rate_bytes_per_s=rate):
                self._rate.set_granted(rate)
            case ExitLearner():
                self._sink.send(effect)
                self._finished.set()
            case ShowReason(topic=topic, text=text):
                self._show(effect)
                if self._shown.get(topic, "") != text:
                    # A trainer that hangs takes nothing, and a link that breaks goes on to break.
                    self._shown[topic] = text
                    self._sink.send(effect)
            case _:
                assert_never(effect)

    def _move_state(self, effect: DescribeState | GiveState | EndGiving | FetchState | ReleaseState) -> None:
        match effect:
            case DescribeState(number=number):
                self._states.describe(number)
            case GiveState(transfer=transfer):
                if self._connection is not None:
                    self._states.give(transfer, self._connection)
            case EndGiving(transfer=transfer):
                self._states.end_giving(transfer)
            case FetchState(offer=offer):
                if self._connection is not None:
                    self._states.fetch(offer, self._connection)
            case ReleaseState():
                self._states.release()
            case _:
                assert_never(effect)

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_s = self._machine.deadline_s()
        if deadline_s is not None and not self._finished.is_set():
            delay_s = max(0.0, deadline_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired, deadline_s)

    def _timer_fired(self, deadline_s: float) -> None:
        # The loop rounds: a timer that is a hair early must not be armed again for no time at all.
        self._now_s = max(self._now_s, deadline_s)
        self._process(TimerFired())

    def _spawn(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        assert self._group is not None, "nothing happens before `run`"
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- the connection --------------------------------------------------------------------------

    async def _session(self) -> None:
        """One connection, from its attempt to its end."""
        reason, refused = "", False
        try:
            connection = self._connect()
            try:
                await connection.connect()
                self._connection = connection
                self._process(Connected())
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._read_messages(connection))
                    group.create_task(self._read_updates(connection))
                    group.create_task(connection.maintain())
            finally:
                self._connection = None
                self._uploads.stop_sending()
                self._states.stop()
                await connection.close()
        except* TransportError as errors:
            reason = "; ".join(dict.fromkeys(str(error) for error in _leaves(errors)))
            refused = any(isinstance(error, AuthError) for error in _leaves(errors))
        self._process(ConnectionLost(reason=reason, refused=refused))

    async def _read_messages(self, connection: Connection) -> None:
        async for message in connection.messages():
            self._process(SyncerSaid(message=message))
            if self._refused:
                reason, self._refused = self._refused, ""
                raise PeerUnavailable(reason)

    async def _read_updates(self, connection: Connection) -> None:
        async for header, buffers in connection.updates():
            self._buffers[header] = buffers
            self._process(UpdateArrived(header=header))

    # ---- downward: updates -----------------------------------------------------------------------

    async def _apply(self, header: UpdateHeader, buffers: list[Buffers]) -> None:
        fragment = self._fragments[header.fragment_id]
        job = fragment.apply_job(header, buffers)
        try:
            value_N = await asyncio.get_running_loop().run_in_executor(self._worker, job)
        except (DecodeError, NonFiniteError) as error:
            reason = _refusal(error.reason)
            self._process(UpdateBroken(fragment_id=header.fragment_id, version=header.to_version, reason=reason))
            return
        applied = UpdateApplied(fragment_id=header.fragment_id, version=header.to_version, resync=header.resync)
        fragment.applied(applied.version, value_N)
        self._process(applied)

    def _send_install(self, fragment_id: FragmentId) -> None:
        job = self._fragments[fragment_id].send_job()
        if job is not None:
            self._spawn(self._put_install(*job))

    async def _put_install(self, write: Callable[[], object], command: InstallValue) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, write)
        self._sink.send(command)

    # ---- upward: contributions -------------------------------------------------------------------

    def _start_upload(self, header: ContributionHeader, spread_s: float) -> None:
        fragment_id = header.key.fragment_id
        if header not in self._uploads:
            fragment = self._fragments[fragment_id]
            fragment.outbox_busy = True
            wire = self._wire.model_copy(update={"chunk_bytes": self._rate.chunk_bytes(self._wire.chunk_bytes)})
            self._uploads.encode(header, fragment.encode_job(wire), lambda: self._outbox_read(fragment_id))
        if self._connection is not None:
            self._uploads.send(header, self._connection, spread_s)

    def _outbox_read(self, fragment_id: FragmentId) -> None:
        self._fragments[fragment_id].outbox_busy = False
        deferred = self._deferred_snapshots.pop(fragment_id, None)
        if deferred is not None:
            self._sink.send(deferred)

    def _upload_broke(self, header: ContributionHeader) -> None:
        self._process(UploadBroken(header=header))

    def _contribution_unusable(self, header: ContributionHeader) -> None:
        """Our own weights aren't finite. The syncer would refuse such a contribution, and cure the learner by a resync.

        Both are done here, without sending what is no use.
        """
        refused = ContributionRefused(
            fragment_id=header.key.fragment_id,
            step_lo=header.key.step_lo,
            step_hi=header.step_hi,
            reason=RefusalReason.NON_FINITE,
            detail="the learner's own weights aren't finite",
        )
        self._process(SyncerSaid(message=refused))
        self._process(
            UpdateBroken(fragment_id=header.key.fragment_id, version=header.base, reason=RefusalReason.NON_FINITE)
        )


def _refusal(reason: str) -> RefusalReason:
    try:
        return RefusalReason(reason)
    except ValueError:
        return RefusalReason.GARBAGE


def _leaves(errors: BaseExceptionGroup[TransportError]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in errors.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
