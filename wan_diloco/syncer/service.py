"""The syncer's driver: events into the machine, its effects out into journal, threads and network.

One loop decides. It takes all events that wait, has the machine handle each, appends all their records
and flushes once, and then does the remaining effects in order: so nothing is acknowledged or sent
before what it rests on is on the disk, and a busy syncer flushes once for many contributions. While a
full disk is waited out nothing is decided at all; learners train on, and their words wait.

Maths, disk and packing run in executors; transfers and merges are tasks of one group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, assert_never

from wan_diloco.errors import ConfigError, StateTakenOver, StorageError
from wan_diloco.protocol import serial
from wan_diloco.protocol.deadlines import DRAIN_S, LAST_SNAPSHOT_S, LEARNERS_LEAVE_S
from wan_diloco.protocol.events import (
    AcceptUpload,
    CallsRefused,
    CloseSession,
    EndRun,
    IngressChanged,
    LearnerConnected,
    LearnerDisconnected,
    LearnerSaid,
    MergeFinished,
    Record,
    RefuseUpload,
    SendToLearner,
    SendUpdate,
    SessionId,
    ShowReason,
    StartMerge,
    StateMissing,
    SyncerEffect,
    SyncerEvent,
    TakenOver,
    TimerFired,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import ContributionHeader, Hello, LearnerMessage, RefusalReason, Report, Welcome
from wan_diloco.protocol.rejoin_messages import StateSettled, StateWanted
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import FragmentPublished, SyncerStarted
from wan_diloco.syncer.deliveries import Deliveries
from wan_diloco.syncer.inbox import Inbox
from wan_diloco.syncer.merges import Merges
from wan_diloco.syncer.named_sessions import NamedSessions
from wan_diloco.syncer.parts import Parts
from wan_diloco.syncer.plan import LineRates
from wan_diloco.syncer.refusals import Refusals
from wan_diloco.syncer.snapshots import Capture
from wan_diloco.syncer.spool import Spool
from wan_diloco.syncer.updates import Updates
from wan_diloco.syncer.uploads import Offers, store_upload
from wan_diloco.transport.interface import Session
from wan_diloco.units import GlobalStep, TransferId

__all__ = ["SyncerService"]

_PROGRESS_EVERY_S: Final = 10.0
_TICK_S: Final = 1.0
_LOOK_EVERY_S: Final = 2.0
_LEAVE_S: Final = LEARNERS_LEAVE_S
_DRAIN_S: Final = DRAIN_S
_LAST_SNAPSHOT_S: Final = LAST_SNAPSHOT_S


class SyncerService:
    """A `transport.SyncerHandler` that runs one syncer.

    Owner: the event loop; it owns machine, store, and everything else in `parts`.

    Attributes:
        finished: Whether the run has ended, and everything that is to be said of it was heard.
        ended_s: When its last step was reached, on the service's clock.
        unevaluated: Why the final model wasn't evaluated, in a sentence; empty when it was.
        gave_up: Whether something was still going on when `run` returned, which may hold the process up.
    """

    def __init__(self, parts: Parts) -> None:
        """Do nothing until `run`."""
        self._parts = parts
        self._machine = parts.machine
        self._clock = parts.clock
        self._inbox = Inbox()
        self._offers = Offers()
        self._refusals = Refusals(parts.clock, parts.observer.event)
        self._named = NamedSessions(parts.rates)
        self._updates = Updates(parts.maths, parts.keeper, parts.workers, parts.packing, parts.rates.usual_chunk_bytes)
        self._merges = Merges(
            store=parts.store,
            maths=parts.maths,
            keeper=parts.keeper,
            updates=self._updates,
            packing=parts.packing,
            workers=parts.workers,
            emit=self._emit,
            report=parts.observer.reason,
        )
        self._sessions: dict[SessionId, Session] = {}
        self._deliveries = Deliveries(
            store=parts.store,
            updates=self._updates,
            sessions=self._sessions,
            named=self._named,
            spawn=self._spawn,
            emit=self._emit,
            tell=parts.observer.event,
        )
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._merging: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._stopping = False
        self._finishing = False
        self._next_snapshot_s = 0.0
        self.finished = False
        self.ended_s = 0.0
        self.unevaluated = ""
        self.gave_up = False
        self._deciding: asyncio.Task[None] | None = None
        self._snapshotting: asyncio.Task[None] | None = None

    # ---- for the process -------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Start the evaluator's process.

        Ordering: before the transport, since gRPC doesn't like processes that are forked around it.
        """
        if self._parts.curve is not None:
            await self._parts.curve.start()

    async def run(self) -> None:
        """Serve until the run has ended or `stop` is called, then leave a snapshot behind.

        Raises:
            StateDamaged: The state's folder, or its journal, was removed or replaced under us.
            StateTakenOver: Another syncer has the run's store now.
            ConfigError: Learners of the run come, and nothing is known of it in this folder.
            StorageError: The journal has lost track of what is durable; the process must end, and another
                may take the state up again. All come in an exception group, but for the last snapshot's.
        """
        self._next_snapshot_s = self._clock.now_s() + self._parts.snapshot_every_s
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._spawn(self._tick())
            self._spawn(self._parts.keeper.look_every(_LOOK_EVERY_S))
            if self._parts.flush_every_s is not None:
                self._spawn(self._parts.keeper.flush_every(self._parts.flush_every_s))
            if self._parts.curve is not None:
                self._spawn(self._parts.curve.run())
            try:
                self._deciding = self._spawn(self._decide())
                await asyncio.wait({self._deciding})
                await self._end_snapshot()
                for task in self._tasks:
                    task.cancel()
            finally:
                self._stopping = True  # streams may outlive us, and the group takes no task from them
        self._parts.observer.tick(self._named.traffic())
        if not self.gave_up and (capture := self._capture()) is not None:
            try:
                async with asyncio.timeout(None if self.finished else _LAST_SNAPSHOT_S):
                    await self._write_snapshot(capture)
            except TimeoutError:
                self._give_up("the last snapshot isn't written yet")

    @property
    def state(self) -> SyncerState:
        """The durable state; to be read only."""
        return self._machine.state

    def set_rates(self, rates: LineRates) -> None:
        """Change caps from now on; those of all sessions together are the server's affair."""
        self._updates.usual_chunk_bytes = rates.usual_chunk_bytes
        self._named.set_rates(rates)
        self._emit(IngressChanged(ingress=rates.ingress))

    def stop(self) -> None:
        """Take no more work, finish the merges under way, and have `run` return."""
        self._stopping = True
        self._parts.keeper.stop_waiting()
        self._inbox.wake.set()
        if self._deciding is not None and not self.finished:
            asyncio.get_running_loop().call_later(_DRAIN_S, self._drained, self._deciding)

    def _drained(self, deciding: asyncio.Task[None]) -> None:
        if not deciding.done():
            self._give_up("what was under way isn't done yet")
            deciding.cancel()

    async def _end_snapshot(self) -> None:
        """Have the one that is being written written: given up half way it would be there, and nobody would know."""
        if self._snapshotting is not None:
            timeout_s = None if self.finished else _LAST_SNAPSHOT_S
            _, pending = await asyncio.wait({self._snapshotting}, timeout=timeout_s)
            if pending:
                self._give_up("a snapshot isn't written yet")

    def _give_up(self, what: str) -> None:
        self.gave_up = True
        self._parts.observer.event("gave_up", f"{what}: it is left to the next start, which does it from the journal")

    # ---- the transport's handler -----------------------------------------------------------------

    def connected(self, session: Session) -> None:
        """A learner opened a session."""
        self._sessions[session.session] = session
        self._deliveries.connected(session.session)
        self._nobody.clear()
        self._emit(LearnerConnected(session=session.session))

    def said(self, session: Session, message: LearnerMessage) -> None:
        """A control message."""
        if isinstance(message, Hello):
            self._named.said_hello(session, message.learner_id)
        elif isinstance(message, Report | StateWanted | StateSettled) and (
            learner_id := self._named.learner(session.session)
        ):
            if isinstance(message, Report):
                session.set_round_trip(message.rtt_s)
            step = GlobalStep(self._machine.context.membership.global_step)
            self._parts.observer.said(learner_id, message, step)
        if not self._inbox.put(LearnerSaid(session=session.session, message=message)):
            session.close("it says more than can be listened to")

    def disconnected(self, session: Session, reason: str) -> None:
        """The session ended."""
        self._sessions.pop(session.session, None)
        self._deliveries.disconnected(session.session)
        learner_id = self._named.ended(session.session)
        if learner_id is not None:
            self._parts.observer.session_ended(learner_id, session.counters)
            self._parts.observer.event("session_ended", f"{learner_id}: {reason}")
        if not self._sessions:
            self._nobody.set()
        self._emit(LearnerDisconnected(session=session.session, reason=reason))

    def may_relay(self, session: Session, transfer: TransferId, *, giving: bool) -> bool:
        """As the machine decided."""
        return self._machine.donors.allows(session.session, transfer, giving=giving)

    async def upload_offered(self, session: Session, header: ContributionHeader) -> Spool | None:
        """Where the bytes of a contribution may go; None when the machine doesn't want them."""
        self._emit(UploadOffered(session=session.session, header=header))
        if not await self._offers.decision(session.session, header):
            return None
        return Spool(header, self._parts.keeper, self._parts.workers, self._upload_complete, self._storage_failed)

    def upload_failed(self, session: Session, header: ContributionHeader, reason: RefusalReason, detail: str) -> None:
        """A contribution's bytes turned out bad."""
        self._emit(UploadFailed(session=session.session, header=header, reason=reason, detail=detail))

    def refused(self, peer: str, reason: RefusalReason, detail: str) -> None:
        """A stranger's call, or what makes no sense."""
        self._refusals.call(peer, reason, detail)

    def status(self) -> dict[str, object]:
        """The machine's standing, and what the observer knows beside it."""
        return {**serial.to_json(status_of(self._machine, self._clock.now_s())), **self._parts.observer.status()}

    def _upload_complete(self, spool: Spool, session: Session, header: ContributionHeader, wire_bytes: int) -> None:
        if self._stopping:
            spool.abandon()
            return  # it isn't acknowledged, so it comes again
        self._spawn(
            store_upload(
                session=session.session,
                header=header,
                spool=spool,
                wire_bytes=wire_bytes,
                maths=self._parts.maths,
                keeper=self._parts.keeper,
                workers=self._parts.workers,
                emit=self._emit,
            )
        )

    def _storage_failed(self, problem: StorageError) -> None:
        async def fail() -> None:
            raise problem

        # Who stops on a full disk has nothing to say about bytes that nobody counts on yet.
        if not self._stopping:
            self._spawn(fail())

    # ---- deciding --------------------------------------------------------------------------------

    async def _decide(self) -> None:
        now_s = self._clock.now_s()
        if self._parts.input_log is not None:
            self._parts.input_log.write(None, now_s)
        await self._carry_out([self._machine.start(now_s)])
        while not self._stopping or self._merging or self._merges.waiting or len(self._inbox):
            await self._inbox.wait(self._timeout_s())
            events = self._inbox.take()
            lists = []
            for event in events:
                lists.append(self._handle(event))
                await _let_others_run()
            if self._timeout_s() == 0.0:
                lists.append(self._handle(TimerFired()))
            await self._carry_out(lists)
            for event in events:
                if isinstance(event, UploadStored | MergeFinished):
                    self._parts.keeper.recorded(event.ref)
            self._look_after()

    def _timeout_s(self) -> float | None:
        deadline_s = self._machine.deadline_s()
        return None if deadline_s is None else max(0.0, deadline_s - self._clock.now_s())

    def _handle(self, event: SyncerEvent) -> Sequence[SyncerEffect]:
        now_s = self._clock.now_s()
        if self._parts.input_log is not None:
            self._parts.input_log.write(event, now_s)
        if isinstance(event, MergeFinished):
            self._parts.observer.merged(event.round_id)
        effects = self._machine.handle(event, now_s)
        self._refusals.decided(event, effects, self._peer)
        return effects

    def _peer(self, session_id: SessionId) -> str:
        if (learner_id := self._named.learner(session_id)) is not None:
            return learner_id
        return self._sessions[session_id].peer if session_id in self._sessions else "one that is gone"

    async def _carry_out(self, lists: Sequence[Sequence[SyncerEffect]]) -> None:
        """Do all effects, in order, once all records among them are down."""
        records = [effect for effects in lists for effect in effects if isinstance(effect, Record)]
        durable = any(effect.durable for effect in records)
        await self._parts.keeper.record([effect.record for effect in records], durable=durable)
        for effects in lists:
            for effect in effects:
                self._perform(effect)
            await _let_others_run()

    def _perform(self, effect: SyncerEffect) -> None:
        match effect:
            case SendToLearner():
                if (session := self._sessions.get(effect.session)) is not None:
                    if isinstance(effect.message, Welcome):
                        self._named.welcomed(session, self._machine.context.membership.sessions.get(effect.session))
                    session.send(effect.message)
            case CloseSession():
                if (session := self._sessions.get(effect.session)) is not None:
                    session.close(effect.reason)
            case AcceptUpload():
                if not self._stopping:
                    self._offers.decide(effect.session, effect.header, accepted=True)
            case RefuseUpload():
                self._offers.decide(effect.session, effect.header, accepted=False)
            case Record():
                if isinstance(effect.record, FragmentPublished):
                    self._merges.install(effect.record)
                elif isinstance(effect.record, SyncerStarted):
                    self._parts.store.rename(self._machine.state.versions)
                self._parts.observer.recorded(effect.record)
            case StartMerge():
                if not self._stopping:
                    task = self._spawn(self._merges.run(effect))
                    self._merging.add(task)
                    task.add_done_callback(self._merging.discard)
            case SendUpdate():
                if not self._stopping and effect.session in self._named:
                    self._deliveries.begin(effect)
            case ShowReason():
                self._parts.observer.reason(effect.topic, effect.text)
            case EndRun():
                if not self._finishing:
                    self._finishing = True
                    self.ended_s = self._clock.now_s()
                    self._spawn(self._finish())
            case StateMissing(learner_id=learner_id, local_step=step):
                raise ConfigError(
                    f"{learner_id} has taken part in this run, it is at step {step}, and nothing is known of that here",
                    hint="start the syncer with the folder or the store that has the run; to begin anew, end the "
                    "learners, and give them other folders",
                )
            case TakenOver(learner_id=learner_id, term=term):
                raise StateTakenOver(
                    f"the run was taken over: {learner_id} was welcomed by a syncer of term {term}, and this one's is "
                    f"{self._machine.state.term}; this syncer ends, and what it has merged since then is lost"
                )
            case _:
                assert_never(effect)

    # ---- beside the loop -------------------------------------------------------------------------

    async def _tick(self) -> None:
        told_s = self._clock.now_s()
        while True:
            await asyncio.sleep(_TICK_S)
            self._parts.observer.tick(self._named.traffic())
            if (now_s := self._clock.now_s()) - told_s >= _PROGRESS_EVERY_S:
                told_s = now_s
                self._parts.observer.progress(status_of(self._machine, now_s))
            for reason, number in self._refusals.take():
                self._emit(CallsRefused(reason=reason, number=number))
            # A snapshot may be due although nothing was said.
            if self._clock.now_s() >= self._next_snapshot_s:
                self._inbox.wake.set()

    async def _finish(self) -> None:
        """The run is over: evaluate what came out, let the learners go, stop."""
        state = self._machine.state
        if self._parts.curve is not None:
            step = GlobalStep(state.global_step)
            self.unevaluated = await self._parts.curve.finish(
                step,
                state.ledger.trained.tokens,
                self._parts.store.hold(),
                elapsed_s=self._parts.observer.to_elapsed_s(self.ended_s),
            )
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._nobody.wait()
        except TimeoutError:
            self._parts.observer.event("learners_stayed", "some learners did not leave at the end of the run")
        self.finished = True
        self.stop()

    def _look_after(self) -> None:
        """What hangs on the state as a whole: snapshots, and points of the curve."""
        curve, now_s = self._parts.curve, self._clock.now_s()
        step = GlobalStep(self._machine.context.membership.global_step)
        on_curve = curve is not None and self._machine.state.started and not self._finishing and curve.due(step)
        snapshot_due = now_s >= self._next_snapshot_s and not self._stopping  # `run` takes the last one
        # All values of one moment can be had only while no merge changes any: those that begin now don't.
        self._merges.on_copies = (on_curve or snapshot_due) and not self._parts.store.settled
        if self._merges.on_copies:
            return
        if snapshot_due:
            self._next_snapshot_s = now_s + self._parts.snapshot_every_s
            if (capture := self._capture()) is not None:  # between two batches state, tape and store say the same
                self._snapshotting = self._spawn(self._write_snapshot(capture))
        if curve is not None and on_curve:
            tokens = self._machine.state.ledger.trained.tokens
            elapsed_s = self._parts.observer.to_elapsed_s(now_s)
            curve.took(step)
            self._spawn(curve.publish(step, tokens, self._parts.store.hold(), elapsed_s=elapsed_s))

    def _capture(self) -> Capture | None:
        if not self._parts.store.settled:
            return None  # at the end, when the disk didn't take a publication: the last snapshot stands
        return self._parts.snapshots.capture(self._machine.state, self._parts.store)

    async def _write_snapshot(self, capture: Capture) -> None:
        self._parts.observer.reason("snapshot", await self._parts.snapshots.write(capture))

    def _emit(self, event: SyncerEvent) -> None:
        self._inbox.put(event)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None, "the service runs"
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._stopping = True  # the group shuts down from here on


async def _let_others_run() -> None:
    # With many learners a batch takes milliseconds, and streams on the same loop must not wait for all of it.
    await asyncio.sleep(0)
