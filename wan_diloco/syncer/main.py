"""The syncer's process: from a configuration to an exit code.

Only here is everything put together; nothing is decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import uvloop

from wan_diloco.algorithm.layout import Layout
from wan_diloco.clock import Clock, SystemClock
from wan_diloco.config import LiveConfig, RunConfig
from wan_diloco.errors import EXIT_OK, StateDamaged, StateTakenOver, StorageError, WanDilocoError
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol import serial
from wan_diloco.protocol.deadlines import SHIP_LAST_S, SPARE_S, in_short
from wan_diloco.protocol.syncer_machine import SyncerMachine, SyncerSettings
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import ContributionsLost, FragmentPublished, Refragmented, RoundClosed
from wan_diloco.storage import write_text
from wan_diloco.syncer.conclusion import conclude, withdraw_interim
from wan_diloco.syncer.deadlines import deadlines_of
from wan_diloco.syncer.ending import EndedEarly, Ending, ending_signals
from wan_diloco.syncer.evaluation import Curve
from wan_diloco.syncer.evaluator_process import EvaluatorProcess
from wan_diloco.syncer.fragments_store import Maths
from wan_diloco.syncer.input_log import InputLog
from wan_diloco.syncer.journal_keeper import JournalKeeper, TapeMirror
from wan_diloco.syncer.observer import Observer
from wan_diloco.syncer.parts import Parts
from wan_diloco.syncer.plan import cutting_for, line_rates, machine_settings, server_limits
from wan_diloco.syncer.restore import Restored, open_state, snapshot_name
from wan_diloco.syncer.service import SyncerService
from wan_diloco.syncer.shipping import Shipper
from wan_diloco.syncer.snapshots import SnapshotKeeper, newest_sequence
from wan_diloco.syncer.store_link import StoreLink, open_link
from wan_diloco.syncer.updates import Packing
from wan_diloco.syncer.workers import Workers
from wan_diloco.telemetry import (
    METRICS_FILE,
    EventRecord,
    MetricsWriter,
    RoundRecord,
    get_logger,
    read_metrics,
)
from wan_diloco.telemetry.last_resort import WITHIN_S, leave_at_once
from wan_diloco.transport.allocator import give_back_freed_memory, keep_freed_memory
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.units import GlobalStep, LearnerId

__all__ = ["build_service", "run_syncer"]

_GRACE_S: Final = 2.0
# What nobody may take for an end in order.
_FINAL: Final = (StateTakenOver, StateDamaged)
_TERM_ID_BYTES: Final = 8
# Between two looks whether a signal asks a run that has ended not to wait for its store.
_LOOK_S: Final = 0.5
_LOG: Final = get_logger("syncer")
_CONFIG_FILE: Final = "config.json"
_RETENTION: Final = {
    "since-snapshot": "the journal is kept as far as a restart from the two newest snapshots needs it",
    "all": "nothing of the journal is dropped, and it grows as long as the run does",
}


def run_syncer(
    config: RunConfig,
    run_folder: Path,
    resume: bool,
    *,
    refragment: bool = False,
    input_log: bool = False,
    load: Callable[[], RunConfig] | None = None,
    take_over: bool = False,
    end_within_s: float = WITHIN_S,
) -> int:
    """Serve a run until it has ended or a signal comes.

    Args:
        config: The run's.
        run_folder: Created where missing.
        resume: Whether a run that is in the folder is taken up.
        refragment: Whether it may be cut into another number of fragments then.
        input_log: Whether every event is written to `input.jsonl`.
        load: Reads the configuration again, at SIGHUP; None leaves it as it is.
        take_over: Whether another syncer that has the store is pushed aside, though it may be alive.
        end_within_s: How long it may last after a signal to end.

    Returns:
        The exit code.

    Raises:
        ConfigError: The folder holds a run and `resume` is false, or one that can't go on with these settings; or the
            address can't be listened on.
        StorageLocked: Another syncer has the folder, or the store.
        StateTakenOver: Another syncer has taken the store.
        StateDamaged: What is in the folder can't be taken up, or the folder was removed or replaced meanwhile.
        StorageError: The disk doesn't do what it must; the process may be started again.
    """
    _keep_freed_memory()
    # One thread for one operation: parallelism comes from fragments, and the learners need the rest.
    torch.set_num_threads(1)
    clock = SystemClock()
    cutting = cutting_for(config, allowed=refragment)
    maths = cutting.maths_of(cutting.fragments)
    with ending_signals(end_within_s) as ending, contextlib.ExitStack() as held:
        try:
            link = open_link(config, clock, take_over=take_over)
            if link is not None:
                # Given back last: nobody else's run may begin with what is still ours.
                held.callback(link.leave)
            restored = open_state(
                run_folder / "state",
                resume=resume,
                maths=maths,
                cutting=cutting,
                initial=lambda: model_tensors(build_model(config)),
                keep_updates=config.syncer.keep_updates,
                agreement=config.agreement(),
                link=link,
            )
            held.callback(restored.lock.release)
            held.callback(restored.journal.close)
            if resume and not restored.resumed:
                _LOG.warning("begun_anew", detail=f"there was no run in {run_folder} to take up: a new one begins")
            give_back_freed_memory()
            # The evaluator and whoever looks at the run later read it, and whoever goes on with it. Not before the run
            # is taken up: a configuration that is refused is never the run's.
            write_text(run_folder / _CONFIG_FILE, config.resolved_json())
            metrics = held.enter_context(MetricsWriter(run_folder / METRICS_FILE, clock))
        except EndedEarly:
            _LOG.info("ended_early", detail="before it had the run's state, which is as it was: it writes no summary")
            return ending.exit_code
        live = LiveConfig(config, load or (lambda: config), partial(_note_configuration, metrics))
        return _attend(live, run_folder, restored, maths, metrics, ending, held, link=link, input_log=input_log)


def _attend(
    live: LiveConfig,
    run_folder: Path,
    restored: Restored,
    maths: Maths,
    metrics: MetricsWriter,
    ending: Ending,
    held: contextlib.ExitStack,
    *,
    link: StoreLink | None,
    input_log: bool,
) -> int:
    """Serve a run whose state is there, and leave a summary, whenever the end comes."""
    config, clock = live.config, SystemClock()
    workers = Workers.threads(config.syncer.threads)
    held.callback(workers.shutdown)
    try:
        withdraw_interim(run_folder)
        shipper = None if link is None else _shipper(config, run_folder / "state", restored, link)
        service = build_service(
            config,
            run_folder,
            restored,
            maths=maths,
            metrics=metrics,
            workers=workers,
            clock=clock,
            evaluate=True,
            input_log=input_log,
            shipper=shipper,
        )
        _LOG.info("deadlines", **in_short(deadlines_of(config, ending.within_s)))
        _LOG.info("journal_retention", detail=_RETENTION[config.syncer.journal_retention])
        # What is there now stays: to look through it for garbage again and again would hold the loop up.
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(service, live, run_folder, ending, shipper))
    except EndedEarly:
        ending.served()
        _conclude(run_folder, restored.state, metrics, clock.now_s(), finished=False, unevaluated="")
        _say_where_state_is(run_folder)
        return ending.exit_code
    ending.served()
    finished = service.finished
    ended_s = service.ended_s if finished else clock.now_s()  # without the evaluation after it
    _conclude(run_folder, service.state, metrics, ended_s, finished=finished, unevaluated=service.unevaluated)
    if shipper is not None:
        _ship_last(shipper, ending)
    if not finished:
        _say_where_state_is(run_folder)
    exit_code = EXIT_OK if finished or ending.received is None else ending.exit_code
    if service.gave_up:
        # A thread is in the middle of something, and nobody knows for how long.
        if link is not None:
            link.leave()
        leave_at_once(exit_code)
    return exit_code


def _say_where_state_is(run_folder: Path) -> None:
    folder = run_folder / "state"
    name = snapshot_name(newest_sequence(folder / "snapshots"))
    # Where the last snapshot wasn't written in time, what it lacks is in the journal.
    detail = f"the run's state is snapshot {name} and the journal behind it in {folder}"
    _LOG.info("state_written", detail=f"{detail}: the same command with --resume goes on from there")


def _keep_freed_memory() -> None:
    if problem := keep_freed_memory():
        _LOG.warning("allocator_untuned", detail=f"{problem}: bulk will cost more processor time")


def build_service(
    config: RunConfig,
    run_folder: Path,
    restored: Restored,
    *,
    maths: Maths,
    metrics: MetricsWriter,
    workers: Workers,
    clock: Clock,
    evaluate: bool,
    input_log: bool,
    shipper: Shipper | None = None,
) -> SyncerService:
    """Put a service together around a state that was begun or taken up.

    Args:
        config: The run's.
        run_folder: The run's.
        restored: What it begins with; lock and journal stay the caller's to close.
        maths: Of the run's layout.
        metrics: Where records go.
        workers: Where slow work runs; the caller shuts them down.
        clock: The machine's time.
        evaluate: Whether to start an evaluator's process.
        input_log: Whether to write every event to `input.jsonl`.
        shipper: Of the state, to be started by the caller; None where there is no store.

    Raises:
        ConfigError: A file can't be opened.
    """
    state = restored.state
    observer = _observer(config, run_folder, restored, metrics, clock)
    mirror = TapeMirror(run_folder / "tape.jsonl")
    if restored.resumed:
        try:
            mirror.catch_up([serial.dumps(record) for record in restored.tape])
        except OSError as exc:
            observer.event("tape_copy_failed", f"tape.jsonl can't be brought up to date: {exc.strerror}")
    keeper = JournalKeeper(
        restored.journal,
        workers,
        mirror,
        restored.last_tape,
        lambda text: observer.reason("journal", text),
        restored.lock.require_there,
    )
    if shipper is not None:
        shipper.tell = partial(observer.reason, "store")
        observer.store = shipper.status
    return SyncerService(
        Parts(
            machine=SyncerMachine(_machine_settings(config, maths, restored), state),
            store=restored.store,
            maths=maths,
            keeper=keeper,
            snapshots=_snapshots(config, run_folder, restored, keeper, workers, shipper),
            observer=observer,
            workers=workers,
            clock=clock,
            packing=Packing(zstd=config.wire.zstd),
            snapshot_every_s=config.syncer.snapshot_every_s,
            flush_every_s=None if config.syncer.durability == "every-merge" else config.syncer.flush_every_s,
            rates=line_rates(config),
            curve=_curve(config, run_folder, restored, maths.layout, workers, observer) if evaluate else None,
            input_log=InputLog(run_folder / "input.jsonl") if input_log else None,
        )
    )


def _snapshots(
    config: RunConfig,
    run_folder: Path,
    restored: Restored,
    keeper: JournalKeeper,
    workers: Workers,
    shipper: Shipper | None,
) -> SnapshotKeeper:
    folder = run_folder / "state" / "snapshots"
    return SnapshotKeeper(
        folder,
        config.agreement(),
        keeper,
        workers,
        sequence=newest_sequence(folder),
        # Nothing that is there now is needed less than that.
        floor=restored.journal.segments[0],
        keep_journal=config.syncer.journal_retention == "all",
        ship=None if shipper is None else shipper.offer,
    )


def _machine_settings(config: RunConfig, maths: Maths, restored: Restored) -> SyncerSettings:
    state = restored.state
    settings = machine_settings(config, maths, state.initial_digests, total_steps=state.total_steps)
    # Two processes that were started from copies of one state begin the same term, and only this tells them apart.
    term_id = secrets.token_hex(_TERM_ID_BYTES)
    return replace(settings, term_min=restored.term_min, epoch_min=restored.epoch_min, term_id=term_id)


def _observer(
    config: RunConfig, run_folder: Path, restored: Restored, metrics: MetricsWriter, clock: Clock
) -> Observer:
    listed = [LearnerId(region.name) for region in config.regions]
    learners = tuple(dict.fromkeys((*listed, *restored.state.incarnations)))
    earlier = read_metrics(run_folder / METRICS_FILE).lines if restored.resumed else ()
    observer = Observer(
        metrics, clock, learners, restored.parameters, earlier, restored.state.anchors, restored.new_epoch
    )
    for note in restored.notes:
        observer.event("state_taken_up", note)
    # A process that is killed may leave the tape further on than the metrics.
    told = {line.record.round_id for line in earlier if isinstance(line.record, RoundRecord)}
    for record in (*restored.state.closed.values(), *restored.tape):
        untold = isinstance(record, RoundClosed | ContributionsLost | FragmentPublished) and record.round_id not in told
        if untold or isinstance(record, Refragmented):
            observer.recorded(record)
    return observer


def _curve(
    config: RunConfig, run_folder: Path, restored: Restored, layout: Layout, workers: Workers, observer: Observer
) -> Curve:
    return Curve(
        run_folder,
        layout,
        EvaluatorProcess(
            run_folder,
            answered=observer.evaluated,
            progressed=observer.evaluating,
            report=lambda text: observer.event("evaluation_failed", text),
        ),
        workers,
        every_steps=config.evaluation.every_steps,
        from_step=GlobalStep(restored.state.global_step),
        report=lambda text: observer.event("evaluation_skipped", text),
    )


async def _serve(
    service: SyncerService, live: LiveConfig, run_folder: Path, ending: Ending, shipper: Shipper | None
) -> None:
    ending.serve(service.stop)
    config = live.config
    await service.prepare()
    server = GrpcSyncerServer(
        service, config.syncer.listen, insecure=config.syncer.insecure, limits=server_limits(config)
    )
    if config.syncer.insecure:
        _LOG.warning("insecure", listen=config.syncer.listen, detail="anybody who reaches this address is believed")

    def obey() -> None:
        rates = line_rates(live.config)
        server.set_rates(ingress_bytes_per_s=rates.ingress_bytes_per_s, egress_bytes_per_s=rates.egress_bytes_per_s)
        service.set_rates(rates)

    obey()

    def reload() -> None:
        if live.reload():
            obey()
            try:
                write_text(run_folder / _CONFIG_FILE, live.config.resolved_json())
            except StorageError as exc:
                _LOG.warning("configuration", detail=f"the rates are others now, and config.json says the old: {exc}")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    # Who started us may have it wait until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    address = run_folder / "address"
    bound = await server.start()
    write_text(address, bound)
    _LOG.info(
        "listening",
        address=bound,
        folder=str(run_folder),
        detail="learners reach it with --syncer HOST:PORT, a region's `address`, or its --run-folder on this machine",
    )
    try:
        await (service.run() if shipper is None else _run_shipped(service, shipper))
    except BaseExceptionGroup as group:
        cause = _cause(group)
        if ending.received is None or isinstance(cause, _FINAL) or not isinstance(cause, StorageError):
            raise cause from group
        # What was acknowledged or sent is on the disk; nobody counts on what isn't.
        _LOG.warning("ended_unsettled", reason=str(cause))
    finally:
        # Nobody listens there any more. Why we end is worth more than a failure here.
        with contextlib.suppress(OSError):
            address.unlink(missing_ok=True)
        await server.stop(_GRACE_S)


def _shipper(config: RunConfig, folder: Path, restored: Restored, link: StoreLink) -> Shipper:
    shipper = Shipper(link, folder, restored.journal, keep_journal=config.syncer.journal_retention == "all")
    # A run that has just begun can be lost like any other.
    shipper.offer(restored.snapshot, restored.journal.segments[0])
    return shipper


async def _run_shipped(service: SyncerService, shipper: Shipper) -> None:
    """Serve; being taken over ends it as it stands, since nothing that is written from then on counts."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def call(function: Callable[[], None]) -> None:
        # The loop may have ended before those threads.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    def fence(problem: StateTakenOver) -> None:
        call(lambda: None if lost.done() else lost.set_exception(problem))

    async def watch() -> None:
        await lost

    shipper.start(call, fence)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        await service.run()
        watching.cancel()


