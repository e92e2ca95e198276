"""The syncer's side of the evaluator: publishes snapshots for it, runs its process, hears its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from wan_diloco.algorithm.layout import Layout
from wan_diloco.errors import CheckpointError, ConfigError, StorageError
from wan_diloco.storage import Snapshot
from wan_diloco.syncer.fragments_store import FragmentValue, published_tensors
from wan_diloco.syncer.workers import Workers, in_executor
from wan_diloco.units import GlobalStep

__all__ = ["Curve", "EvaluatorProcess"]

# A curve has a few hundred points; an evaluator that is this far behind would only fill the disk.
_BEHIND_MAX: Final = 16

Answer = Mapping[str, Any]


class EvaluatorProcess:
    """One child process, given one snapshot after the other.

    Owner: the event loop. A child that dies is not started again: the run matters more than its curve.

    Args:
        run_folder: The run's; its `config.json` says what is evaluated.
        answered: Is given each result.
        report: Is told in one sentence what went wrong.
    """

    def __init__(self, run_folder: Path, answered: Callable[[Answer], None], report: Callable[[str], None]) -> None:
        """Start nothing yet."""
        self._run_folder = run_folder
        self._answered = answered
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._asked: set[str] = set()
        self._finished = asyncio.Event()

    @property
    def behind(self) -> bool:
        """Whether it has more to do than is sensible, or is gone."""
        return self._finished.is_set() or len(self._asked) >= _BEHIND_MAX

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the child.

        Ordering: before gRPC is used, which doesn't like a process that is forked around it.
        """
        log = self._log()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "wan_diloco.syncer.evaluator",
                str(self._run_folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=2**20,
                # A Ctrl-C at the terminal is the syncer's to deal with; the end of stdin ends the child.
                start_new_session=True,
            )

    async def run(self) -> None:
        """Hear the child's answers until it ends; cancelling ends it."""
        process = self._started()
        try:
            await self._hear(process)
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
        finally:
            self._finished.set()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def ask(self, name: str, *, final: bool) -> None:
        """Have a snapshot evaluated after those asked for before."""
        if self._finished.is_set():
            return
        self._asked.add(name)
        line = json.dumps({"snapshot": name, "final": final}).encode() + b"\n"
        stdin = self._started().stdin
        assert stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has ended; `run` says so
            stdin.write(line)

    async def finished(self) -> None:
        """Wait until the final answer is there, or none can come any more."""
        await self._finished.wait()

    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start first"
        return self._process

    def _log(self) -> Path:
        return self._run_folder / "logs" / "evaluator.log"

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            answer = json.loads(line)
            self._asked.discard(answer["snapshot"])
            if "problem" in answer:
                self._report(f"snapshot {answer['snapshot']} wasn't evaluated: {answer['problem']}")
            else:
                self._answered(answer)
            if answer["final"]:
                return
        self._report(f"the evaluator ended by itself; {self._log()} may say why")


class Curve:
    """Gives the evaluator the published model every so many global steps, and at the end.

    Owner: the event loop.

    Args:
        run_folder: The run's.
        layout: Of its model.
        evaluator: Looks at what is published.
        workers: Where snapshots are written.
        every_steps: Between two points.
        from_step: The global step at which this syncer begins; at 0 the initial model is a point.
        report: Is told in one sentence what went wrong.
    """

    def __init__(
        self,
        run_folder: Path,
        layout: Layout,
        evaluator: EvaluatorProcess,
        workers: Workers,
        *,
        every_steps: int,
        from_step: GlobalStep,
        report: Callable[[str], None],
    ) -> None:
        """Publish nothing yet."""
        self._folder = run_folder / "published"
        self._layout = layout
        self._evaluator = evaluator
        self._workers = workers
        self._every_steps = every_steps
        self._report = report
        self._last_point = from_step // every_steps if from_step > 0 else -1

    async def start(self) -> None:
        """Start the evaluator; before gRPC is used."""
        await self._evaluator.start()

    async def run(self) -> None:
        """Hear the evaluator; what a former syncer published and nobody looked at comes first."""
        for name in sorted(path.name for path in self._folder.glob("step-*")):
            self._evaluator.ask(name, final=False)
        await self._evaluator.run()

    def due(self, step: GlobalStep) -> bool:
        """Whether a new point is reached; true once for each."""
        point = step // self._every_steps
        if point <= self._last_point:
            return False
        self._last_point = point
        return True

    async def publish(self, step: GlobalStep, tokens: int, values: Sequence[FragmentValue]) -> None:
        """Have the model of this moment evaluated, unless the evaluator is too far behind.

        Args:
            step: Now.
            tokens: Trained by all learners.
            values: The fragments of now.
        """
        if self._evaluator.behind:
            self._report(f"the model of step {step} isn't evaluated: the evaluator is behind")
            return
        await self._publish(f"step-{step:09d}", step, tokens, values, final=False)

    async def finish(self, step: GlobalStep, tokens: int, values: Sequence[FragmentValue]) -> None:
        """Have the final model evaluated on everything that was held out, and wait for it."""
        await self._publish("final", step, tokens, values, final=True)
        await self._evaluator.finished()

    async def _publish(
        self, name: str, step: GlobalStep, tokens: int, values: Sequence[FragmentValue], *, final: bool
    ) -> None:
        manifest = {"global_step": step, "tokens": tokens}

        def write() -> None:
            Snapshot(tensors=published_tensors(self._layout, values), manifest=manifest).write(self._folder, name)

        try:
            await in_executor(self._workers.files, write)
        except CheckpointError:
            pass  # a former syncer wrote this very one
        except (StorageError, ConfigError) as exc:
            self._report(f"the model of step {step} can't be published: {exc}")
            if not final:
                return
        self._evaluator.ask(name, final=final)
