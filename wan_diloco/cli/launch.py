"""A run on this machine, from its folder's creation to its last process's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wan_diloco.cli.keeper import Keeper, ProcessSpec
from wan_diloco.cli.lives import RestartPolicy
from wan_diloco.cli.supervise import Outcome, Patience, Supervisor
from wan_diloco.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from wan_diloco.cli.progress import Display
    from wan_diloco.clock import Clock
    from wan_diloco.config import LiveConfig, RunConfig

    Beside = Callable[[Supervisor], Coroutine[Any, Any, None]]

__all__ = ["child_environment", "launch", "process_specs"]

_SETTING_PREFIX: Final = "WAN_DILOCO_"
# What its processes are started with. It becomes `config.json` when the syncer has the run's state and accepts it.
_GIVEN: Final = "config.next.json"


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run's processes: without settings, which the file that they are given holds already.

    A flag beats a variable; left in, the variable would beat the file that the flag went into.
    """
    return {name: value for name, value in env.items() if not (name.startswith(_SETTING_PREFIX) and "__" in name)}


def process_specs(
    config: RunConfig, run_folder: Path, patience: Patience, *, resume: bool, refragment: bool = False
) -> tuple[ProcessSpec, tuple[ProcessSpec, ...]]:
    """The processes of a run.

    Args:
        config: The run's, which is in the folder's `config.next.json`.
        run_folder: Of the run.
        patience: How long they may take to end.
        resume: Whether their first lives go on with earlier ones.
        refragment: Whether the syncer may cut the run into another number of fragments.

    Returns:
        The syncer, and the learners in the order of the regions.
    """
    folder = run_folder.absolute()

    def spec(name: str, *words: str) -> ProcessSpec:
        command = (sys.executable, "-m", "wan_diloco", words[0], str(folder / _GIVEN), *words[1:])
        command += ("--run-folder", str(folder))
        return ProcessSpec(
            name=name,
            first=(*command, "--resume") if resume else command,
            again=(*command, "--resume"),
            log_path=folder / "logs" / f"{name}.log",
        )

    # More threads than cores make every region's steps slower; a learner that is given an address can't know that it
    # shares a machine.
    threads = ("--threads", "1") if len(config.regions) > 1 else ()
    learners = tuple(spec(region.name, "learner", "--region", region.name, *threads) for region in config.regions)
    # Also in later lives: the first may have died before it was done, and once it is, the word has no effect.
    words = ("--end-within", f"{patience.syncer_s:g}s", *(("--refragment",) if refragment else ()))
    return spec("syncer", "syncer", *words), learners


def launch(
    config: RunConfig,
    run_folder: Path,
    *,
    resume: bool,
    refragment: bool = False,
    display: Display,
    env: Mapping[str, str],
    clock: Clock,
    rng: random.Random,
    load: Callable[[], RunConfig],
    beside: Beside | None = None,
) -> Outcome:
    """Run to the end, supervised and shown.

    Ordering: after the preflight, which needs no lock; what it saw of the folder is looked at again under the lock.

    Args:
        config: The run's.
        run_folder: Created where missing.
        resume: Whether the run that is in the folder goes on.
        refragment: Whether it may be cut into another number of fragments.
        display: Where progress is shown.
        env: This process's environment.
        clock: Real time.
        rng: Chance, for the jitter of restarts.
        load: Reads the configuration again, at SIGHUP.
        beside: Runs on the event loop while the run does, and is cancelled at its end; should it fail, the run ends in
            order.

    Raises:
        StorageLocked: Another process has the folder.
        ConfigError: The folder can't be used.
        StorageError: The disk is full or the system refused.
    """
    from wan_diloco.cli.folders import check_folder
    from wan_diloco.config import LiveConfig
    from wan_diloco.storage import FolderLock, write_text
    from wan_diloco.storage.filesystem import ensure_folder, translated

    with FolderLock(run_folder, "run"):
        check_folder(config, run_folder, resume=resume, refragment=refragment)
        if resume:
            # A syncer that was started by hand may work here: nothing of its run may be touched then.
            with FolderLock(run_folder / "state", "run"):
                pass
        ensure_folder(run_folder / "logs")
        # Left over from an earlier life; it must mean that this syncer listens.
        with translated("can't remove", run_folder / "address"):
            (run_folder / "address").unlink(missing_ok=True)
        write_text(run_folder / _GIVEN, config.resolved_json())
        patience = Patience()
        syncer, learners = process_specs(config, run_folder, patience, resume=resume, refragment=refragment)
        say = partial(_say, display)
        supervisor = Supervisor(
            syncer=syncer,
            learners=learners,
            address_path=run_folder / "address",
            quorum=config.sync.quorum,
            env=child_environment(env),
            policy=RestartPolicy(),
            patience=patience,
            rng=rng,
            clock=clock,
            say=say,
        )
        reload = partial(_reload, LiveConfig(config, load, say), run_folder, supervisor, say)
        with display:
            say(f"run {config.run.name!r} in {run_folder}, {len(learners)} regions; this is process {os.getpid()}")
            return asyncio.run(_supervised(supervisor, display, run_folder / "address", clock, reload, beside))


