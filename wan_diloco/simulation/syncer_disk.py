"""A simulated syncer's disk: a snapshot, the tape behind it, and what a crash leaves of both.

What is restored went through the same JSON as in the product.
"""

from __future__ import annotations

import json
import random

from wan_diloco.protocol.events import Record
from wan_diloco.protocol.serial import dumps, loads
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import TapeRecord

__all__ = ["SyncerDisk"]


class SyncerDisk:
    """What outlives a syncer's process.

    Attributes:
        tape: All records since the run began.
    """

    def __init__(self) -> None:
        """An empty disk."""
        self.tape: list[TapeRecord] = []
        self._durable = 0
        self._snapshot = ""
        self._covered = 0

    def write(self, effect: Record) -> None:
        """Append a record; one that is durable makes all before it durable too."""
        self.tape.append(effect.record)
        if effect.durable:
            self._durable = len(self.tape)

    def snapshot(self, state: SyncerState) -> None:
        """Keep the whole state; what the tape holds by now isn't needed for it any more."""
        self._snapshot = json.dumps(state_to_json(state))
        self._covered = self._durable = len(self.tape)

    def crash(self, rng: random.Random) -> None:
        """Lose what wasn't durable: all of it, or its end."""
        del self.tape[rng.randint(self._durable, len(self.tape)) :]

    def restore(self) -> SyncerState:
        """What a new process begins with."""
        state = state_from_json(json.loads(self._snapshot))
        for record in self.tape[self._covered :]:
            state.apply(loads(TapeRecord, dumps(record)))  # type: ignore[arg-type] # a union is no type
        return state
