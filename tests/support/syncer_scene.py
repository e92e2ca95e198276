"""A whole syncer in this process, over the memory transport, and learners that speak the protocol by hand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.syncer import BATCH_TOKENS, close, contribution, maths_of, open_tiny, small_delta, tiny_config
from tests.support.text import write_text_corpus
from wan_diloco.algorithm.codec import Payload, codec_by_name
from wan_diloco.algorithm.publication import digest
from wan_diloco.clock import SystemClock
from wan_diloco.config import RunConfig
from wan_diloco.errors import TransportError
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    Acknowledged,
    ContributionRefused,
    Declined,
    DeclineReason,
    FragmentReport,
    Hello,
    Pace,
    Pull,
    Report,
    SegmentKind,
    Start,
    Stop,
    SyncerMessage,
    UpdateHeader,
    UpdateReceived,
    Welcome,
)
from wan_diloco.protocol.rejoin_messages import Donate, StateDeclined, StateRefusal
from wan_diloco.syncer.fragments_store import FragmentStore, Maths
from wan_diloco.syncer.main import _run_shipped, _shipper, build_service
from wan_diloco.syncer.restore import Restored
from wan_diloco.syncer.service import SyncerService
from wan_diloco.syncer.store_link import StoreLink
from wan_diloco.syncer.workers import Workers
from wan_diloco.telemetry import METRICS_FILE, MetricsWriter
from wan_diloco.transport.grpc_client import fetch_status
from wan_diloco.transport.interface import Connection
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import FragmentId, Incarnation, LearnerId, LocalStep, Term, Version
from wan_diloco.wire.frames import Buffers, pack

if TYPE_CHECKING:
    import torch

WAIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is so; a hang fails the test."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 -- anything may make it so, and nobody says so
            await asyncio.sleep(0.002)


class Syncer:
    """A running syncer and what it was made of."""

    def __init__(self, network: MemoryNetwork, service: SyncerService, restored: Restored, maths: Maths) -> None:
        self.network = network
        self.service = service
        self.restored = restored
        self.maths = maths
        self.task: asyncio.Task[None] | None = None
        # At the end: whether all that was offered is in the store.
        self.shipped: bool | None = None

    @property
    def versions(self) -> list[int]:
        return [version.count for version in self.service.state.versions]

    @property
    def at_rest(self) -> bool:
        """Whether nothing is being merged, and all that was is durable and installed."""
        state = self.service.state
        store = self.restored.store
        settled = store.settled and not state.closed
        return settled and [value.version for value in store.values()] == state.versions

    async def stop(self) -> None:
        """As SIGTERM does."""
        self.service.stop()
        assert self.task is not None
        await self.task

    async def crash(self) -> None:
        """Nothing is written any more."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def syncer(
    network: MemoryNetwork,
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    refragment: bool = False,
    workers: Workers | None = None,
    input_log: bool = False,
    prepare: Callable[[Restored], Restored] | None = None,
    link: StoreLink | None = None,
) -> AsyncIterator[Syncer]:
    """A syncer, listening."""
    maths = maths_of(config)
    restored = open_tiny(folder / "state", config, resume=resume, refragment=refragment, link=link)
    shipper = None if link is None else _shipper(config, folder / "state", restored, link)
    own_workers = workers or Workers.threads(1)
    clock = SystemClock()
    with MetricsWriter(folder / METRICS_FILE, clock) as metrics:
        service = build_service(
            config,
            folder,
            prepare(restored) if prepare is not None else restored,
            maths=maths,
            metrics=metrics,
            workers=own_workers,
            clock=clock,
            evaluate=False,
            input_log=input_log,
            shipper=shipper,
        )
        made = Syncer(network, service, restored, maths)
        server = network.server(service)
        await server.start()
        made.task = asyncio.get_running_loop().create_task(
            service.run() if shipper is None else _run_shipped(service, shipper)
        )
        try:
            yield made
            if not made.task.done():
                await made.stop()
        finally:
            await made.crash()
            await server.stop(0.5)
            if shipper is not None and link is not None:
                made.shipped = await asyncio.to_thread(shipper.finish, WAIT_S)
                link.leave()
            own_workers.shutdown()
            close(restored)


