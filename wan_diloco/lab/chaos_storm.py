"""Has the faults of a schedule befall a run, each at its time, and takes back what can be taken back.

Whatever ends it, no process stays stopped, no link stays bad and no disk stays full. A run that ends is left alone from
then on: it has its own end to come to.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from wan_diloco.config import FaultKind, FaultSchedule, FaultSettings
from wan_diloco.lab.links import GOOD, LinkState, LinkWay, Passage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wan_diloco.lab.chaos_watch import Processes
    from wan_diloco.lab.proxy import LinkProxy
    from wan_diloco.lab.small_disk import Ballast
    from wan_diloco.lab.victims import Victim

__all__ = ["Befallen", "Starting", "Storm"]

# A process that isn't there when it should be hit is being started again.
_FIND_S: Final = 20.0
_FIND_EVERY_S: Final = 0.05
# Who makes room on a full disk, by dropping what is old, finds it full again.
_FILL_EVERY_S: Final = 0.5
_GONE: Final = "the process ended by itself"


class Starting(Protocol):
    """Who starts the processes."""

    def release(self, region: str) -> None:
        """Start a region's learner that was held back."""
        ...

    def skew(self, name: str, offset_s: float) -> None:
        """Give the next life of the syncer, or of a region's learner, a clock that is ahead."""
        ...


@dataclass(slots=True, kw_only=True)
class Befallen:
    """A fault that happened, or was to.

    Attributes:
        fault: As scheduled.
        began_s, ended_s: On the event loop's clock; None when it didn't happen.
        cut_short: Whether it was undone before its time, since the run ended.
        problem: Why it didn't happen; empty when it did, or when the run ended first.
    """

    fault: FaultSettings
    began_s: float | None = None
    ended_s: float | None = None
    cut_short: bool = False
    problem: str = ""


