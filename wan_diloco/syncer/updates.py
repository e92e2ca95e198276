"""What goes down the wire for an update: stored publications, or the published value, packed into messages.

Many learners lack the same newest publication at about the same time, so its packed form is kept, one a
fragment and size of chunks: about as much memory as one encoded model each. Anything else is packed for whom it is for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from wan_diloco.algorithm.codec import Payload, codec_by_name
from wan_diloco.protocol.events import UpdateSource
from wan_diloco.syncer.fragments_store import Maths
from wan_diloco.syncer.journal_keeper import KIND_PUBLICATION, JournalKeeper
from wan_diloco.syncer.workers import Workers
from wan_diloco.transport.interface import Frames
from wan_diloco.units import FragmentId, Version
from wan_diloco.wire.frames import pack

if TYPE_CHECKING:
    import torch

__all__ = ["Packing", "PublishedValue", "Updates", "frames_bytes"]

_VALUE_CODEC: Final = "f32"
# What has just been merged goes to everybody within seconds; two publications are kept whatever they take, since two
# rounds are in flight.
_KEPT_BYTES: Final = 64 * 2**20
_KEPT_ALWAYS: Final = 2


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


@dataclass(frozen=True, slots=True, eq=False)
class PublishedValue:
    """The part of a fragment's value that is sent, so that a learner that waits for it holds nothing else.

    Attributes:
        published_N: float32 [N].
    """

    version: Version
    published_N: torch.Tensor


class _Kept:
    """Packed forms of the newest publications, by fragment and size of chunks, the ones used last at the end.

    Owner: the event loop.
    """

    def __init__(self) -> None:
        self._forms: OrderedDict[tuple[FragmentId, int], tuple[Version, Frames]] = OrderedDict()
        self.total_bytes = 0

    def get(self, fragment_id: FragmentId, version: Version, chunk_bytes: int) -> Frames | None:
        key = (fragment_id, chunk_bytes)
        known, frames = self._forms.get(key, (None, None))
        if known != version:
            return None
        self._forms.move_to_end(key)
        return frames

    def put(self, fragment_id: FragmentId, version: Version, chunk_bytes: int, frames: Frames) -> None:
        """Keep a form; older publications of the fragment go, and beyond the bound what was not used for longest."""
        same = [(key, known) for key, (known, _) in self._forms.items() if key[0] == fragment_id]
        if any(known > version for _, known in same):
            return
        for key, known in same:
            if known < version or key[1] == chunk_bytes:
                self._forget(key)
        self._forms[fragment_id, chunk_bytes] = (version, frames)
        self.total_bytes += frames_bytes(frames)
        while self.total_bytes > _KEPT_BYTES and len(self._forms) > _KEPT_ALWAYS:
            self._forget(next(iter(self._forms)))

    def _forget(self, key: tuple[FragmentId, int]) -> None:
        _, frames = self._forms.pop(key)
        self.total_bytes -= frames_bytes(frames)


class Updates:
    """Packs updates, each newest publication once for each size of chunks that is needed; memory is bounded.

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
        self._kept = _Kept()
        self._under_way: dict[tuple[FragmentId, Version, Version, int], asyncio.Future[Frames]] = {}

    def remember(self, fragment_id: FragmentId, version: Version, chunk_bytes: int, frames: Frames) -> None:
        """Keep a packed form of the newest publication of a fragment; those of older ones go."""
        self._kept.put(fragment_id, version, chunk_bytes, frames)

    async def chain(self, fragment_id: FragmentId, sources: tuple[UpdateSource, ...], chunk_bytes: int) -> list[Frames]:
        """The messages of each stored publication, in order.

        Raises:
            JournalError: A publication isn't where it should be, or is damaged.
            StorageError: The system refused.
        """
        return [await self._link(fragment_id, source, chunk_bytes) for source in sources]

    async def value(self, fragment_id: FragmentId, published: PublishedValue, chunk_bytes: int) -> list[Frames]:
        """The messages of a published value in f32; shared by those who ask while it is being packed."""

        def packed() -> Frames:
            codec = codec_by_name(_VALUE_CODEC)
            encoded = codec.encode(published.published_N, self._maths.table(fragment_id))
            return self._packing.frames(encoded, chunk_bytes)

        return [await self._shared((fragment_id, published.version, published.version, chunk_bytes), packed)]

    async def _link(self, fragment_id: FragmentId, source: UpdateSource, chunk_bytes: int) -> Frames:
        kept = self._kept.get(fragment_id, source.to_version, chunk_bytes)
        if kept is not None:
            return kept

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
