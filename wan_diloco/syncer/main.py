"""The syncer's process: from a configuration to an exit code.

Only here is everything put together; nothing is decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch
import uvloop

from wan_diloco.algorithm.layout import Layout
from wan_diloco.clock import Clock, SystemClock
from wan_diloco.config import LiveConfig, RunConfig, adopt_rates, load_config
from wan_diloco.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, ConfigError, StorageError, WanDilocoError
from wan_diloco.models import build_model, model_tensors, run_layout
from wan_diloco.protocol import serial
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.tape import ContributionsLost, FragmentPublished, RoundClosed
from wan_diloco.storage import write_text
from wan_diloco.syncer.conclusion import conclude, withdraw_interim
from wan_diloco.syncer.evaluation import Curve
from wan_diloco.syncer.evaluator_process import EvaluatorProcess
from wan_diloco.syncer.fragments_store import Maths
from wan_diloco.syncer.input_log import InputLog
from wan_diloco.syncer.journal_keeper import JournalKeeper, TapeMirror
from wan_diloco.syncer.observer import Observer
from wan_diloco.syncer.plan import line_rates, machine_settings, run_maths, server_limits
from wan_diloco.syncer.restore import Restored, open_state
from wan_diloco.syncer.service import Parts, SyncerService
from wan_diloco.syncer.snapshots import SnapshotKeeper, newest_sequence
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
from wan_diloco.transport.allocator import give_back_freed_memory, keep_freed_memory
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.units import GlobalStep, LearnerId

__all__ = ["build_service", "run_syncer"]

_GRACE_S: Final = 2.0
_LOG: Final = get_logger("syncer")
_RETENTION: Final = {
    "since-snapshot": "the journal is kept as far as a restart from the two newest snapshots needs it",
    "all": "nothing of the journal is dropped, and it grows as long as the run does",
}
_EXIT_CODES: Final = {signal.SIGTERM: EXIT_SIGTERM, signal.SIGINT: EXIT_SIGINT}


def run_syncer(
    config: RunConfig,
    run_folder: Path,
    resume: bool,
    *,
    input_log: bool = False,
    load: Callable[[], RunConfig] | None = None,
) -> int:
    """Serve a run until it has ended or a signal comes.

    Args:
        config: The run's.
        run_folder: Created where missing.
        resume: Whether a run that is in the folder is taken up.
        input_log: Whether every event is written to `input.jsonl`.
        load: Reads the configuration again, at SIGHUP; None leaves it as it is.

    Returns:
        The exit code.

    Raises:
        ConfigError: The folder holds a run and `resume` is false, or the address can't be listened on.
        StorageLocked: Another syncer has the folder.
        StorageError: The disk doesn't do what it must; the process may be started again.
    """
    _keep_freed_memory()
    # One thread for one operation: parallelism comes from fragments, and the learners need the rest.
    torch.set_num_threads(1)
    clock = SystemClock()
    maths = run_maths(config, run_layout(config))
    restored = open_state(
        run_folder / "state",
        resume=resume,
        maths=maths,
        initial=lambda: model_tensors(build_model(config)),
        keep_updates=config.syncer.keep_updates,
        agreement=config.agreement(),
    )
    give_back_freed_memory()
    with contextlib.ExitStack() as held:
        held.callback(restored.lock.release)
        held.callback(restored.journal.close)
        # The evaluator and whoever looks at the run later read it. Not before the folder is ours: the learners of a
        # run that lives read it too, whenever they are started again.
        _write_config(run_folder / "config.json", config)
        withdraw_interim(run_folder)
        metrics = held.enter_context(MetricsWriter(run_folder / METRICS_FILE, clock))
        workers = Workers.threads(config.syncer.threads)
        held.callback(workers.shutdown)
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
        )
        _LOG.info("journal_retention", detail=_RETENTION[config.syncer.journal_retention])
        # What is there now stays: to look through it for garbage again and again would hold the loop up.
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            live = LiveConfig(config, load or (lambda: config), partial(_note_configuration, metrics))
            exit_code = runner.run(_serve(service, live, run_folder))
        _conclude(service, metrics, run_folder, clock.now_s())
        return exit_code


def _write_config(path: Path, config: RunConfig) -> None:
    """Write the configuration, unless the one that is there differs in rates alone.

    Whoever supervises us may have changed those since we read them, and told us by a signal that is still to come.
    """
    try:
        is_there = not adopt_rates(config, load_config([path], env={}).config).ignored
    except ConfigError:
        is_there = False
    if not is_there:
        write_text(path, config.resolved_json())


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

    Raises:
        ConfigError: A file can't be opened.
        CheckpointError: The folder of the snapshots holds something else.
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
        restored.journal, workers, mirror, restored.last_tape, lambda text: observer.reason("journal", text)
    )
    snapshots = run_folder / "state" / "snapshots"
    return SyncerService(
        Parts(
            machine=SyncerMachine(machine_settings(config, maths, state.initial_digests), state),
            store=restored.store,
            maths=maths,
            keeper=keeper,
            snapshots=SnapshotKeeper(
                snapshots,
                config.agreement(),
                keeper,
                workers,
                sequence=newest_sequence(snapshots),
                # Nothing that is there now is needed less than that.
                floor=restored.journal.segments[0],
                keep_journal=config.syncer.journal_retention == "all",
            ),
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


def _observer(
    config: RunConfig, run_folder: Path, restored: Restored, metrics: MetricsWriter, clock: Clock
) -> Observer:
    listed = [LearnerId(region.name) for region in config.regions]
    learners = tuple(dict.fromkeys((*listed, *restored.state.incarnations)))
    earlier = read_metrics(run_folder / METRICS_FILE).lines if restored.resumed else ()
    observer = Observer(metrics, clock, learners, restored.state.parameters, earlier, restored.state.anchors)
    for note in restored.notes:
        observer.event("state_taken_up", note)
    # A process that is killed may leave the tape further on than the metrics.
    told = {line.record.round_id for line in earlier if isinstance(line.record, RoundRecord)}
    for record in (*restored.state.closed.values(), *restored.tape):
        if isinstance(record, RoundClosed | ContributionsLost | FragmentPublished) and record.round_id not in told:
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


async def _serve(service: SyncerService, live: LiveConfig, run_folder: Path) -> int:
    config = live.config
    await service.prepare()
    server = GrpcSyncerServer(
        service, config.syncer.listen, insecure=config.syncer.insecure, limits=server_limits(config)
    )
    if config.syncer.insecure:
        _LOG.warning("insecure", listen=config.syncer.listen, detail="anybody who reaches this address is believed")
    received: list[signal.Signals] = []

    def drain(number: signal.Signals) -> None:
        received.append(number)
        service.stop()

    def obey() -> None:
        rates = line_rates(live.config)
        server.set_rates(ingress_bytes_per_s=rates.ingress_bytes_per_s, egress_bytes_per_s=rates.egress_bytes_per_s)
        service.set_rates(rates)

    obey()
    for number in _EXIT_CODES:
        asyncio.get_running_loop().add_signal_handler(number, drain, number)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: obey() if live.reload() else None)
    # Who started us may have it wait until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    address = run_folder / "address"
    write_text(address, await server.start())
    try:
        await service.run()
    except BaseExceptionGroup as group:
        raise _cause(group) from group
    finally:
        # Nobody listens there any more; another syncer will listen elsewhere.
        address.unlink(missing_ok=True)
        await server.stop(_GRACE_S)
    return EXIT_OK if service.finished or not received else _EXIT_CODES[received[0]]


def _cause(group: BaseExceptionGroup) -> BaseException:
    """The error that says what to do, if there is one; the whole group, a bug of ours, otherwise."""
    leaves = list(_leaves(group))
    for kind in (StorageError, WanDilocoError):
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


def _conclude(service: SyncerService, metrics: MetricsWriter, run_folder: Path, now_s: float) -> None:
    """Write what the run came to; a run that was interrupted must not fail for it."""
    ended_s = service.ended_s if service.finished else now_s  # without the evaluation after it
    try:
        conclude(
            run_folder,
            service.state,
            wall_s=metrics.to_elapsed_s(ended_s),
            finished=service.finished,
            unevaluated=service.unevaluated,
        )
    except StorageError as exc:
        if service.finished:
            raise
        _LOG.warning("interim_report_failed", reason=str(exc))
