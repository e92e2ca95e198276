"""What a training process tells its uplink beside boundaries."""

from __future__ import annotations

import asyncio
from typing import Any

from wan_diloco.learner.ipc import Leaving, UplinkChanged
from wan_diloco.learner.uplink import _listen
from wan_diloco.learner.uplink_rate import UplinkRate
from wan_diloco.protocol import serial
from wan_diloco.transport.pacer import Pacer


class Service:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def passed(self, boundary: Any) -> None:
        self.told.append(boundary)

    def leave(self, reason: str | None) -> None:
        self.told.append(reason)


def test_a_changed_cap_counts_at_once() -> None:
    async def story() -> None:
        reader, service, pacer = asyncio.StreamReader(), Service(), Pacer()
        for message in (UplinkChanged(rate_bytes_per_s=5e5), Leaving(reason="done")):
            reader.feed_data(serial.dumps(message) + b"\n")
        await _listen(reader, service, UplinkRate(pacer, 1e6))  # type: ignore[arg-type]  # it only listens
        assert pacer.rate_bytes_per_s == 5e5
        assert service.told == ["done"]

    asyncio.run(story())
