"""A simulated syncer's disk: a snapshot, the tape behind it, and what a crash leaves of both.

What is restored went through the same JSON, and the same frames with the same search for a torn tail, as in the
product.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence

from wan_diloco.protocol.events import Record
from wan_diloco.protocol.serial import dumps, loads
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import TapeRecord
from wan_diloco.storage.journal_format import SEGMENT_HEADER_BYTES, RecordHeader, checksum, encode_segment_header
from wan_diloco.storage.journal_reading import Damage, find_tail, survey

__all__ = ["SyncerDisk"]

_SEGMENT = 1
_KIND = 1
_NO_SUM = checksum(())


class SyncerDisk:
    """What outlives a syncer's process.

    Args:
        durable: Is told each record once, in order, as soon as no crash can take it away any more.

    Attributes:
        tape: All records since the run began.
        torn: How often a crash left the beginning of a record behind.
    """

    def __init__(self, durable: Callable[[TapeRecord], None] = lambda _: None) -> None:
        """An empty disk."""
        self.tape: list[TapeRecord] = []
        self.torn = 0
        self._tell = durable
        self._told = 0
        self._durable = 0
        self._snapshot = ""
        self._covered = 0
        self._rest = b""
        # What another disk would have if this one were lost: a snapshot, and up to where the tape is there.
        self._shipped = ("", 0, 0)

    def write(self, effect: Record, *, flushed: bool = True) -> None:
        """Append a record; one that is durable makes all before it durable too, once it is flushed."""
        self.tape.append(effect.record)
        if effect.durable and flushed:
            self.flush()

    def flush(self) -> None:
        """All that was written stays."""
        self._durable = len(self.tape)
        self._say()

    def snapshot(self, state: SyncerState) -> None:
        """Keep the whole state; what the tape holds by now isn't needed for it any more."""
        self._snapshot = json.dumps(state_to_json(state))
        self._covered = len(self.tape)
        self.flush()

    def ship(self) -> None:
        """Copy what is durable now, the newest snapshot and the tape behind it, to where it outlives this disk."""
        self._shipped = (self._snapshot, self._covered, self._durable)

    def lose(self) -> None:
        """It is gone; another one has what was shipped, and nothing that came after."""
        self._snapshot, self._covered, kept = self._shipped
        del self.tape[kept:]
        self._rest = b""
        self._durable = self._told = kept

    def crash(self, rng: random.Random) -> None:
        """Lose what wasn't durable: all of it, or its end; the first that is lost may leave its beginning behind."""
        kept = rng.randint(self._durable, len(self.tape))
        lost = self.tape[kept : kept + 1]
        del self.tape[kept:]
        self._rest = b""
        if lost:
            frame = _frames(lost, len(_frames(self.tape[self._covered :])), self._durable_offset())
            self._rest = frame[: rng.randrange(len(frame))]
            self.torn += bool(self._rest)
        self.flush()

    def restore(self) -> SyncerState:
        """What a new process begins with."""
        state = state_from_json(json.loads(self._snapshot))
        for line in self._lines():
            state.apply(loads(TapeRecord, line))  # type: ignore[arg-type] # a union is no type
        return state

    def _lines(self) -> list[bytes]:
        """The tape's records as they are read from the file, without what a crash has torn."""
        segment = _frames(self.tape[self._covered :]) + self._rest
        file = io.BytesIO(segment)
        end = find_tail(file, _SEGMENT, len(segment)).end
        found = survey(file, _SEGMENT, SEGMENT_HEADER_BYTES, end, verify_payload=True)
        return [item[1].meta for item in found if not isinstance(item, Damage)]

    def _durable_offset(self) -> int:
        return len(_frames(self.tape[self._covered : self._durable]))

    def _say(self) -> None:
        for record in self.tape[self._told : self._durable]:
            self._tell(record)
        self._told = self._durable


def _frames(records: Sequence[TapeRecord], offset: int = 0, durable_offset: int = 0) -> bytes:
    """A segment with these records; or, with an offset, what they add to one."""
    parts = [] if offset else [encode_segment_header(_SEGMENT)]
    at = offset or len(parts[0])
    for record in records:
        meta = dumps(record)
        header = RecordHeader(
            kind=_KIND,
            meta_bytes=len(meta),
            payload_bytes=0,
            durable_offset=durable_offset,
            meta_sum=checksum((meta,)),
            payload_sum=_NO_SUM,
        )
        parts += [header.encode(_SEGMENT, at), meta]
        at += header.record_bytes
    return b"".join(parts)
