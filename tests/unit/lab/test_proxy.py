"""The emulated link, between real sockets. What is asserted of time is only that nothing comes too early."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.transport import poll
from wan_diloco.errors import DecodeError, PeerUnavailable, UsageError
from wan_diloco.lab.links import GOOD, Direction, LinkState, LinkWay, Passage
from wan_diloco.lab.proxy import LinkProxy, loopback_socket
from wan_diloco.lab.proxy_control import AskLink, ChangeLink, LinkControl, ask_link

WITHIN_S = 60.0
TEXT = bytes(range(256)) * 400


class Echo:
    """A server that sends back what it gets, and counts."""

    def __init__(self) -> None:
        self.heard = 0
        self.address = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                self.heard += len(data)
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def echo() -> AsyncIterator[Echo]:
    made = Echo()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


def play(story: Callable[[LinkProxy, Echo], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(WITHIN_S),
            echo() as server,
            LinkProxy(lambda: server.address, random.Random(1)) as link,
        ):
            await story(link, server)

    asyncio.run(main())


async def dial(link: LinkProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = link.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What still came until the connection was reset or ended."""
    try:
        return await reader.read(-1)
    except OSError:
        return b""


def test_a_good_link_carries_every_byte_both_ways_and_the_end_of_the_stream() -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        reader, writer = await dial(link)
        writer.write(TEXT)
        writer.write_eof()
        assert await reader.read(-1) == TEXT
        await poll(lambda: link.counts.open == 0)
        assert (link.counts.up_bytes, link.counts.down_bytes) == (len(TEXT), len(TEXT))
        assert link.counts.opened == 1

    play(story)


def test_a_cut_resets_what_is_open_and_lets_nobody_in_until_it_is_mended() -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        reader, writer = await dial(link)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        link.change(LinkState(cut=True))
        assert await ended(reader) == b""
        other, _ = await dial(link)
        assert await ended(other) == b""
        link.change(GOOD)
        reader, writer = await dial(link)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"

    play(story)


@pytest.mark.parametrize("way", [LinkWay.UP, LinkWay.DOWN, LinkWay.BOTH])
def test_what_a_link_holds_comes_later_and_nothing_is_missing(way: LinkWay) -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        reader, writer = await dial(link)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        link.change(GOOD.having(way, passage=Passage.HELD))
        writer.write(TEXT)
        if way is LinkWay.DOWN:
            await poll(lambda: server.heard == 1 + len(TEXT))
        waiting = asyncio.ensure_future(reader.readexactly(len(TEXT)))  # noqa: TID251
        # Both ends had many turns to do what they would do.
        for _ in range(200):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert server.heard == (1 if way is not LinkWay.DOWN else 1 + len(TEXT))
        link.change(GOOD)
        assert await waiting == TEXT

    play(story)


def test_a_half_open_link_swallows_bytes_and_tells_nobody_until_it_is_whole_again() -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        reader, writer = await dial(link)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        link.change(GOOD.having(passage=Passage.LOST))
        writer.write(TEXT)
        await poll(lambda: link.counts.lost_bytes == len(TEXT))
        assert link.counts.open == 1, "the connection stands"
        assert server.heard == 1
        # New ones are let in, and nobody answers there either.
        _, stranger = await dial(link)
        stranger.write(b"x")
        await poll(lambda: link.counts.lost_bytes == len(TEXT) + 1)
        link.change(GOOD)
        assert await ended(reader) == b"", "what has a hole can't go on"
        assert server.heard == 1
        reader, writer = await dial(link)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"

    play(story)


def test_a_rate_is_kept_over_all_connections_of_a_direction_together() -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        rate = 200_000.0
        link.change(GOOD.having(LinkWay.UP, rate_bytes_per_s=rate))
        ends = [await dial(link) for _ in range(2)]
        began_s = asyncio.get_running_loop().time()
        for _, writer in ends:
            writer.write(TEXT[:40_000])
        for reader, _ in ends:
            assert await reader.readexactly(40_000) == TEXT[:40_000]
        took_s = asyncio.get_running_loop().time() - began_s
        # What may be overdrawn: a piece, and the burst that wasn't used.
        assert took_s >= (80_000 - 2 * 0.02 * rate - 256) / rate
        # A change is felt at once, by who waits too.
        link.change(GOOD.having(LinkWay.UP, rate_bytes_per_s=1.0))
        ends[0][1].write(TEXT)
        await poll(lambda: server.heard > 80_000)
        link.change(GOOD)
        assert await ends[0][0].readexactly(len(TEXT)) == TEXT

    play(story)


