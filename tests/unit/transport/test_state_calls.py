"""What donor and syncer make of the first word that a taker says, if any."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from wan_diloco.errors import TransportError
from wan_diloco.transport.interface import Counters
from wan_diloco.transport.pacer import CHUNK_BYTES_MIN, Pacer
from wan_diloco.transport.relay import _fitted
from wan_diloco.transport.state_calls import give_state
from wan_diloco.transport.streams import END_MARK
from wan_diloco.units import TransferId
from wan_diloco.wire.convert import StateCall
from wan_diloco.wire.frames import CHUNK_BYTES_DEFAULT


@dataclass
class Stream:
    """A call in which the other end says what it was given to say."""

    says: list[bytes]
    heard: list[bytes] = field(default_factory=list)

    async def write(self, message: bytes) -> None:
        self.heard.append(message)

    async def read(self) -> bytes | None:
        return self.says.pop(0) if self.says else None


@pytest.mark.parametrize("says", [[END_MARK], []])
def test_nothing_is_sent_to_a_taker_that_left_before_it_asked(says: list[bytes]) -> None:
    stream = Stream(list(says))
    giving = give_state(
        stream,  # type: ignore[arg-type]  # all that is asked of it
        TransferId(1),
        np.zeros(10_000, np.uint8),
        pacer=Pacer(),
        counters=Counters(),
        rtt_s=0.0,
    )
    with pytest.raises(TransportError, match="nobody takes this state"):
        asyncio.run(giving)
    assert len(stream.heard) == 1, "only what it has to give"


@pytest.mark.parametrize(("asked", "given"), [(0, CHUNK_BYTES_DEFAULT), (1, CHUNK_BYTES_MIN), (50_000, 50_000)])
def test_no_taker_has_a_donor_send_more_headers_than_bytes(asked: int, given: int) -> None:
    session = SimpleNamespace(inbound=Pacer(), outbound=Pacer())
    call = _fitted(StateCall(transfer=TransferId(1), chunk_bytes=asked), session, session)  # type: ignore[arg-type]
    assert call.chunk_bytes == given
