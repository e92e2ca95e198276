"""A contribution's way from its offer to the journal.

The machine decides on the header alone; its bytes are held back until it has. They go straight into the
journal, as chunks that nothing refers to. When all are there they are checked: sizes, codec, and that every
scale and value is finite. Only then does a record make a contribution of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from wan_diloco.algorithm.codec import PayloadSizes
from wan_diloco.errors import DecodeError, JournalError, NonFiniteError
from wan_diloco.protocol import serial
from wan_diloco.protocol.events import SessionId, SyncerEvent, UploadFailed, UploadStored
from wan_diloco.protocol.messages import ContributionHeader, RefusalReason
from wan_diloco.syncer.fragments_store import InspectedSource
from wan_diloco.syncer.journal_keeper import KIND_CONTRIBUTION, JournalKeeper
from wan_diloco.syncer.payloads import StoredPayload, contribution_meta
from wan_diloco.syncer.workers import Workers, in_executor

if TYPE_CHECKING:
    from wan_diloco.syncer.fragments_store import Maths
    from wan_diloco.syncer.spool import Spool

__all__ = ["Offers", "store_upload"]

_Offer = tuple[SessionId, ContributionHeader]


class Offers:
    """Offered contributions that the machine hasn't decided on.

    Owner: the event loop. Bounded by the transport, which has one offer a stream.
    """

    def __init__(self) -> None:
        """Nothing is offered yet."""
        self._waiting: dict[_Offer, asyncio.Future[bool]] = {}

    async def decision(self, session: SessionId, header: ContributionHeader) -> bool:
        """Wait for the machine's word.

        Returns:
            Whether the bytes may come.
        """
        offer = (session, header)
        self.decide(session, header, accepted=False)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[offer] = future
        try:
            return await future
        finally:
            if self._waiting.get(offer) is future:
                del self._waiting[offer]

    def decide(self, session: SessionId, header: ContributionHeader, *, accepted: bool) -> None:
        """Give the word; an offer whose stream is gone is forgotten already."""
        future = self._waiting.pop((session, header), None)
        if future is not None and not future.done():
            future.set_result(accepted)


async def store_upload(
    *,
    session: SessionId,
    header: ContributionHeader,
    spool: Spool,
    wire_bytes: int,
    maths: Maths,
    keeper: JournalKeeper,
    workers: Workers,
    emit: Callable[[SyncerEvent], None],
) -> None:
    """Check what came, make a contribution of it in the journal, and tell the machine.

    Args:
        session: Who sent it.
        header: What it claims to be; the machine has accepted it.
        spool: Its bytes, all of them.
        wire_bytes: What crossed the wire for it.
        maths: Decodes.
        keeper: Journals; a full disk is waited out.
        workers: Where it runs.
        emit: Takes `UploadStored` or `UploadFailed`.

    Raises:
        StorageError: The journal has lost track of what is durable; the process must end.
    """
    chunks, row = spool.chunks, spool.row
    sizes = PayloadSizes(codes_bytes=header.codes_bytes, scales_bytes=header.scales_bytes)
    payload = StoredPayload(keeper.journal, sizes, chunks, row)
    try:
        found = await in_executor(workers.maths, lambda: _inspected(header, payload, maths))
        if not isinstance(found, InspectedSource):
            reason, detail = found
            emit(UploadFailed(session=session, header=header, reason=reason, detail=detail))
            return
        meta = contribution_meta(serial.to_json(header), chunks, found.norms)
        ref = await keeper.append_waiting(KIND_CONTRIBUTION, meta, (row,), oldest=spool.oldest_segment)
        emit(UploadStored(session=session, header=header, ref=ref, payload_bytes=wire_bytes))
    finally:
        spool.abandon()


def _inspected(
    header: ContributionHeader, payload: StoredPayload, maths: Maths
) -> InspectedSource | tuple[RefusalReason, str]:
    """What a merge needs to know of it, or why it is refused."""
    if header.codec != maths.codec.name:
        return RefusalReason.WRONG_CODEC, f"the codec is {header.codec!r}, this run uses {maths.codec.name!r}"
    if not 0 <= header.key.fragment_id < maths.layout.num_fragments:
        return RefusalReason.GARBAGE, f"there is no fragment {header.key.fragment_id}"
    if payload.sizes != maths.sizes(header.key.fragment_id):
        return RefusalReason.WRONG_LENGTH, f"{payload.sizes} isn't {maths.sizes(header.key.fragment_id)}"
    if header.steps < 1 or header.tokens < 1:
        return RefusalReason.NO_STEPS, f"{header.tokens} tokens in {header.steps} steps have no weight"
    try:
        return maths.inspect(header.key.fragment_id, payload)
    except JournalError as exc:
        # Nobody counts on it yet: it is sent again.
        return RefusalReason.BAD_CHECKSUM, f"what came can't be read back: {exc}"
    except NonFiniteError as exc:
        return RefusalReason.NON_FINITE, exc.detail
    except DecodeError as exc:
        known = exc.reason in set(RefusalReason)
        return RefusalReason(exc.reason) if known else RefusalReason.GARBAGE, exc.detail