class Learner:
    """Answers pulls with deltas that depend only on its name, the fragment and the step; installs at once."""

    def __init__(self, connection: Connection, config: RunConfig, name: str, initial: Sequence[torch.Tensor]) -> None:
        self.name = name
        self.maths = maths_of(config)
        self.values = list(initial)
        self.versions = [Version(0, 0)] * len(initial)
        self.resyncs = [0] * len(initial)
        self.lows = [0] * len(initial)
        self.local_step = 0
        self.incarnation = 0
        self.units_before = 0
        self.life_id = ""
        self.term, self.term_id = Term(0), ""
        self.paces: list[int] = []
        self.granted_bytes_per_s = 0.0
        self.started = asyncio.Event()
        self.heard: list[SyncerMessage] = []
        self.problem: BaseException | None = None
        self.spoil: Callable[[Payload], Payload] = lambda payload: payload
        self._initial_digests = tuple(digest(value) for value in initial)
        self._config = config
        self._connection = connection

    async def run(self) -> None:
        """Until the connection ends."""
        await self._connection.connect()
        self._connection.send(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                run=self._config.run.name,
                learner_id=LearnerId(self.name),
                incarnation=Incarnation(self.incarnation),
                layout=self.maths.layout.lines(),
                settings=self._config.agreement(),
                initial_digests=self._initial_digests,
                local_step=LocalStep(self.local_step),
                tokens=self.local_step * BATCH_TOKENS,
                life_id=self.life_id,
                term=self.term,
                term_id=self.term_id,
            )
        )
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._listen())
                group.create_task(self._receive())
        except* TransportError as group:
            print(self.name, "lost its connection:", *group.exceptions)  # noqa: T201 -- shown where a test fails

    async def leave(self) -> None:
        await self._connection.close()

    def go_on(self, before: Learner) -> None:
        """The same life over another connection."""
        self.incarnation, self.local_step = before.incarnation, before.local_step
        self.values, self.versions = before.values, before.versions
        self.resyncs, self.lows = before.resyncs, before.lows
        self.life_id, self.units_before = before.life_id, before.units_before
        self._initial_digests = before._initial_digests

    def step(self, count: int = 1) -> None:
        """Train, as far as anybody can tell."""
        if self.problem is not None:
            raise self.problem
        self.local_step += count
        self.report()

    def report(self) -> None:
        self._connection.send(
            Report(
                local_step=LocalStep(self.local_step),
                tokens=self.local_step * BATCH_TOKENS,
                step_time_s=0.01,
                loss=2.0,
                learning_rate=1e-3,
                fragments=tuple(
                    FragmentReport(
                        fragment_id=FragmentId(index),
                        version=version,
                        pending=None,
                        resync=self.resyncs[index],
                        step_lo=LocalStep(self.lows[index]),
                        tokens_lo=self.lows[index] * BATCH_TOKENS,
                    )
                    for index, version in enumerate(self.versions)
                ),
            )
        )

    def refusals(self) -> list[ContributionRefused]:
        return [message for message in self.heard if isinstance(message, ContributionRefused)]

    async def _listen(self) -> None:
        async for message in self._connection.messages():
            self.heard.append(message)
            match message:
                case Welcome():
                    if message.incarnation != self.incarnation:
                        self.units_before = message.next_unit - self.local_step
                    self.incarnation = message.incarnation
                    self.report()
                    if message.started:
                        self.started.set()
                case Start():
                    self.started.set()
                case Pace():
                    self.paces.append(message.global_step)
                    self.granted_bytes_per_s = message.rate_bytes_per_s
                case Pull():
                    self._group.create_task(self._answer(message))
                case Donate():  # who said nothing would be waited for
                    self._connection.send(StateDeclined(transfer=message.transfer, reason=StateRefusal.NO_MOMENTS))
                case Stop():
                    self._group.create_task(self.leave())
                case Acknowledged() | ContributionRefused() | _:
                    pass

    async def _answer(self, pull: Pull) -> None:
        index = pull.fragment_id
        low, high = self.lows[index], self.local_step
        if high == low:
            self._connection.send(
                Declined(
                    round_id=pull.round_id,
                    attempt=pull.attempt,
                    fragment_id=index,
                    reason=DeclineReason.ZERO_STEPS,
                )
            )
            return
        with contextlib.suppress(TransportError):  # refused while it was still writing, perhaps: it is asked again
            await self.contribute(index, self.versions[index], round_id=pull.round_id, attempt=pull.attempt)

    async def contribute(self, index: FragmentId, base: Version, *, round_id: int = 0, attempt: int = 1) -> None:
        """Send what was done since the last install, as if that had been of `base`."""
        low, high = self.lows[index], self.local_step
        seed = int.from_bytes(hashlib.blake2b(f"{self.name} {index} {low}".encode(), digest_size=4).digest(), "big")
        payload = self.spoil(small_delta(self.maths, index, seed))
        header = contribution(
            self.maths,
            self.name,
            index,
            step_lo=low,
            step_hi=high,
            base=base,
            round_id=round_id,
            attempt=attempt,
            incarnation=self.incarnation,
            units_before=self.units_before,
        )
        await self._connection.upload(header, pack(payload.codes, payload.scales), 0.0)

    async def _receive(self) -> None:
        async for header, buffers in self._connection.updates():
            self._install(header, buffers)
            self._connection.send(
                UpdateReceived(fragment_id=header.fragment_id, version=header.to_version, resync=header.resync)
            )
            self.report()

    def _install(self, header: UpdateHeader, buffers: list[Buffers]) -> None:
        index = header.fragment_id
        value_N = self.values[index]
        for segment, both in zip(header.segments, buffers, strict=True):
            payload = Payload(codes=both.codes, scales=both.scales)
            if segment.kind is SegmentKind.VALUE:
                value_N = codec_by_name(segment.codec).decode(payload, self.maths.table(index))
            else:
                assert segment.from_version == self.versions[index]
                value_N = self.maths.published_after(index, value_N, payload)
            assert digest(value_N) == segment.digest, "the bits are the syncer's"
            self.versions[index] = segment.to_version
        self.values[index] = value_N
        self.resyncs[index] = max(self.resyncs[index], header.resync)
        self.lows[index] = self.local_step


