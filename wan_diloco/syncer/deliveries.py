"""Updates on their way to learners: each packed, paced and sent by a task of its own.

What goes wrong on the way comes back to the machine as `TransferBroken`; it decides anew what is lacking.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from wan_diloco.errors import JournalError, StorageError, TransportError
from wan_diloco.protocol.deadlines import WORK_RETRY_S
from wan_diloco.protocol.events import SendUpdate, SessionId, SyncerEvent, TransferBroken
from wan_diloco.syncer.fragments_store import FragmentStore, Hold
from wan_diloco.syncer.named_sessions import NamedSessions
from wan_diloco.syncer.updates import PublishedValue, Updates
from wan_diloco.transport.interface import Session

__all__ = ["Deliveries"]

# Whole values packed for one learner at once: one is being sent while the next is made ready.
_VALUES_PACKED: Final = 2


class Deliveries:
    """Does what `SendUpdate` asks for.

    Owner: the event loop.

    Args:
        store: All fragments.
        updates: Packs them.
        sessions: That are there; changed by whoever has them.
        named: Whose they are, and their caps.
        spawn: Runs a task beside everything else.
        emit: Takes `TransferBroken`.
        tell: Told what the operator should know: an event and a sentence.
    """

    def __init__(
        self,
        *,
        store: FragmentStore,
        updates: Updates,
        sessions: Mapping[SessionId, Session],
        named: NamedSessions,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        emit: Callable[[SyncerEvent], None],
        tell: Callable[[str, str], None],
    ) -> None:
        """Nothing is on its way."""
        self._store = store
        self._updates = updates
        self._sessions = sessions
        self._named = named
        self._spawn = spawn
        self._emit = emit
        self._tell = tell
        self._value_gates: dict[SessionId, asyncio.Semaphore] = {}

    def connected(self, session_id: SessionId) -> None:
        """A session began."""
        self._value_gates[session_id] = asyncio.Semaphore(_VALUES_PACKED)

    def disconnected(self, session_id: SessionId) -> None:
        """It ended."""
        self._value_gates.pop(session_id, None)

    def begin(self, effect: SendUpdate) -> None:
        """Bring an update to a learner: a chain of stored ones, or the value of the moment when this was decided."""
        fragment_id = effect.header.fragment_id
        if effect.chain:
            self._spawn(self._send(effect, None, None))
        elif self._store.changing(fragment_id):
            # In a moment there will be another value, and it will be decided anew what is lacking.
            self._spawn(self._retry(effect))
        else:
            hold = self._store.hold([fragment_id])
            value = hold.values.pop(fragment_id)
            self._spawn(self._send(effect, PublishedValue(value.version, value.published_N), hold))

    async def _send(self, effect: SendUpdate, published: PublishedValue | None, hold: Hold | None) -> None:
        async with contextlib.AsyncExitStack() as held:
            if hold is not None:
                held.callback(hold.end)
            if published is not None and (gate := self._value_gates.get(effect.session)) is not None:
                # A joiner lacks every fragment: packed all at once they would be a whole model for each joiner.
                await held.enter_async_context(gate)
            await self._bring(effect, published)

    async def _bring(self, effect: SendUpdate, published: PublishedValue | None) -> None:
        fragment_id = effect.header.fragment_id
        if (learner_id := self._named.learner(effect.session)) is None:
            return  # it went while this waited
        chunk_bytes = self._named.rates.chunk_bytes(learner_id)
        try:
            if published is None:
                segments = await self._updates.chain(fragment_id, effect.chain, chunk_bytes)
            else:
                assert published.version == effect.header.to_version, f"{published.version} is no {effect.header}"
                segments = await self._updates.value(fragment_id, published, chunk_bytes)
            if (session := self._sessions.get(effect.session)) is not None:
                await session.send_update(effect.header, segments, effect.spread_s)
        except (TransportError, StorageError) as exc:  # a session's end is told by itself
            if isinstance(exc, StorageError):
                self._tell("update_unreadable", str(exc))
            await self._retry(effect, unreadable=isinstance(exc, JournalError))

    async def _retry(self, effect: SendUpdate, *, unreadable: bool = False) -> None:
        await asyncio.sleep(WORK_RETRY_S)
        fragment_id = effect.header.fragment_id
        self._emit(TransferBroken(session=effect.session, fragment_id=fragment_id, unreadable=unreadable))