def _ship_last(shipper: Shipper, ending: Ending) -> None:
    """Bring the newest snapshot to the store; as long as nobody has asked for the end, however long it takes."""
    is_there = shipper.finish(0.0)
    while shipper.shipping and ending.received is None:
        is_there = shipper.finish(_LOOK_S)
    if shipper.shipping:
        is_there = shipper.finish(ending.left_s(SHIP_LAST_S, spare_s=SPARE_S))
    if not is_there:
        reason = shipper.trouble or "there was no time for it"
        detail = "what the store has isn't the newest state: keep the run's folder"
        _LOG.warning("store_behind", detail=detail, reason=reason)


def _cause(group: BaseExceptionGroup) -> BaseException:
    """The error that says what to do, if there is one; the whole group, a bug of ours, otherwise."""
    leaves = list(_leaves(group))
    for kind in (*_FINAL, StorageError, WanDilocoError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return group


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _note_configuration(metrics: MetricsWriter, text: str) -> None:
    """What became of a configuration that was read again; the run's report tells it too."""
    _LOG.info("configuration", detail=text)
    metrics.write(EventRecord(name="configuration", detail=text))


def _conclude(
    run_folder: Path, state: SyncerState, metrics: MetricsWriter, ended_s: float, *, finished: bool, unevaluated: str
) -> None:
    """Write what the run came to; a run that was interrupted must not fail for it."""
    wall_s = metrics.to_elapsed_s(ended_s)
    try:
        conclude(run_folder, state, wall_s=wall_s, finished=finished, unevaluated=unevaluated)
    except StorageError as exc:
        if finished:
            raise
        _LOG.warning("interim_report_failed", reason=str(exc))
