"""Both ends of the real transport with nothing behind them, for the benches of pacing; not run by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wan_diloco.protocol.messages import ContributionHeader, ContributionKey, Hello, RefusalReason
from wan_diloco.transport.interface import Session
from wan_diloco.units import Epoch, FragmentId, Incarnation, LearnerId, LocalStep, RoundId, Version
from wan_diloco.wire.frames import Assembler

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEARNER = LearnerId("bench")


class Sink:
    """Checks and puts together what comes, and lets it go."""

    def __init__(self, header: ContributionHeader) -> None:
        """Take memory."""
        self._assembler = Assembler(header.codes_bytes, header.scales_bytes)

    @property
    def gap(self) -> tuple[int, int]:
        """What is missing."""
        return self._assembler.gap

    @property
    def stored_bytes(self) -> int:
        """What is there."""
        return self._assembler.stored_bytes

    async def put(self, message: bytes) -> None:
        """Take a message."""
        self._assembler.add(message)

    def rest(self) -> None:
        """Nothing."""

    def resume(self) -> bool:
        """Go on."""
        return True

    def complete(self, session: Session, header: ContributionHeader, wire_bytes: int) -> None:
        """Let go."""

    def abandon(self) -> None:
        """Nothing."""


class Taker:
    """A syncer's handler that takes everything and keeps nothing."""

    def connected(self, session: Session) -> None:
        """Nothing."""

    def said(self, session: Session, message: Any) -> None:
        """Nothing."""

    def disconnected(self, session: Session, reason: str) -> None:
        """Nothing."""

    async def upload_offered(self, session: Session, header: ContributionHeader) -> Sink:  # noqa: ARG002
        """All are wanted."""
        return Sink(header)

    def upload_failed(self, session: Session, header: ContributionHeader, reason: RefusalReason, detail: str) -> None:  # noqa: ARG002
        """End loudly: nothing goes bad here."""
        raise AssertionError(detail)

    def refused(self, peer: str, reason: RefusalReason, detail: str) -> None:  # noqa: ARG002
        """End loudly."""
        raise AssertionError(detail)

    def status(self) -> dict[str, object]:
        """Nothing."""
        return {}


def noise(size: int) -> NDArray[np.uint8]:
    """Bytes that can't be compressed."""
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def hello(learner_id: LearnerId = LEARNER) -> Hello:
    """A Hello that nobody examines."""
    return Hello(
        protocol_version=1,
        run="bench",
        learner_id=learner_id,
        incarnation=Incarnation(0),
        layout=(),
        settings=(),
        initial_digests=(),
        local_step=LocalStep(0),
        tokens=0,
    )


def contribution(fragment: int, number: int, codes_bytes: int, scales_bytes: int) -> ContributionHeader:
    """The header of a contribution that nobody examines."""
    return ContributionHeader(
        key=ContributionKey(
            learner_id=LEARNER,
            incarnation=Incarnation(1),
            fragment_id=FragmentId(fragment),
            step_lo=LocalStep(number),
        ),
        round_id=RoundId(number),
        attempt=1,
        base=Version(Epoch(0), 1),
        step_hi=LocalStep(number + 1),
        tokens_lo=0,
        tokens_hi=1,
        unit_hi=1,
        codec="int4",
        codes_bytes=codes_bytes,
        scales_bytes=scales_bytes,
    )
