"""What is bound to a lifetime ends with it, and only then is an end translated."""

from __future__ import annotations

import asyncio

import pytest

from wan_diloco.errors import TransportError
from wan_diloco.simulation.virtual_loop import run_virtual
from wan_diloco.transport.lifetime import Lifetime


async def bound(lifetime: Lifetime) -> None:
    with lifetime.bound():
        await asyncio.sleep(1000)


async def ends_as_transport_error(lifetime: Lifetime, match: str) -> None:
    with pytest.raises(TransportError, match=match):
        await bound(lifetime)


def test_the_end_reaches_everybody_inside_and_whoever_comes_later() -> None:
    async def main() -> None:
        lifetime = Lifetime()
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(ends_as_transport_error(lifetime, "over and out"))
            await asyncio.sleep(1)
            assert lifetime.reason is None
            lifetime.end("over and out")
            lifetime.end("again")
        assert lifetime.reason == "over and out"
        await ends_as_transport_error(lifetime, "over and out")
        assert asyncio.get_running_loop().time() == 1.0

    run_virtual(main())


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def main() -> None:
        lifetime = Lifetime()
        async with asyncio.TaskGroup() as group:
            alone = group.create_task(bound(lifetime))
            both = group.create_task(bound(lifetime))
            await asyncio.sleep(1)
            alone.cancel()
            both.cancel()
            lifetime.end("at the same time")
        assert alone.cancelled()
        assert both.cancelled()

    run_virtual(main())


def test_nested_lifetimes_each_translate_their_own_end() -> None:
    async def nested(outer: Lifetime, inner: Lifetime) -> None:
        with outer.bound(), inner.bound():
            await asyncio.sleep(1000)

    async def main() -> None:
        for ending in ("outer", "inner", "both"):
            outer, inner = Lifetime(), Lifetime()
            with pytest.RaisesGroup(TransportError):
                async with asyncio.TaskGroup() as group:
                    group.create_task(nested(outer, inner))
                    await asyncio.sleep(1)
                    if ending != "inner":
                        outer.end("outer")
                    if ending != "outer":
                        inner.end("inner")

    run_virtual(main())


def test_other_errors_pass_and_timeouts_inside_work() -> None:
    async def main() -> None:
        lifetime = Lifetime()
        with pytest.raises(ZeroDivisionError), lifetime.bound():
            raise ZeroDivisionError
        with pytest.raises(TimeoutError), lifetime.bound():
            async with asyncio.timeout(1):
                await asyncio.sleep(2)

    run_virtual(main())
