"""The far end of an upload with nothing behind it, for benches of the transport and of pacing; not run by itself."""

from __future__ import annotations

from typing import Any

from wan_diloco.protocol.messages import ContributionHeader, RefusalReason
from wan_diloco.wire.coverage import Coverage
from wan_diloco.wire.frames import unpack


class Sink:
    """Checks what comes, and lets it go; what a syncer's disk and its thread cost is another bench's."""

    stored_bytes = 0

    def __init__(self, header: ContributionHeader) -> None:
        """Nothing came yet."""
        self._sizes = (header.codes_bytes, header.scales_bytes)
        self._coverage = Coverage(sum(self._sizes))

    @property
    def gap(self) -> tuple[int, int]:
        """What is missing."""
        return self._coverage.gap()

    async def put(self, message: bytes) -> None:
        """Take a message."""
        for piece in unpack(message, *self._sizes):
            self._coverage.add(piece.start, piece.start + piece.raw.size)

    def rest(self) -> None:
        """Nothing."""

    def resume(self) -> bool:
        """Go on."""
        return True

    def complete(self, session: Any, header: ContributionHeader, wire_bytes: int) -> None:
        """Let go."""

    def abandon(self) -> None:
        """Nothing."""


class Taker:
    """What a syncer's service is to the transport, for a bench: it takes everything and keeps nothing."""

    def connected(self, session: Any) -> None:
        """Nothing."""

    def said(self, session: Any, message: Any) -> None:
        """Nothing."""

    def disconnected(self, session: Any, reason: str) -> None:
        """Nothing."""

    def may_relay(self, session: Any, transfer: int, *, giving: bool) -> bool:  # noqa: ARG002
        """Nobody gives any state here."""
        return False

    async def upload_offered(self, session: Any, header: ContributionHeader) -> Sink:  # noqa: ARG002
        """All are wanted."""
        return Sink(header)

    def upload_failed(self, session: Any, header: ContributionHeader, reason: RefusalReason, detail: str) -> None:  # noqa: ARG002
        """End loudly: bytes on this machine don't go bad."""
        raise AssertionError(detail)

    def refused(self, peer: str, reason: RefusalReason, detail: str) -> None:  # noqa: ARG002
        """End loudly."""
        raise AssertionError(detail)

    def status(self) -> dict[str, object]:
        """Nothing."""
        return {}
