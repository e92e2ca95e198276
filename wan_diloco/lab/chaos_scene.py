"""A supervised run as faults find it: its processes, its links, its disk, and who is held back.

Who supervises it isn't known here, only whom to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from wan_diloco.config import FaultSchedule, RunConfig
from wan_diloco.lab.chaos_storm import Befallen, Storm
from wan_diloco.lab.chaos_watch import Observations, Watch
from wan_diloco.lab.links import LinkCounts, LinkState
from wan_diloco.lab.proxy import LinkProxy, loopback_socket
from wan_diloco.lab.proxy_control import LinkControl
from wan_diloco.lab.small_disk import Ballast
from wan_diloco.lab.victims import Victim, command_of, uplink_of
from wan_diloco.storage import write_text
from wan_diloco.transport.grpc_client import fetch_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Scene", "Supervised"]

# With a late joiner nobody waits for all; on a busy machine a start takes so long.
_START_TIMEOUT_S: Final = 20.0
_CONTROL_FILE: Final = "links"


class Supervised(Protocol):
    """Who keeps a run's processes alive.

    Attributes:
        decided: Set when the run's end is decided, whatever its reason.
    """

    @property
    def decided(self) -> asyncio.Event:
        """See above."""
        ...

    def guardian(self, name: str) -> int | None:
        """The pid of the parent of the syncer, or of a region's learner; None before it was first started."""
        ...

    def hold(self, regions: frozenset[str]) -> None:
        """Don't start these learners yet."""
        ...

    def release(self, region: str) -> None:
        """Start one that was held back."""
        ...

    def skew(self, name: str, offset_s: float) -> None:
        """Give the next life of the syncer, or of a region's learner, a clock that is ahead."""
        ...


class Scene:
    """One chaos run. Make it before the run, and play it on the run's event loop.

    Args:
        config: Of the run, as it was given.
        folder: Of the run; it exists.
        schedule: What is to befall it.
        fills: Whether its disk may be filled.

    Attributes:
        config: Of the run, with each region's own way to the syncer.
        schedule: As given.
        befallen: What happened so far.
        seen: What was seen so far.
        problem: Why nothing more is seen, and nothing more befalls the run; empty while all is well.
    """

    def __init__(self, config: RunConfig, folder: Path, schedule: FaultSchedule, *, fills: bool) -> None:
        """Take ports, and serve nobody yet."""
        self.schedule = schedule
        self.befallen: list[Befallen] = [Befallen(fault=fault) for fault in schedule.in_order]
        self.seen = Observations()
        self.problem = ""
        self._folder = folder
        self._ballast = Ballast(folder) if fills else None
        self._sockets = {region.name: loopback_socket() for region in config.regions}
        self._addresses = {name: f"127.0.0.1:{each.getsockname()[1]}" for name, each in self._sockets.items()}
        self._links: dict[str, LinkProxy] = {}
        self._known: dict[str, Victim | None] = {}
        self._supervisor: Supervised | None = None
        self.config = self.routed(config)

    def routed(self, config: RunConfig) -> RunConfig:
        """A configuration in which each region reaches the syncer over its own link."""
        regions = tuple(
            region.model_copy(update={"address": self._addresses.get(region.name, region.address)})
            for region in config.regions
        )
        run = config.run
        if self.schedule.late:
            timeout_s = min(run.start_timeout_s, _START_TIMEOUT_S)
            run = run.model_copy(update={"start_timeout_s": timeout_s})
        return config.model_copy(update={"regions": regions, "run": run})

    async def play(self, supervisor: Supervised, say: Callable[[str], None]) -> None:
        """Serve the links, watch, and have the faults befall the run from its first step on; until cancelled.

        What fails here is said, and is no fault of the run's, which goes on over its links.

        Args:
            supervisor: Of the run.
            say: Told what happens.
        """
        self._supervisor = supervisor
        supervisor.hold(self.schedule.late)
        names = tuple(self._sockets)
        async with AsyncExitStack() as stack:
            for name, listening in self._sockets.items():
                link = LinkProxy(self.address, random.Random(f"{self.schedule.seed}/{name}"), listening)
                self._links[name] = await stack.enter_async_context(link)
            control = await stack.enter_async_context(LinkControl(self._links))
            # Nobody listens there afterwards.
            stack.callback(self._forget_control)
            write_text(self._folder / _CONTROL_FILE, control.address)
            watch = Watch(self._folder / "tape.jsonl", names, self, fetch_status)
            self.seen = watch.seen
            storm = Storm(
                self.schedule,
                processes=self,
                links=self._links,
                ballast=self._ballast,
                starting=supervisor,
                say=say,
                ends=(supervisor.decided, watch.ended),
            )
            self.befallen = storm.befallen
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(watch.run())
                    await watch.started.wait()
                    await storm.run()
            except Exception as exc:  # noqa: BLE001 - an instrument must never end what it measures
                self.problem = "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in _leaves(exc))
                say(f"chaos: nothing more is watched, and no more faults befall the run ({self.problem})")
                await asyncio.Event().wait()
            finally:
                watch.look_at_tape()

    def _forget_control(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / _CONTROL_FILE).unlink(missing_ok=True)

    @property
    def counts(self) -> dict[str, LinkCounts]:
        """What went over each link."""
        return {name: link.counts for name, link in self._links.items()}

    # ---- for faults and whoever watches ----------------------------------------------------------

    def syncer(self) -> Victim | None:
        """The syncer's process."""
        return self._found("syncer", self._command)

    def learner(self, region: str) -> Victim | None:
        """A learner's training process."""
        return self._found(region, self._command)

    def uplink(self, region: str) -> Victim | None:
        """A learner's uplink."""
        return self._found(f"uplink of {region}", lambda _: uplink_of(self.learner(region)))

    def link(self, region: str) -> LinkState:
        """How a region's link is."""
        return self._links[region].state

    def address(self) -> str:
        """The syncer's own; "" while it doesn't listen."""
        try:
            return (self._folder / "address").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _command(self, name: str) -> Victim | None:
        return None if self._supervisor is None else command_of(self._supervisor.guardian(name))

    def _found(self, name: str, find: Callable[[str], Victim | None]) -> Victim | None:
        """The one that was found last, if it lives; to look for a process costs a look at every one of the machine."""
        known = self._known.get(name)
        if known is None or known.condition() is None:
            known = self._known[name] = find(name)
        return known


def _leaves(problem: Exception) -> Iterator[Exception]:
    if isinstance(problem, ExceptionGroup):
        for each in problem.exceptions:
            yield from _leaves(each)
    else:
        yield problem
