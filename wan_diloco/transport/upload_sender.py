"""A contribution on its way up, over one call or several; `proto/wan_diloco/v1/bulk.proto` says who says what when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from wan_diloco.errors import DecodeError, TransportError
from wan_diloco.protocol.messages import ContributionHeader
from wan_diloco.transport.beside import beside
from wan_diloco.transport.interface import Counters, Frames
from wan_diloco.transport.pacer import Pacer, Transfer
from wan_diloco.transport.streams import END_MARK, ClientStream
from wan_diloco.transport.window import SendWindow, WindowPlan
from wan_diloco.wire.convert import AnswerKind, UploadAnswer, decode_answer, encode_contribution
from wan_diloco.wire.frames import spans

__all__ = ["Lanes", "UploadSender"]

# More than any server asks for; a bound against one that asks forever.
_ASKED_MAX: Final = 64
# Fewer messages than this a lane aren't worth another call.
_MESSAGES_A_LANE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """How an upload may go.

    Attributes:
        open: Opens a call over the n-th lane; the first is number 0, all others are stripes.
        number: How many there may be, >= 1.
        plan: Of each.
    """

    open: Callable[[int], ClientStream]
    number: int
    plan: WindowPlan


class _Lane:
    """One call that carries messages, and what the far end said on it."""

    def __init__(self, stream: ClientStream, plan: WindowPlan) -> None:
        self.stream = stream
        self.window: SendWindow[int] = SendWindow(plan)
        # The far end takes what comes on it.
        self.is_open = asyncio.Event()
        self.answers: asyncio.Queue[UploadAnswer] = asyncio.Queue(_ASKED_MAX)

    async def listen(self) -> None:
        """Hear what the far end says, up to its last word.

        Raises:
            TransportError: The stream broke, or the syncer answers nonsense.
        """
        while True:
            data = await self.stream.read()
            if data is None:
                raise TransportError("the syncer ended an upload without an answer")
            try:
                answer = decode_answer(data)
            except DecodeError as problem:
                raise TransportError(f"the syncer answered an upload with garbage: {problem}") from problem
            self.is_open.set()
            if answer.kind is AnswerKind.PROGRESS:
                self.window.acknowledged(answer.received_bytes)
                continue
            self.window.answered()
            await self.answers.put(answer)
            if answer.kind is not AnswerKind.SEND:
                return

    async def watch(self) -> None:
        """See that the far end makes progress, from when it takes what comes; a decision may take its time.

        Raises:
            DeadlineExceeded: It doesn't.
        """
        await self.is_open.wait()
        await self.window.watch()

    async def end(self) -> None:
        """Say that what was asked for has been sent."""
        self.window.ended()
        await self.stream.write(END_MARK)


class _Round:
    """Messages that were asked for, and who carries them.

    Attributes:
        left: Which nobody has taken yet.
        stripes_busy: Stripes that carry some, and aren't through.
    """

    def __init__(self, wanted: Iterable[int], transfer: Transfer) -> None:
        self.left = deque(wanted)
        self.transfer = transfer
        self.stripes_busy = 0
        self.changed = asyncio.Event()

    def give_back(self, messages: Iterable[int]) -> None:
        """A stripe broke: somebody else must carry what it had."""
        self.left.extendleft(reversed(list(messages)))
        self.stripes_busy -= 1
        self.changed.set()


class UploadSender:
    """Sends one contribution; used once, on one event loop.

    Args:
        header: What it is.
        frames: Its messages.
        lanes: Where it may go.
        pacer: Of the uplink.
        counters: Of the connection.
    """

    def __init__(
        self, header: ContributionHeader, frames: Frames, lanes: Lanes, pacer: Pacer, counters: Counters
    ) -> None:
        """Nothing is sent yet."""
        self._header = header
        self._first = encode_contribution(header)
        self._frames = frames
        self._lanes = lanes
        self._pacer = pacer
        self._counters = counters
        self._refused = False

    async def send(self, spread_s: float, *, unasked: bool) -> bool:
        """Send it until the syncer has it whole; see `Connection.upload`.

        Returns:
            False if it was refused.

        Raises:
            TransportError: The first call broke, or the syncer answers nonsense.
        """
        lane = _Lane(self._lanes.open(0), self._lanes.plan)
        try:
            async with beside(lane.listen(), lane.watch()):
                answer = await self._converse(lane, spread_s, unasked=unasked)
        finally:
            lane.stream.cancel()
        return answer.kind is AnswerKind.DONE

    async def _converse(self, lane: _Lane, spread_s: float, *, unasked: bool) -> UploadAnswer:
        """Send what is asked for, until the syncer has its last word."""
        await self._open(lane)
        await self._round(lane, range(len(self._frames)) if unasked else (), spread_s)
        for _ in range(_ASKED_MAX):
            answer = await lane.answers.get()
            if answer.kind is not AnswerKind.SEND:
                return answer
            await self._round(lane, self._touched(answer), spread_s)
        raise TransportError(f"the syncer asked for the same upload {_ASKED_MAX} times")

    async def _open(self, lane: _Lane) -> None:
        self._counters.uplink_bytes += len(self._first)
        self._pacer.spend(len(self._first))
        await lane.stream.write(self._first)

    def _touched(self, answer: UploadAnswer) -> Iterable[int]:
        """Which messages carry a part of what is asked for."""
        codes_bytes, whole_bytes = self._header.codes_bytes, self._header.codes_bytes + self._header.scales_bytes
        if (answer.start, answer.end) == (0, whole_bytes):
            return range(len(self._frames))
        carried = enumerate(spans(self._frames, codes_bytes))
        return [index for index, (start, end) in carried if start < answer.end and answer.start < end]

    async def _round(self, lane: _Lane, wanted: Iterable[int], spread_s: float) -> None:
        """Send messages over all lanes, and the mark of their end when the far end will have all of them."""
        wanted = list(wanted)
        total_bytes = sum(len(self._frames[index]) for index in wanted) if spread_s > 0 else 0
        sending = _Round(wanted, self._pacer.transfer(total_bytes, spread_s))
        stripes = min(self._lanes.number, max(1, len(wanted) // _MESSAGES_A_LANE)) - 1
        async with beside(*(self._stripe(lane, number, sending) for number in range(1, stripes + 1))):
            await self._carry(lane, sending)
            while sending.stripes_busy:
                sending.changed.clear()
                await sending.changed.wait()
                await self._carry(lane, sending)
        await lane.end()

    async def _carry(self, lane: _Lane, sending: _Round) -> None:
        """Take messages and write them, as long as there are any and somebody wants them."""
        while sending.left and lane.answers.empty():
            index = sending.left.popleft()
            message = self._frames[index]
            # Noted before it may leave: whatever happens from here on, the far end may not have it.
            try:
                await lane.window.room(len(message))
                await sending.transfer.wait(len(message))
            except BaseException:
                sending.left.appendleft(index)
                raise
            lane.window.wrote(index, len(message))
            self._counters.uplink_bytes += len(message)
            await lane.stream.write(message)

    async def _stripe(self, lead: _Lane, number: int, sending: _Round) -> None:
        """Carry a part of a round over a call of its own; what it can't carry, others will."""
        # Only now does the syncer know what a stripe belongs to.
        await lead.is_open.wait()
        lane = _Lane(self._lanes.open(number), self._lanes.plan)
        is_busy = False
        try:
            async with beside(lane.listen(), lane.watch()):
                await self._open(lane)
                await lane.is_open.wait()
                is_busy = True
                sending.stripes_busy += 1
                await self._carry(lane, sending)
                await lane.end()
                await lane.answers.get()
            sending.give_back(())
        except TransportError:
            if is_busy:
                sending.give_back(lane.window.unacknowledged)
        finally:
            lane.stream.cancel()