def _say(display: Display, text: str) -> None:
    # A terminal that is gone must not end the run.
    with contextlib.suppress(OSError):
        display.say(f"wan-diloco: {text}")


def _reload(live: LiveConfig, run_folder: Path, supervisor: Supervisor, say: Callable[[str], None]) -> None:
    """Read the configuration again, and have everybody follow it: also those who are started again later."""
    from wan_diloco.storage import write_text

    if live.reload():
        try:
            write_text(run_folder / _GIVEN, live.config.resolved_json())
        except StorageError as exc:
            say(f"nobody follows: {exc}")
        else:
            supervisor.reload()


async def _supervised(
    supervisor: Supervisor,
    display: Display,
    address_path: Path,
    clock: Clock,
    reload: Callable[[], None],
    beside: Beside | None,
) -> Outcome:
    loop = asyncio.get_running_loop()
    # Whoever asked that hanging up be ignored wants the run to outlive the terminal.
    attached = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and not _terminal_is_gone()

    def hung_up() -> None:
        if attached and _terminal_is_gone():
            _interrupt(supervisor, display, signal.SIGTERM)
        else:
            reload()

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _interrupt, supervisor, display, number)
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(_watched(supervisor, display, address_path, clock))]
        if beside is not None:
            others.append(group.create_task(_accompanied(supervisor, beside)))
        outcome = await supervisor.run()
        for task in others:
            task.cancel()
    return outcome


async def _accompanied(supervisor: Supervisor, beside: Beside) -> None:
    try:
        await beside(supervisor)
    except Exception as exc:  # noqa: BLE001 - this is the supervisor: processes end in order, whoever else fails
        supervisor.give_up(f"internal error beside the run: {type(exc).__name__}: {exc}")


def _interrupt(supervisor: Supervisor, display: Display, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        if supervisor.ending:
            display.say("wan-diloco: ending at once")
        else:
            display.say("wan-diloco: ending; regions and syncer write their state (once more to hurry them)")
    supervisor.interrupt(number)


def _terminal_is_gone() -> bool:
    """Whether this process has no terminal, or none any more."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return True
    return False


async def _watched(supervisor: Supervisor, display: Display, address_path: Path, clock: Clock) -> None:
    from wan_diloco.cli.progress import watch
    from wan_diloco.transport.grpc_client import fetch_status

    def processes() -> dict[str, tuple[str, int]]:
        return {keeper.spec.name: _shown(keeper) for keeper in (supervisor.syncer, *supervisor.learners)}

    def pids() -> dict[str, int]:
        keepers = (supervisor.syncer, *supervisor.learners)
        return {keeper.spec.name: pid for keeper in keepers if (pid := keeper.command_pid) is not None}

    try:
        await watch(
            display,
            address_path=address_path,
            processes=processes,
            fetch=fetch_status,
            clock=clock,
            ending=lambda: supervisor.ending and not supervisor.finished,
            pids=pids,
        )
    except Exception as exc:  # noqa: BLE001 - this is the supervisor, and a display must never end a run
        with contextlib.suppress(OSError):
            display.say(f"wan-diloco: progress isn't shown any more ({type(exc).__name__}: {exc})")


def _shown(keeper: Keeper) -> tuple[str, int]:
    return keeper.condition.value, keeper.restarts