class Storm:
    """Use it once, on the event loop of the links.

    Args:
        schedule: What is to happen.
        processes: To be hit.
        links: By region.
        ballast: Fills the disk; None where none can be filled.
        starting: Who starts the processes.
        say: Told what happens, one sentence each.
        ends: As soon as one of them is set the run ends: no fault begins any more, and those under way are undone.

    Attributes:
        befallen: What happened, in order of the schedule.
    """

    def __init__(
        self,
        schedule: FaultSchedule,
        *,
        processes: Processes,
        links: Mapping[str, LinkProxy],
        ballast: Ballast | None,
        starting: Starting,
        say: Callable[[str], None],
        ends: Sequence[asyncio.Event] = (),
    ) -> None:
        """Do nothing yet."""
        self.befallen = [Befallen(fault=fault) for fault in schedule.in_order]
        self._processes = processes
        self._links = links
        self._ballast = ballast
        self._starting = starting
        self._say = say
        self._ends = tuple(ends)
        self._on_links: dict[str, list[FaultSettings]] = {name: [] for name in links}
        self._frozen: list[Victim] = []
        self._full = 0
        # One thread, so that the disk is emptied after whatever was written to it last.
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="ballast")

    async def run(self) -> None:
        """Let everything happen, counted from now, until the last fault is over or the run ends."""
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                faults = [group.create_task(self._befall(item, began_s + item.fault.at_s)) for item in self.befallen]
                watching = [group.create_task(self._end_with(event, faults)) for event in self._ends]
                await asyncio.wait(faults)
                for task in watching:
                    task.cancel()
        finally:
            for victim in self._frozen:
                victim.send(signal.SIGCONT)
            for name, active in self._on_links.items():
                active.clear()
                self._links[name].change(GOOD)
            if self._ballast is not None:
                await self._off_the_loop(self._ballast.empty)
            self._filler.shutdown(wait=False)

    async def _end_with(self, event: asyncio.Event, faults: Sequence[asyncio.Task[None]]) -> None:
        await event.wait()
        if not all(task.done() for task in faults):
            self._say("chaos: the run ends: no fault befalls it any more, and those under way are undone")
        for task in faults:
            task.cancel()

    async def _befall(self, item: Befallen, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(due_s - loop.time())
        try:
            await self._happen(item)
        except asyncio.CancelledError:
            if item.began_s is not None:
                item.ended_s, item.cut_short = loop.time(), True
            raise

    async def _happen(self, item: Befallen) -> None:
        loop = asyncio.get_running_loop()
        fault = item.fault
        victim = None
        if fault.kind in (FaultKind.KILL, FaultKind.STOP, FaultKind.SKEW):
            victim = await self._find(fault)
            if victim is None:
                item.problem = f"there was no process for {_FIND_S:.0f} s"
                self._say(f"chaos: {_said(fault)}: {item.problem}")
                return
        if any(event.is_set() for event in self._ends):
            # Whoever cancels us is to run in this very moment.
            return
        self._say(f"chaos: {_said(fault)}")
        item.began_s = loop.time()
        match fault.kind:
            case FaultKind.KILL:
                assert victim is not None
                if not victim.send(signal.SIGKILL):
                    item.problem, item.began_s = _GONE, None
            case FaultKind.SKEW:
                assert victim is not None
                assert fault.offset_s is not None
                self._starting.skew(fault.region or "syncer", fault.offset_s)
                victim.send(signal.SIGKILL)
            case FaultKind.STOP:
                assert victim is not None
                await self._freeze(victim, item)
            case FaultKind.JOIN:
                self._starting.release(fault.region)
            case FaultKind.FULL_DISK:
                await self._fill(item)
            case FaultKind.CUT | FaultKind.HALF_OPEN | FaultKind.THROTTLE | FaultKind.DELAY | FaultKind.CORRUPT:
                await self._disturb(fault)
            case _:
                assert_never(fault.kind)
        item.ended_s = loop.time()

    async def _find(self, fault: FaultSettings) -> Victim | None:
        """The process that a fault hits, when it is there."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _FIND_S
        while loop.time() < until_s:
            match fault.sort:
                case "syncer":
                    victim = self._processes.syncer()
                case "learner":
                    victim = self._processes.learner(fault.region)
                case _:
                    victim = self._processes.uplink(fault.region)
            if victim is not None:
                return victim
            await asyncio.sleep(_FIND_EVERY_S)
        return None

    async def _freeze(self, victim: Victim, item: Befallen) -> None:
        """Stop a process for a while; one that two faults stop goes on after both."""
        if not victim.send(signal.SIGSTOP):
            item.problem, item.began_s = _GONE, None
            return
        self._frozen.append(victim)
        await asyncio.sleep(item.fault.duration_s)
        self._frozen.remove(victim)
        if victim not in self._frozen:
            victim.send(signal.SIGCONT)

    async def _disturb(self, fault: FaultSettings) -> None:
        active = self._on_links[fault.region]
        active.append(fault)
        self._links[fault.region].change(_link_under(active))
        await asyncio.sleep(fault.duration_s)
        active.remove(fault)
        self._links[fault.region].change(_link_under(active))

    async def _fill(self, item: Befallen) -> None:
        if self._ballast is None:
            item.problem, item.began_s = "no disk can be filled here", None
            return
        self._full += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(item.fault.duration_s):
                    while True:
                        if not await self._off_the_loop(self._ballast.fill):
                            await asyncio.sleep(_FILL_EVERY_S)
        except OSError as exc:
            item.problem, item.began_s = f"the disk can't be filled: {exc.strerror}", None
        self._full -= 1
        if not self._full:
            await self._off_the_loop(self._ballast.empty)

    async def _off_the_loop(self, work: Callable[[], object]) -> object:
        """Have a disk do something; links and whoever watches go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._filler, work)


def _link_under(faults: list[FaultSettings]) -> LinkState:
    """How a link is while all these befall it."""
    state = GOOD
    for fault in faults:
        way = LinkWay(fault.way)
        match fault.kind:
            case FaultKind.CUT if way is LinkWay.BOTH:
                state = LinkState(up=state.up, down=state.down, cut=True)
            case FaultKind.CUT:
                state = state.having(way, passage=Passage.HELD)
            case FaultKind.HALF_OPEN:
                state = state.having(passage=Passage.LOST)
            case FaultKind.THROTTLE:
                state = state.having(way, rate_bytes_per_s=fault.rate_bytes_per_s)
            case FaultKind.DELAY:
                state = state.having(way, delay_s=fault.delay_s)
            case FaultKind.CORRUPT:
                state = state.having(way, flips_per_byte=fault.flips_per_byte)
            case _:
                raise AssertionError(f"{fault.kind} isn't a link's")
    return state


def _said(fault: FaultSettings) -> str:
    what = f"{fault.kind.value} {fault.target}"
    if fault.way != "both":
        what += f" {fault.way}"
    if fault.offset_s is not None:
        what += f" by {fault.offset_s:.0f} s"
    return f"{what} for {fault.duration_s:.1f} s" if fault.duration_s else what