def test_nothing_arrives_before_its_delay_and_the_order_stays() -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        link.change(GOOD.having(delay_s=0.1))
        reader, writer = await dial(link)
        loop = asyncio.get_running_loop()
        for number in range(5):
            began_s = loop.time()
            writer.write(bytes([number]))
            assert await reader.readexactly(1) == bytes([number])
            # Clocks of sockets and loops round.
            assert loop.time() - began_s >= 0.2 - 0.01
        writer.write(TEXT)
        assert await reader.readexactly(len(TEXT)) == TEXT

    play(story)


def test_noise_turns_over_as_many_bits_as_it_says_and_the_same_ones_for_a_seed() -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        link.change(GOOD.having(LinkWay.DOWN, flips_per_byte=0.01))
        reader, writer = await dial(link)
        writer.write(TEXT)
        back = await reader.readexactly(len(TEXT))
        wrong = [(ours ^ theirs).bit_count() for ours, theirs in zip(TEXT, back, strict=True)]
        assert set(wrong) <= {0, 1}
        assert sum(wrong) == link.counts.flipped_bits
        # 1024 are expected of 102,400 bytes; six standard deviations.
        assert abs(sum(wrong) - len(TEXT) / 100) < 6 * (len(TEXT) * 0.01 * 0.99) ** 0.5
        found.append(back)

    found: list[bytes] = []
    play(story)
    play(story)
    assert len(found) == 2


def test_without_a_target_connections_are_reset() -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S), LinkProxy(lambda: "", random.Random(1)) as link:
            reader, _ = await dial(link)
            assert await ended(reader) == b""

    asyncio.run(main())


def test_who_comes_before_the_proxy_is_served_waits_for_it() -> None:
    async def main() -> None:
        listening = loopback_socket()
        async with asyncio.timeout(WITHIN_S), echo() as server:
            link = LinkProxy(lambda: server.address, random.Random(1), listening)
            reader, writer = await dial(link)
            writer.write(b"a")
            async with link:
                assert await reader.readexactly(1) == b"a"

    asyncio.run(main())


def test_a_proxy_that_ends_resets_connections_and_leaves_no_task() -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S), echo() as server:
            async with LinkProxy(lambda: server.address, random.Random(1)) as link:
                link.change(GOOD.having(passage=Passage.HELD, delay_s=100.0))
                reader, writer = await dial(link)
                writer.write(TEXT)
                await poll(lambda: link.counts.open == 1)
            assert await ended(reader) == b""
            # The echo's handler, and this.
            await poll(lambda: len(asyncio.all_tasks()) <= 1)

    asyncio.run(main())


def test_links_are_changed_and_asked_from_outside() -> None:
    async def story(link: LinkProxy, server: Echo) -> None:
        async with LinkControl({"east": link}) as control:
            wanted = GOOD.having(LinkWay.UP, rate_bytes_per_s=1e6, delay_s=0.01)
            standing = await ask_link(control.address, ChangeLink(link="east", state=wanted))
            assert standing.state == link.state == wanted
            reader, writer = await dial(link)
            writer.write(b"abc")
            assert await reader.readexactly(3) == b"abc"
            assert (await ask_link(control.address, AskLink(link="east"))).counts.up_bytes == 3
            with pytest.raises(UsageError, match="there are east"):
                await ask_link(control.address, AskLink(link="west"))
            host, _, port = control.address.rpartition(":")
            odd, words = await asyncio.open_connection(host, int(port))
            words.write(b'{"type":"ChangeLink","link":"east","state":{"type":"LinkState"}}\n')
            assert b"LinkRefused" in await odd.readline()
            words.write(b"x" * 2**17 + b"\n")
            assert await ended(odd) == b""
        with pytest.raises(PeerUnavailable):
            await ask_link("127.0.0.1:1", AskLink(link="east"))
        with pytest.raises((DecodeError, PeerUnavailable)):
            await ask_link(server.address, AskLink(link="east"))

    play(story)


@pytest.mark.parametrize("wrong", [{"rate_bytes_per_s": 0.0}, {"delay_s": -1.0}, {"flips_per_byte": 1.5}])
def test_links_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"above zero|not negative|probability"):
        Direction(**wrong)  # type: ignore[arg-type]