@asynccontextmanager
async def learners(
    config: RunConfig,
    connect: Callable[[LearnerId], Connection],
    before: Sequence[Learner] = (),
    *,
    names: Sequence[str] = (),
) -> AsyncIterator[list[Learner]]:
    """All configured learners, or those named, connected, and free to take steps; the lives of `before` go on."""
    maths = maths_of(config)
    store = FragmentStore.fresh(maths.layout, model_tensors(build_model(config)))
    initial = [value.published_N for value in store.values()]
    chosen = [LearnerId(name) for name in names or [region.name for region in config.regions]]
    group = [Learner(connect(name), config, name, initial) for name in chosen]
    for learner, earlier in zip(group, before, strict=False):
        learner.go_on(earlier)
    tasks = [asyncio.get_running_loop().create_task(learner.run()) for learner in group]
    for task, learner in zip(tasks, group, strict=True):
        task.add_done_callback(lambda done, one=learner: setattr(one, "problem", done.exception()))
    try:
        for learner in group:
            await asyncio.wait_for(learner.started.wait(), WAIT_S)
        yield group
    finally:
        for learner in group:
            await learner.leave()
        await asyncio.wait(tasks)
        for task in tasks:
            task.result()


@asynccontextmanager
async def scene(config: RunConfig, folder: Path, **options: Any) -> AsyncIterator[tuple[Syncer, list[Learner]]]:
    """A syncer and its learners."""
    async with (
        MemoryNetwork() as network,
        syncer(network, config, folder, **options) as made,
        learners(config, network.connection) as group,
    ):
        yield made, group


async def advance(group: list[Learner], made: Syncer, steps: int, *, settle: bool = True) -> None:
    """Take steps one by one, all together.

    Args:
        group: Who takes them.
        made: Hears of each before the next is taken.
        steps: How many.
        settle: Also wait until every round that is due was published.
    """
    for _ in range(steps):
        step = made.service.status()["global_step"] + 1
        for learner in group:
            learner.step()

        def done(step: int = step) -> bool:
            status = made.service.status()
            busy = status["rounds_open"] or status["rounds_due"] or not made.at_rest
            return status["global_step"] >= step and not (settle and busy)

        await until(done)


def begun_by_one(folder: Path) -> RunConfig:
    """Of a run that west begins alone and that doesn't end: east is a process, which takes longer to start."""
    return tiny_config(
        run={"tokens": "10M", "start_timeout": "100ms"},
        data={"source": f"text:{write_text_corpus(folder / 'text.txt')}"},
        sync={"quorum": 1},
        evaluation={"every_steps": 100_000},
    )


async def crash_after(config: RunConfig, folder: Path, steps: int) -> list[Learner]:
    """Begin a run and have its syncer crash after so many steps; who was in it."""
    async with scene(config, folder) as (made, group):
        await advance(group, made, steps)
        await made.crash()
    return group


def merged(status: dict[str, Any], name: str) -> int:
    """In how many rounds it was."""
    return sum(one["merged_fresh"] for one in status["learners"] if one["learner_id"] == name)


async def trains_on(address: str, *group: Learner) -> dict[str, Any]:
    """Each of them takes steps until it is merged once more, by a syncer that is another process.

    Returns:
        What that one says then.
    """
    async with asyncio.timeout(WAIT_S):
        before = await fetch_status(address, 5.0)
        while True:
            for one in group:
                one.step()
            # What they are asked for now is not in the next look, but in one of those after it.
            await asyncio.sleep(0.02)
            status: dict[str, Any] = await fetch_status(address, 5.0)
            if all(merged(status, one.name) > merged(before, one.name) for one in group):
                return status
