"""The supervisor of a run on one machine: a syncer and its learners, from start to end.

The syncer's end is the run's end; a learner's end is its own affair, unless too few are left to make a quorum, or it
couldn't even begin.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wan_diloco.cli.keeper import Condition, Keeper, ProcessSpec
from wan_diloco.cli.lives import RestartPolicy
from wan_diloco.errors import EXIT_AUTH, EXIT_INTERNAL, EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, EXIT_TEMPORARY

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from wan_diloco.clock import Clock

__all__ = ["Outcome", "Patience", "Supervisor"]

_ADDRESS_POLL_S: Final = 0.1
# A learner that is so won't be started again.
_OUT: Final = frozenset({Condition.HOPELESS, Condition.GIVEN_UP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: What the supervising process should leave with.
        problem: One sentence; empty where there was none.
    """

    exit_code: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long processes may take to end, before they are pressed.

    Attributes:
        finish_s: Learners, by themselves, after the end of the run.
        drain_s: Learners, after SIGTERM, before the syncer is told as well: the time to write a checkpoint.
        total_s: Anybody, from the learners' SIGTERM on. Schedulers kill 30 s after they told the run to end; all of it,
            and the killing, is over by then.
        hurry_s: Anybody, after a second Ctrl-C.
        kill_s: A guardian, to kill what it guards.
    """

    finish_s: float = 10.0
    drain_s: float = 9.0
    total_s: float = 26.0
    hurry_s: float = 2.0
    kill_s: float = 2.0

    @property
    def syncer_s(self) -> float:
        """What the syncer has for its end at the least: merges, a snapshot, and what its store lacks."""
        return self.total_s - self.drain_s


def _concerns_all(keeper: Keeper) -> bool:
    """Whether a learner that failed for good should end the run although the others could go on.

    Wrong words or a wrong configuration in its first life do: all learners are started from the same ones, and whoever
    started the run is still there to mend them. A refused identity doesn't: another process has taken this region's
    place, which is no affair of the others. Nor does anything that befalls a later life, which began well before: a
    file that went away must not end what others have trained for days.
    """
    return keeper.exit_code != EXIT_AUTH and not keeper.restarts


class Supervisor:
    """Starts, keeps alive and ends the processes of one run. Use it once, on one event loop.

    Args:
        syncer: Started first.
        learners: Started when the syncer listens.
        address_path: The file that appears when the syncer listens; it doesn't exist yet.
        quorum: The run can't go on with fewer learners than this.
        env: The environment of all processes.
        policy: When processes are started again.
        patience: How long they may take to end.
        rng: Chance, for jitter.
        clock: Measures lives.
        say: Told what happens, one sentence each.

    Attributes:
        held: Names of learners that aren't to be started yet; whoever holds one back takes it out.
        decided: Set when the run's end is decided; nobody else sets it.
    """

    def __init__(
        self,
        *,
        syncer: ProcessSpec,
        learners: Sequence[ProcessSpec],
        address_path: Path,
        quorum: int,
        env: Mapping[str, str],
        policy: RestartPolicy,
        patience: Patience,
        rng: random.Random,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        """Nothing is started yet."""

        def keeper(spec: ProcessSpec) -> Keeper:
            return Keeper(spec, policy=policy, rng=rng, clock=clock, env=env, say=say)

        self.syncer = keeper(syncer)
        self.learners = tuple(keeper(spec) for spec in learners)
        self.held: set[str] = set()
        self._address_path = address_path
        self._quorum = quorum
        self._patience = patience
        self._say = say
        self._outcome: Outcome | None = None
        self.decided = asyncio.Event()
        self._hurry = asyncio.Event()
        self._interrupted = False

    async def run(self) -> Outcome:
        """Run until the syncer finishes or fails for good, too few learners are left, or `interrupt` is called.

        Returns:
            How it ended; by then no process is left.

        Raises:
            StorageError: A log can't be written.
        """
        tasks: dict[Keeper, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                tasks[self.syncer] = group.create_task(self._follow_syncer())
                for keeper in self.learners:
                    tasks[keeper] = group.create_task(self._follow_learner(keeper))
                await self.decided.wait()
                await self._end(tasks)
        finally:
            # Cancelled, or one of our own bugs: still nothing may be left.
            for keeper in (self.syncer, *self.learners):
                keeper.kill_guardian()
        assert self._outcome is not None
        return self._outcome

    def interrupt(self, number: signal.Signals) -> None:
        """End the run: let everybody drain at the first call, press them at the second, or where it ends already.

        Args:
            number: SIGINT or SIGTERM, which decides the exit code.
        """
        if self._interrupted or self.ending:
            self._hurry.set()
        self._interrupted = True
        self._decide(Outcome(exit_code=EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM))

    def give_up(self, problem: str) -> None:
        """End the run in order, because of a bug of whoever supervises it.

        Args:
            problem: One sentence.
        """
        self._decide(Outcome(exit_code=EXIT_INTERNAL, problem=problem))

    def reload(self) -> None:
        """Have everybody read the configuration again."""
        for keeper in (self.syncer, *self.learners):
            keeper.reload()

    @property
    def ending(self) -> bool:
        """Whether the run's end is decided."""
        return self.decided.is_set()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, and not something before it."""
        return self._outcome is not None and self._outcome.exit_code == EXIT_OK

    def _decide(self, outcome: Outcome) -> None:
        # The first reason stands: what comes after is its consequence.
        if self._outcome is None:
            self._outcome = outcome
            self.decided.set()

    async def _follow_syncer(self) -> None:
        condition = await self.syncer.keep()
        if condition is Condition.FINISHED:
            self._decide(Outcome(exit_code=EXIT_OK))
        else:
            self._decide(self._failure(self.syncer, condition))

    async def _follow_learner(self, keeper: Keeper) -> None:
        while keeper.spec.name in self.held or not self._address_path.exists():
            if self.decided.is_set():
                return
            await asyncio.sleep(_ADDRESS_POLL_S)
        condition = await keeper.keep()
        if condition not in _OUT:
            return
        left = sum(other.condition not in _OUT for other in self.learners)
        if left < self._quorum or (condition is Condition.HOPELESS and _concerns_all(keeper)):
            self._decide(self._failure(keeper, condition))
            return
        if condition is Condition.HOPELESS:
            self._say(f"{keeper.spec.name} is out: {keeper.last_words()}")
        self._say(f"the run goes on with {left} of {len(self.learners)} regions")

    def _failure(self, keeper: Keeper, condition: Condition) -> Outcome:
        name, words = keeper.spec.name, keeper.last_words()
        if condition is Condition.HOPELESS:
            return Outcome(exit_code=keeper.exit_code, problem=f"{name} failed: {words}")
        return Outcome(exit_code=EXIT_TEMPORARY, problem=f"{name} dies again and again: {words}")

    async def _end(self, tasks: Mapping[Keeper, asyncio.Task[None]]) -> None:
        """Bring all processes down, learners before the syncer, so that their goodbyes are heard."""
        patience, loop = self._patience, asyncio.get_running_loop()
        learners = {tasks[keeper] for keeper in self.learners}
        if self._outcome == Outcome(exit_code=EXIT_OK):
            for keeper in self.learners:
                keeper.forbid_restart()
            await self._gone(learners, patience.finish_s)
        told_s = loop.time()
        for keeper in self.learners:
            keeper.stop()
        await self._gone(learners, patience.drain_s)
        self.syncer.stop()
        everybody = {*learners, tasks[self.syncer]}
        await self._gone(everybody, told_s + patience.total_s - loop.time())
        if self._hurry.is_set():
            await asyncio.wait(everybody, timeout=patience.hurry_s)
        for keeper, task in tasks.items():
            if not task.done():
                self._say(f"{keeper.spec.name} doesn't end, is killed")
                keeper.kill()
        await asyncio.wait(everybody, timeout=patience.kill_s)
        for keeper in tasks:
            keeper.kill_guardian()

    async def _gone(self, tasks: set[asyncio.Task[None]], timeout_s: float) -> None:
        """Wait until the tasks are done, or the time is up, or somebody is in a hurry."""
        if self._hurry.is_set():
            return
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(asyncio.wait(tasks, timeout=timeout_s))
            hurry = group.create_task(self._hurry.wait())
            await asyncio.wait({gone, hurry}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            hurry.cancel()
