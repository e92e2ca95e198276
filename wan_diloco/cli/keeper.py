"""Keeps one process alive: starts it, waits for its end, starts it again or gives up.

It doesn't decide what a process's end means for the run; that is `supervise`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from wan_diloco.cli.guardian import KILL_ALL, guarded
from wan_diloco.cli.lives import Meaning, RestartPolicy, describe_exit, meaning_of
from wan_diloco.errors import StorageError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from wan_diloco.clock import Clock

__all__ = ["Condition", "Keeper", "ProcessSpec", "last_line", "message_of"]

_LOG_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to keep alive.

    Attributes:
        name: For people and for its log.
        first: Command line of its first life; the first word is a path.
        again: Command line of every later one.
        log_path: Where stdout and stderr are appended; its folder exists.
    """

    name: str
    first: tuple[str, ...]
    again: tuple[str, ...]
    log_path: Path


class Condition(StrEnum):
    """How a kept process is."""

    NOT_STARTED = "not started"
    RUNNING = "running"
    WAITING = "restarting"
    FINISHED = "finished"
    STOPPED = "stopped"
    HOPELESS = "failed"
    GIVEN_UP = "given up"


class Keeper:
    """One process, through all its lives. Owned by the supervisor, on its event loop.

    Args:
        spec: What to keep alive.
        policy: When to start it again.
        rng: The jitter's chance.
        clock: Measures lives.
        env: The environment of the process.
        say: Told what happens, one sentence each.

    Attributes:
        prefix: Words before the command line of the next life, and of no other.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        policy: RestartPolicy,
        rng: random.Random,
        clock: Clock,
        env: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Nothing is started yet."""
        self.spec = spec
        self.condition = Condition.NOT_STARTED
        self.prefix: tuple[str, ...] = ()
        self.restarts = 0
        self.exit_code = 0
        self._policy = policy
        self._rng = rng
        self._clock = clock
        self._env = env
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The guardian's pid, which is also the process group of everything that the process starts."""
        return None if self._process is None else self._process.pid

    @property
    def command_pid(self) -> int | None:
        """The pid of the process itself; None while there is none."""
        import psutil

        if self.pid is None:
            return None
        with contextlib.suppress(psutil.Error):
            # The oldest: what it leaves behind becomes the guardian's too, for a moment.
            children = sorted(psutil.Process(self.pid).children(), key=lambda child: child.create_time())
            return next((child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE), None)
        return None

    async def keep(self) -> Condition:
        """Keep the process alive until it finished, failed for good, or was told to stop.

        Returns:
            FINISHED, STOPPED, HOPELESS or GIVEN_UP; `exit_code` says how its last life ended.

        Raises:
            StorageError: Its log can't be written.
        """
        failures = 0
        command = self.spec.first
        while not self._stopping.is_set():
            started_s = self._clock.now_s()
            prefix, self.prefix = self.prefix, ()
            self.exit_code = await self._live((*prefix, *command))
            command = self.spec.again
            if self._stopping.is_set():
                break
            meaning = meaning_of(self.exit_code)
            if meaning is not Meaning.RESTART:
                self.condition = Condition.FINISHED if meaning is Meaning.FINISHED else Condition.HOPELESS
                return self.condition
            failures = self._policy.failures_after(failures, self._clock.now_s() - started_s)
            delay_s = self._policy.delay_s(failures, self._rng)
            if delay_s is None:
                self._say(f"{self.spec.name} is given up after dying {failures} times in a row ({self.last_words()})")
                self.condition = Condition.GIVEN_UP
                return self.condition
            self._say(f"{self.spec.name} died ({describe_exit(self.exit_code)}), is started again in {delay_s:.1f} s")
            self.condition = Condition.WAITING
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            self.restarts += 1
        self.condition = Condition.STOPPED
        return self.condition

    def stop(self) -> None:
        """Tell the process to drain and end, for good; each call sends another SIGTERM."""
        self._stopping.set()
        self._send(signal.SIGTERM)

    def reload(self) -> None:
        """Tell the process to read its configuration again; a later life does so anyway."""
        self._send(signal.SIGHUP)

    def forbid_restart(self) -> None:
        """Let the process go on, but let its end be the last one."""
        self._stopping.set()

    def kill(self) -> None:
        """Kill the process and all that it started, for good."""
        self._stopping.set()
        self._send(KILL_ALL)

    def kill_guardian(self) -> None:
        """Kill the whole process group, should the guardian not have done it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Why the process ended, in its own words where it left any."""
        words = message_of(last_line(self.spec.log_path)).removeprefix("wan-diloco: ")
        return words.removeprefix(f"{self.spec.name}: ") or describe_exit(self.exit_code)

    async def _live(self, command: tuple[str, ...]) -> int:
        try:
            log = self.spec.log_path.open("ab")
        except OSError as exc:
            raise StorageError(f"can't write {self.spec.log_path}: {exc.strerror}") from exc
        with log:
            self._process = await asyncio.create_subprocess_exec(
                *guarded(os.getpid(), command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self._env),
                start_new_session=True,
            )
        self.condition = Condition.RUNNING
        if self._stopping.is_set():
            # Told to stop while it was being started, when there was nobody yet to signal.
            self._send(signal.SIGTERM)
        try:
            return await self._process.wait()
        finally:
            self.kill_guardian()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def message_of(line: str) -> str:
    """What a line of a log says to a person: of a structured one its reason, else its event's name."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    if not isinstance(fields, dict):
        return line
    said = next((str(fields[key]) for key in ("reason", "detail", "event") if fields.get(key)), line)
    return " ".join(said.split())


def last_line(path: Path) -> str:
    """The last line of a log that isn't empty; "" where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
