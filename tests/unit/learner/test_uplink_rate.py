"""A learner sends no faster than its own uplink, nor than the syncer grants it, whichever changed last."""

from __future__ import annotations

import asyncio

from wan_diloco.learner.uplink_rate import UplinkRate
from wan_diloco.transport.pacer import Pacer


def test_the_smaller_cap_counts() -> None:
    async def story() -> None:
        pacer = Pacer()
        rate = UplinkRate(pacer, 100.0)
        seen = [pacer.rate_bytes_per_s]
        for change in (
            lambda: rate.set_granted(50.0),
            lambda: rate.set_own(20.0),
            lambda: rate.set_granted(None),
            lambda: rate.set_own(200.0),
            lambda: rate.set_granted(150.0),
        ):
            change()
            seen.append(pacer.rate_bytes_per_s)
        assert seen == [100.0, 50.0, 20.0, 20.0, 200.0, 150.0]

    asyncio.run(story())


def test_messages_get_smaller_with_the_rate() -> None:
    async def story() -> None:
        rate = UplinkRate(Pacer(), None)
        assert rate.chunk_bytes(2**19) == 2**19
        rate.set_granted(1e6)
        assert rate.chunk_bytes(2**19) <= 8 * 1024

    asyncio.run(story())
