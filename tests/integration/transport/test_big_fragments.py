"""A fragment that nobody could hold: it passes through, chunk by chunk, and neither end takes memory for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import overload

import numpy as np
import psutil
import pytest

from tests.support.transport import RecordingHandler, contribution, within
from wan_diloco.protocol.messages import ContributionHeader
from wan_diloco.transport.grpc_client import grpc_connection
from wan_diloco.transport.grpc_server import GrpcSyncerServer
from wan_diloco.transport.interface import Session, UploadSink
from wan_diloco.transport.options import ConnectionOptions
from wan_diloco.wire.coverage import Coverage
from wan_diloco.wire.frames import encode_frame, unpack

MIB = 2**20
GIB = 2**30
# Two windows, what gRPC and the kernel hold, and what allocators keep.
MEMORY_BYTES_MAX = 128 * MIB


class Source(Sequence[bytes]):
    """The messages of a fragment, made when they are asked for: each chunk has its own number all over."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return (self._size + MIB - 1) // MIB

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            raise TypeError("one at a time")
        if not 0 <= index < len(self):
            raise IndexError(index)
        offset = index * MIB
        chunk = np.full(min(MIB, self._size - offset), index % 251, dtype=np.uint8)
        return encode_frame(0, offset, chunk, zstd=False)[0]


class Sink:
    """Looks at what comes, and keeps nothing."""

    stored_bytes = 0

    def __init__(self, header: ContributionHeader) -> None:
        self._sizes = (header.codes_bytes, header.scales_bytes)
        self.coverage = Coverage(sum(self._sizes))
        self.wire_bytes = 0

    @property
    def gap(self) -> tuple[int, int]:
        return self.coverage.gap()

    async def put(self, message: bytes) -> None:
        for piece in unpack(message, *self._sizes):
            assert (piece.raw == piece.start // MIB % 251).all()
            assert self.coverage.add(piece.start, piece.start + piece.raw.size), "nothing comes twice"

    def rest(self) -> None:
        pass

    def resume(self) -> bool:
        return True

    def complete(self, session: Session, header: ContributionHeader, wire_bytes: int) -> None:
        self.wire_bytes = wire_bytes

    def abandon(self) -> None:
        raise AssertionError("it was good")


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("size", [GIB // 4 + 5, pytest.param(3 * GIB + 5, marks=pytest.mark.slow)])
def test_a_fragment_passes_through_in_bounded_memory(size: int, channels: int) -> None:
    async def main() -> None:
        sinks: list[Sink] = []
        handler = RecordingHandler()

        async def offered(session: Session, header: ContributionHeader) -> UploadSink:
            sinks.append(Sink(header))
            return sinks[-1]

        handler.upload_offered = offered  # type: ignore[method-assign, assignment]
        server = GrpcSyncerServer(handler)
        connection = grpc_connection(await server.start(), options=ConnectionOptions(channels=channels))
        await within(connection.connect())
        connection.set_round_trip(0.05)
        assert await within(connection.upload(contribution(64 * MIB, 0), Source(64 * MIB), 0.0, unasked=True), 100.0)
        process = psutil.Process()
        before, most = process.memory_info().rss, 0
        async with asyncio.TaskGroup() as group:
            uploading = group.create_task(
                connection.upload(contribution(size, 0, step_hi=200), Source(size), 0.0, unasked=True)
            )
            while not uploading.done():
                await asyncio.wait([uploading], timeout=0.05)
                most = max(most, process.memory_info().rss)
        assert uploading.result()
        assert sinks[1].coverage.complete
        assert size < sinks[1].wire_bytes < size + 100 * len(Source(size))
        assert most - before < MEMORY_BYTES_MAX
        await within(connection.close())
        await within(server.stop(1.0))

    asyncio.run(main())
