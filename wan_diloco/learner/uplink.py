"""The uplink as a process of its own: `python -m wan_diloco.learner.uplink SOCKET SLOTS`, two descriptors.

It lives for as long as its trainer does: the end of the socket is its end. Signals that ask the trainer to stop are
not for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import uvloop

from wan_diloco.clock import SystemClock
from wan_diloco.config import RunConfig, parse_config
from wan_diloco.errors import EXIT_OK, PeerUnavailable, WanDilocoError
from wan_diloco.learner.deadlines import deadlines_of
from wan_diloco.learner.ipc import Command, Leaving, TrainerMessage, UplinkChanged, UplinkStart
from wan_diloco.learner.slots import FragmentSlots
from wan_diloco.learner.state_area import StateArea
from wan_diloco.learner.uplink_plan import held_fragments, learner_machine, retry_rng
from wan_diloco.learner.uplink_rate import UplinkRate
from wan_diloco.learner.uplink_service import UplinkService
from wan_diloco.models import run_layout
from wan_diloco.protocol import serial
from wan_diloco.protocol.deadlines import in_short, in_words
from wan_diloco.telemetry import ChangeLogger, configure_logging, get_logger
from wan_diloco.transport.allocator import keep_freed_memory
from wan_diloco.transport.grpc_client import grpc_connection
from wan_diloco.transport.options import ConnectionOptions
from wan_diloco.transport.pacer import Pacer

if TYPE_CHECKING:
    from collections.abc import Callable

    from wan_diloco.protocol.events import ShowReason
    from wan_diloco.transport.interface import Connection

__all__ = ["main", "syncer_address"]

_LINE_BYTES_MAX: Final = 1 << 26
# What became of that which was waited for.
_OVER: Final = {
    "syncer": "connected, and welcomed",
    "step": "steps may be taken",
    "moments": "it has its inner moments",
    "finite": "losses are finite again",
}
# A union is no class for the type checker, but it is what `serial.loads` takes.
_TRAINER_MESSAGE: Final = cast("Any", TrainerMessage)


def syncer_address(start: UplinkStart, config: RunConfig) -> str:
    """Where the syncer is: as told, else as configured, else as it wrote into the run folder when it last started.

    Raises:
        PeerUnavailable: It hasn't written anything yet.
    """
    address = start.syncer or config.region(start.region).address
    if not address:
        path = Path(start.run_folder) / "address"
        try:
            address = path.read_text().strip()
        except OSError as exc:
            raise PeerUnavailable(
                f"no syncer listens yet: there is no {path} (--syncer HOST:PORT says where one is)"
            ) from exc
    return address


class _SocketSink:
    """Commands as lines of JSON; bounded, since the trainer answers each before the next of its kind."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, command: Command) -> None:
        self._writer.write(serial.dumps(command) + b"\n")


async def _serve(connection: socket.socket, slots_descriptor: int, allocator_problem: str) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LINE_BYTES_MAX)
    line = await reader.readline()
    if not line:
        return EXIT_OK
    start = serial.loads(UplinkStart, line)
    config = parse_config(json.loads(start.config))
    region = config.region(start.region)
    layout = run_layout(config)
    slots = FragmentSlots.attach(
        slots_descriptor, [fragment.numel for fragment in layout.fragments], start.position.state_bytes
    )
    clock = SystemClock()
    configure_logging(clock, fields={"region": start.region, "process": "uplink"})
    if allocator_problem:
        get_logger("uplink").warning(
            "allocator_untuned", detail=f"{allocator_problem}: bulk will cost more processor time"
        )
    rng = retry_rng(config, start.region, start.position)
    pacer = Pacer()
    rate = UplinkRate(pacer, region.uplink_bytes_per_s)

    options = ConnectionOptions(
        channels=region.channels or config.wire.channels, downlink_bytes_per_s=region.downlink_bytes_per_s
    )

    def connect() -> Connection:
        return grpc_connection(syncer_address(start, config), pacer, options=options)

    with (
        ThreadPoolExecutor(1, thread_name_prefix="maths") as worker,
        ThreadPoolExecutor(1, thread_name_prefix="rows") as rows,
    ):
        service = UplinkService(
            machine=learner_machine(config, layout, start.region, start.position, rng),
            connect=connect,
            clock=clock,
            worker=worker,
            rows=rows,
            sink=_SocketSink(writer),
            fragments=held_fragments(layout, start.position, slots),
            wire=config.wire,
            rate=rate,
            show=_show(),
            measured=_tell_deadlines(config, start.region),
            state=StateArea(slots.state, slots.release_state),
        )
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(_listen(reader, service, rate))
            await service.run()
            listening.cancel()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return EXIT_OK


async def _listen(reader: asyncio.StreamReader, service: UplinkService, rate: UplinkRate) -> None:
    """Hand on what the trainer says, until it says that it leaves, or is gone."""
    while True:
        try:
            line = await reader.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            service.leave(None)
            return
        message = serial.loads(_TRAINER_MESSAGE, line)
        if isinstance(message, Leaving):
            service.leave(message.reason)
            return
        if isinstance(message, UplinkChanged):
            rate.set_own(message.rate_bytes_per_s)
        else:
            service.passed(message)


def _show() -> Callable[[ShowReason], None]:
    changes = ChangeLogger(get_logger("uplink"))

    def show(effect: ShowReason) -> None:
        kind = effect.topic.partition(":")[0]
        changes.note(f"waiting_{kind}", effect.text or _OVER.get(kind, "it is over"), topic=effect.topic)

    return show


def _tell_deadlines(config: RunConfig, region: str) -> Callable[[float], None]:
    """Log all limits; and those that the first round trip changes, when it is known.

    Later ones change them by little, and the log needn't follow.
    """
    log, unmeasured = get_logger("uplink"), deadlines_of(config, region)
    log.info("deadlines", **in_short(unmeasured))
    told = False

    def measured(rtt_s: float) -> None:
        nonlocal told
        if not told:
            told = True
            changed = set(deadlines_of(config, region, rtt_s)) - set(unmeasured)
            log.info("deadlines_measured", **in_words(sorted(changed, key=lambda row: row.name)))

    return measured


def main(arguments: list[str]) -> int:
    """Run the process.

    Args:
        arguments: Descriptors of the socket to the trainer and of the shared memory.

    Returns:
        The exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    allocator_problem = keep_freed_memory()
    torch.set_num_threads(1)
    try:
        connection = socket.socket(fileno=int(arguments[0]))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(connection, int(arguments[1]), allocator_problem))
    except WanDilocoError as exc:
        sys.stderr.write(f"uplink: {exc}\n")
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
