"""The syncer's evaluator as seen from the syncer: a child process that may die, hang or talk nonsense.

Nothing here is waited for without bound: a child from which nothing is heard for long is killed, another is
started, and after a few tries in vain a snapshot goes without a score, which is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from wan_diloco.errors import ConfigError, StorageError
from wan_diloco.protocol.deadlines import EVALUATOR_LEAVE_S, EVALUATOR_SILENT_S
from wan_diloco.storage.filesystem import ensure_folder, translated

__all__ = ["Answer", "EvaluatorProcess", "Patience"]

Answer = Mapping[str, Any]

# A curve has a few hundred points; an evaluator that is this far behind would only fill the disk.
_BEHIND_MAX: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long and how often the evaluator is waited for.

    Attributes:
        silent_s: Without a word of it, while it has work.
        tries: For one snapshot, before it goes without a score.
        pause_s: Between two tries, for what was short to come back.
        leave_s: For a child that has nothing left to do to end.
    """

    silent_s: float = EVALUATOR_SILENT_S
    tries: int = 3
    pause_s: float = 2.0
    leave_s: float = EVALUATOR_LEAVE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    name: str
    final: bool


class EvaluatorProcess:
    """A child process that is given one snapshot after the other, and is replaced when it fails.

    Owner: the event loop.

    Args:
        run_folder: The run's; its `config.json` says what is evaluated.
        answered: Is given each result.
        progressed: Is told how far the final evaluation is, 0 to 1.
        report: Is told in one sentence what went wrong.
        command: The child's; for tests.
        patience: How long it is waited for.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        answered: Callable[[Answer], None],
        progressed: Callable[[float], None],
        report: Callable[[str], None],
        command: Sequence[str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Start nothing yet."""
        own = (sys.executable, "-m", "wan_diloco.syncer.evaluator", str(run_folder))
        self._command = tuple(command or own)
        self._log = run_folder / "logs" / "evaluator.log"
        self._answered = answered
        self._progressed = progressed
        self._report = report
        self._patience = patience or Patience()
        self._process: asyncio.subprocess.Process | None = None
        self._requests: deque[_Request] = deque()
        self._asked = asyncio.Event()
        self._finished = asyncio.Event()
        self._hopeless = False
        self._problem = "the evaluator was stopped"

    @property
    def behind(self) -> bool:
        """Whether it has more to do than is sensible, or is gone."""
        return self._hopeless or self._finished.is_set() or len(self._requests) >= _BEHIND_MAX

    @property
    def pid(self) -> int | None:
        """Of the child that was started last."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the first child.

        Ordering: before gRPC is used, which doesn't like a process that is forked around it. Later ones are started
        all the same, since all that they do before they are another program is to become one.

        Raises:
            ConfigError: The folder of its log can't be one.
            StorageUnusable: Its log can't be a file, or its program isn't one for us.
            StorageError: The system refuses for now.
        """
        # Without its parents: a run's folder that somebody removed isn't made anew.
        ensure_folder(self._log.parent, parents=False)
        with translated("can't open", self._log):
            errors = self._log.open("ab")
        with errors, translated("the evaluator can't be started with", Path(self._command[0])):
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=2**20,
                # A Ctrl-C at the terminal is the syncer's to deal with; the end of stdin ends the child.
                start_new_session=True,
            )

    def ask(self, name: str, *, final: bool) -> None:
        """Have a snapshot evaluated after those asked for before; nothing can be asked after the final one."""
        if not self._finished.is_set():
            self._requests.append(_Request(name=name, final=final))
            self._asked.set()

    async def run(self) -> None:
        """Have all evaluated that is asked for, until the final one is done; cancelling ends the child."""
        try:
            while True:
                await self._asked.wait()
                request = self._requests[0]
                answer = await self._evaluate(request)
                self._requests.popleft()
                if not self._requests:
                    self._asked.clear()
                self._conclude(request, answer)
                if request.final:
                    break
            await self._end(self._patience.leave_s)
        finally:
            self._finished.set()
            await self._end(0.0)

    async def finished(self) -> str:
        """Wait until the final answer is there, or none can come any more.

        Returns:
            Why there is none, in a sentence; empty when it is there.
        """
        await self._finished.wait()
        return self._problem

    # ---- inside ----------------------------------------------------------------------------------

    def _conclude(self, request: _Request, answer: Answer | str) -> None:
        problem = answer if isinstance(answer, str) else answer.get("problem", "")
        if request.final:
            self._problem = problem
        if problem:
            self._report(f"snapshot {request.name} wasn't evaluated: {problem}")
        elif not isinstance(answer, str):
            self._answered(answer)

    async def _evaluate(self, request: _Request) -> Answer | str:
        """The child's answer, or why there is none."""
        if self._hopeless and not request.final:
            return "the evaluator failed before"
        problem = ""
        for number in range(self._patience.tries):
            if number:
                await self._end(0.0)
                await asyncio.sleep(self._patience.pause_s)
            try:
                if self._process is None:
                    await self.start()
                answer = await self._try(request)
            except TimeoutError:
                problem = f"nothing was heard of the evaluator for {self._patience.silent_s:.0f} s"
                continue
            except (StorageError, ConfigError) as exc:
                problem = str(exc)
                continue
            if answer is not None:
                self._hopeless = False
                return answer
            problem = f"the evaluator ended by itself; {self._log} may say why"
        self._hopeless = True
        return f"{problem} (tried {self._patience.tries} times)"

    async def _try(self, request: _Request) -> Answer | None:
        """Ask, and hear the answer; None when the child ends first.

        Raises:
            TimeoutError: It is silent.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        # Whoever waits for the run's end waits for all that is evaluated before.
        hurry = any(item.final for item in self._requests)
        line = json.dumps({"snapshot": request.name, "final": request.final, "hurry": hurry})
        with contextlib.suppress(OSError, RuntimeError):  # it has ended, which is read below
            process.stdin.write(line.encode() + b"\n")
        while True:
            async with asyncio.timeout(self._patience.silent_s):
                line_read = await process.stdout.readline()
            if not line_read:
                return None
            answer = _parse(line_read)
            if answer.get("snapshot") != request.name:
                continue
            if "progress" not in answer:
                return answer
            if request.final:
                self._progressed(answer["progress"])

    async def _end(self, patience_s: float) -> None:
        """End the child: let it leave by itself for so long, then kill it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._patience.leave_s):
                        await process.wait()


def _parse(line: bytes) -> Answer:
    """What a line says; nothing where it isn't one of ours, as when a library prints."""
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
