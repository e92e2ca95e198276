"""A syncer that does what a test tells it to, over real gRPC; and a learner process to try it on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.support.transport import AssemblingSink
from wan_diloco.config import RunConfig, load_config
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    Goodbye,
    Hello,
    LearnerMessage,
    RefusalReason,
    Refused,
    Report,
    Welcome,
)
from wan_diloco.storage import write_text
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.transport.interface import Session
from wan_diloco.units import Epoch, GlobalStep, Incarnation, ShardId, Term, TransferId, Version
from wan_diloco.wire.frames import Buffers

T = TypeVar("T")

CONFIG = """
[run]
name = "stub"
tokens = "10M"
[model]
dim = 8
layers = 1
heads = 2
sequence_length = 16
[data]
source = "text:{corpus}"
[inner]
lr = {lr}
batch_tokens = 32
[sync]
fragments = 2
period_steps = 8
[wire]
codec = "f32"
[[regions]]
name = "east"
"""


def write_config(folder: Path, *, lr: float = 3e-3) -> Path:
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"The {i}th day was much like the {i * i}th.\n\n" for i in range(600)))
    path = folder / "run.toml"
    path.write_text(CONFIG.format(corpus=corpus, lr=lr))
    return path


def read_config(path: Path) -> RunConfig:
    return load_config([path], env={}).config


class StubSyncer:
    """Takes every learner in, lets it train, and keeps what it says."""

    def __init__(self, *, refusal: RefusalReason | None = None, stalls: bool = False) -> None:
        self.refusal = refusal
        # Of each upload the first bytes are taken, and no more.
        self.stalls = stalls
        self.begun: list[ContributionHeader] = []
        self.said: list[LearnerMessage] = []
        self.uploads: list[tuple[ContributionHeader, Buffers]] = []
        self.sessions: list[Session] = []
        self.ended: list[str] = []
        self.live = 0
        self.next_unit = 0
        self._news = asyncio.Event()

    async def until(self, holds: Callable[[], T]) -> T:
        """Wait for something that the learner causes; the test's own timeout bounds it."""
        while not (found := holds()):
            self._news.clear()
            await self._news.wait()
        return found

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.said if isinstance(message, kind)]

    @property
    def steps(self) -> int:
        return max((report.local_step for report in self.of(Report)), default=0)

    @property
    def session(self) -> Session:
        return self.sessions[-1]

    def connected(self, session: Session) -> None:
        self.sessions.append(session)
        self.live += 1
        self._news.set()

    def said_hello(self, session: Session, hello: Hello) -> None:
        if self.refusal is not None:
            session.send(Refused(reason=self.refusal, detail="by the test"))
            return
        incarnation = hello.incarnation or len([hello for hello in self.of(Hello) if not hello.incarnation])
        session.send(
            Welcome(
                incarnation=Incarnation(incarnation),
                term=Term(1),
                epoch=Epoch(0),
                global_step=GlobalStep(hello.local_step),
                anchor=0,
                total_steps=GlobalStep(100_000),
                versions=(Version(Epoch(0), 0),) * 2,
                data_shard=ShardId(0),
                next_unit=self.next_unit,
                shards=("", ""),
                started=True,
            )
        )

    # ---- SyncerHandler -----------------------------------------------------------------------------

    def said_message(self, session: Session, message: LearnerMessage) -> None:
        self.said.append(message)
        if isinstance(message, Hello):
            self.said_hello(session, message)
        self._news.set()

    def disconnected(self, session: Session, reason: str) -> None:
        del session
        self.ended.append(reason)
        self.live -= 1
        self._news.set()

    def may_relay(self, session: Session, transfer: TransferId, *, giving: bool) -> bool:
        return False

    async def upload_offered(self, session: Session, header: ContributionHeader) -> _Sink:
        del session
        return _Sink(self, header)

    def upload_begun(self, header: ContributionHeader) -> None:
        self.begun.append(header)
        self._news.set()

    def upload_complete(self, session: Session, header: ContributionHeader, payload: Buffers) -> None:
        self.uploads.append((header, payload))
        session.send(
            Acknowledged(fragment_id=header.key.fragment_id, step_lo=header.key.step_lo, step_hi=header.step_hi)
        )
        self._news.set()

    def upload_failed(self, session: Session, header: ContributionHeader, reason: RefusalReason, detail: str) -> None:
        raise AssertionError(f"{header} of {session.peer}: {reason}, {detail}")

    def refused(self, peer: str, reason: RefusalReason, detail: str) -> None:
        raise AssertionError(f"{peer}: {reason}, {detail}")

    def status(self) -> dict[str, object]:
        return {}


class _Sink(AssemblingSink):
    """Gives the stub what came."""

    def __init__(self, stub: StubSyncer, header: ContributionHeader) -> None:
        super().__init__(header)
        self._stub = stub

    async def put(self, message: bytes) -> None:
        await super().put(message)
        if self._stub.stalls:
            self._stub.upload_begun(self._header)
            await asyncio.Event().wait()

    def complete(self, session: Session, header: ContributionHeader, wire_bytes: int) -> None:
        del wire_bytes
        self._stub.upload_complete(session, header, self.assembler.result())


class _Handler:
    """The stub under the names of the handler's protocol: `said` is the test's list."""

    def __init__(self, stub: StubSyncer) -> None:
        self.connected = stub.connected
        self.said = stub.said_message
        self.disconnected = stub.disconnected
        self.upload_offered = stub.upload_offered
        self.upload_failed = stub.upload_failed
        self.refused = stub.refused
        self.status = stub.status


def ensured(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@asynccontextmanager
async def serving(run_folder: Path, **settings: Any) -> AsyncIterator[StubSyncer]:
    """A stub that listens, with its address in the run folder."""
    stub = StubSyncer(**settings)
    server = GrpcSyncerServer(_Handler(stub))
    address = await server.start()
    write_text(ensured(run_folder) / "address", address + "\n")
    try:
        yield stub
    finally:
        await server.stop(grace_s=0.5)


class LearnerProcess:
    """`wan-diloco learner` for the region east."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @property
    def uplink(self) -> psutil.Process:
        """Of the moment."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        return await self.process.wait()

    async def said(self) -> str:
        """All that it wrote to stderr, to its end; only of one that was started with a pipe there."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@asynccontextmanager
async def learner(
    config: Path, run_folder: Path, *options: str, env: Mapping[str, str] | None = None, stderr: int | None = None
) -> AsyncIterator[LearnerProcess]:
    """A learner process; it and its uplink are gone afterwards, whatever happened."""
    command = [sys.executable, "-m", "wan_diloco", "learner", str(config), "--region", "east"]
    process = await asyncio.create_subprocess_exec(
        *command, "--run-folder", str(run_folder), *options, env={**os.environ, **(env or {})}, stderr=stderr
    )
    found = LearnerProcess(process)
    try:
        yield found
    finally:
        if process.returncode is None:
            children = psutil.Process(process.pid).children()
            for number in (process.pid, *(child.pid for child in children)):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            await process.wait()


def goodbyes(stub: StubSyncer) -> list[str]:
    return [message.reason for message in stub.of(Goodbye)]
