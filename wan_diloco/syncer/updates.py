"""What goes down the wire for an update: stored publications, or the published value, packed into messages.

Many learners lack the same newest publication at about the same time, so its packed form is kept, one a
fragment and size of chunks: about as much memory as one encoded model each. Anything else is packed for whom it is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from wan_diloco.algorithm.codec import Payload, codec_by_name
from wan_diloco.protocol.events import UpdateSource
from wan_diloco.syncer.fragments_store import FragmentValue, Maths
from wan_diloco.syncer.journal_keeper import KIND_PUBLICATION, JournalKeeper
from wan_diloco.syncer.workers import Workers
from wan_diloco.transport.interface import Frames
from wan_diloco.units import FragmentId, Version
from wan_diloco.wire.frames import pack

__all__ = ["Packing", "Updates", "frames_bytes"]

_VALUE_CODEC: Final = "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How payloads become messages.

    Attributes:
        zstd: Whether chunks are compressed where it pays.
    """

    zstd: bool

    def frames(self, payload: Payload, chunk_bytes: int) -> list[bytes]:
        """The messages of a payload.

        Thread: any.
        """
        return pack(payload.codes, payload.scales, chunk_bytes=chunk_bytes, zstd=self.zstd)


def frames_bytes(frames: Frames) -> int:
    """What they take on the wire."""
    return sum(map(len, frames))


class Updates:
    """Packs updates, each newest publication once for each size of chunks that is needed.

    Owner: the event loop.

    Args:
        maths: Knows the sizes.
        keeper: Has the publications.
        workers: Where reading and packing run.
        packing: How.
        usual_chunk_bytes: The size that most learners need.
    """

    def __init__(
        self, maths: Maths, keeper: JournalKeeper, workers: Workers, packing: Packing, usual_chunk_bytes: int
    ) -> None:
        """Keep nothing yet."""
        self._maths = maths
        self._keeper = keeper
        self._workers = workers
        self._packing = packing
        self.usual_chunk_bytes = usual_chunk_bytes
        # By size of chunks.
        self._newest: dict[FragmentId, tuple[Version, dict[int, Frames]]] = {}
        self._under_way: dict[tuple[FragmentId, Version, Version, int], asyncio.Future[Frames]] = {}

    def remember(self, fragment_id: FragmentId, version: Version, chunk_bytes: int, frames: Frames) -> None:
        """Keep a packed form of the newest publication of a fragment; those of older ones go."""
        known, forms = self._newest.get(fragment_id, (version, {}))
        if version > known:
            forms = {}
        if version >= known:
            self._newest[fragment_id] = (version, {**forms, chunk_bytes: frames})

    async def chain(self, fragment_id: FragmentId, sources: tuple[UpdateSource, ...], chunk_bytes: int) -> list[Frames]:
        """The messages of each stored publication, in order.

        Raises:
            JournalError: A publication isn't where it should be, or is damaged.
            StorageError: The system refused.
        """
        return [await self._link(fragment_id, source, chunk_bytes) for source in sources]

    async def value(self, value: FragmentValue, fragment_id: FragmentId, chunk_bytes: int) -> list[Frames]:
        """The messages of a published value in f32; shared by those who ask while it is being packed."""

        def packed() -> Frames:
            codec = codec_by_name(_VALUE_CODEC)
            return self._packing.frames(codec.encode(value.published_N, self._maths.table(fragment_id)), chunk_bytes)

        return [await self._shared((fragment_id, value.version, value.version, chunk_bytes), packed)]

    async def _link(self, fragment_id: FragmentId, source: UpdateSource, chunk_bytes: int) -> Frames:
        version, forms = self._newest.get(fragment_id, (None, {}))
        if version == source.to_version and chunk_bytes in forms:
            return forms[chunk_bytes]

        def packed() -> Frames:
            joined = self._keeper.read(source.ref, KIND_PUBLICATION)
            return self._packing.frames(self._maths.split(fragment_id, joined), chunk_bytes)

        frames = await self._shared((fragment_id, source.from_version, source.to_version, chunk_bytes), packed)
        self.remember(fragment_id, source.to_version, chunk_bytes, frames)
        return frames

    async def _shared(self, key: tuple[FragmentId, Version, Version, int], packed: Callable[[], Frames]) -> Frames:
        future = self._under_way.get(key)
        if future is None:
            future = cast(
                "asyncio.Future[Frames]", asyncio.get_running_loop().run_in_executor(self._workers.maths, packed)
            )
            self._under_way[key] = future
            future.add_done_callback(lambda _: self._under_way.pop(key, None))
        # Whoever gives up must not take it from the others.
        return await asyncio.shield(future)
