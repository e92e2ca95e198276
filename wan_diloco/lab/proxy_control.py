"""Links that are changed from another process: one line of JSON asks, one answers, over a socket of this machine.

Anybody on the machine may ask; it is for laboratories.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, cast

from wan_diloco.errors import DecodeError, PeerUnavailable, UsageError
from wan_diloco.lab.links import LinkCounts, LinkState
from wan_diloco.protocol import serial

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from wan_diloco.lab.proxy import LinkProxy

__all__ = ["AskLink", "ChangeLink", "LinkControl", "LinkRefused", "LinkStanding", "ask_link"]

_LINE_BYTES_MAX: Final = 64 * 1024
_ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLink:
    """How is this link?"""

    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeLink:
    """Make this link so."""

    link: str
    state: LinkState


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStanding:
    """How a link is now, and what went over it."""

    link: str
    state: LinkState
    counts: LinkCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRefused:
    """Why not."""

    problem: str


# Unions are no classes for the type checker, but they are what `serial.loads` takes.
_ASKED: Final = cast("Any", AskLink | ChangeLink)
_ANSWERED: Final = cast("Any", LinkStanding | LinkRefused)


class LinkControl:
    """Answers for some links. An asynchronous context.

    Owner: the links' event loop.

    Args:
        links: By name.
    """

    def __init__(self, links: Mapping[str, LinkProxy]) -> None:
        """Listen to nobody yet."""
        self._links = links
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Self:
        """Listen on a free port of this machine."""
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", 0, limit=_LINE_BYTES_MAX)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listen no more."""
        assert self._server is not None, "it was entered"
        self._server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A line that is too long ends the conversation, as the end of the stream does.
            while (line := await reader.readline()).endswith(b"\n"):
                writer.write(serial.dumps(self._answer(line)) + b"\n")
                await writer.drain()
        except (OSError, ValueError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _answer(self, line: bytes) -> LinkStanding | LinkRefused:
        try:
            asked = serial.loads(_ASKED, line)
        except DecodeError as problem:
            return LinkRefused(problem=str(problem))
        link = self._links.get(asked.link)
        if link is None:
            return LinkRefused(problem=f"there is no link {asked.link!r}; there are {', '.join(sorted(self._links))}")
        if isinstance(asked, ChangeLink):
            link.change(asked.state)
        return LinkStanding(link=asked.link, state=link.state, counts=link.counts)


async def ask_link(address: str, question: AskLink | ChangeLink) -> LinkStanding:
    """Ask once.

    Args:
        address: Of a `LinkControl`.
        question: May change the link first.

    Raises:
        PeerUnavailable: Nobody answers there.
        UsageError: There is no such link.
        DecodeError: What answers is no such thing.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, int(port), limit=_LINE_BYTES_MAX)
            try:
                writer.write(serial.dumps(question) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, ValueError) as exc:
        raise PeerUnavailable(f"no link answers at {address}: {exc}") from exc
    answer = serial.loads(_ANSWERED, line)
    if isinstance(answer, LinkRefused):
        raise UsageError(answer.problem)
    assert isinstance(answer, LinkStanding)
    return answer
