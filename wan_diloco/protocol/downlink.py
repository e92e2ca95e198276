"""What each learner lacks: the level-triggered downlink.

Nothing is pushed once and hoped for. What a learner has is what its last report (or acknowledgement, the
same stream, whichever came later) says; what it lacks against the current versions is sent, one
transfer a learner and fragment at a time. So a lost update, a lost acknowledgement, a reconnect and a
long absence are one case, and need no code of their own.

Owner: the syncer's machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wan_diloco.protocol.events import SendUpdate, SessionId, UpdateSource
from wan_diloco.protocol.messages import MergedNote, Report, SegmentKind, UpdateHeader, UpdateReceived, UpdateSegment
from wan_diloco.protocol.syncer_state import StoredUpdate, SyncerState
from wan_diloco.units import FragmentId, LearnerId, Version

__all__ = ["Downlink"]

_F32_BYTES = 4


@dataclass(slots=True)
class _Line:
    """One learner's standing with one fragment.

    Attributes:
        has: Newest version that it holds, installed or pending; None while unknown.
        resync: Number of the last resync that it holds, as it says.
        needs_resync: It must take the published value whatever it has.
        offered: Number of the last resync that this process sent; 0 for none.
        sending: Version and resync of the transfer that is under way.
    """

    has: Version | None = None
    resync: int = 0
    needs_resync: bool = False
    offered: int = 0
    sending: tuple[Version, int] | None = None

    def holds(self, version: Version, resync: int) -> None:
        """The learner says what it has."""
        self.has, self.resync = version, resync
        if self.offered and resync >= self.offered:
            self.needs_resync = False


@dataclass(slots=True)
class Downlink:
    """All learners' standing.

    Args:
        num_fragments: P.
        codec: Of the publications.
        lossless: Publications are values, not differences: a chain is its last link.
    """

    num_fragments: int
    codec: str
    lossless: bool
    _lines: dict[LearnerId, list[_Line]] = field(default_factory=dict)
    _chains_from: dict[FragmentId, Version] = field(default_factory=dict)

    def connected(self, learner_id: LearnerId, *, new_life: bool) -> None:
        """A session began: nothing is under way on it, and nothing is known until it reports."""
        if new_life or learner_id not in self._lines:
            self._lines[learner_id] = [_Line() for _ in range(self.num_fragments)]
            return
        for line in self._lines[learner_id]:
            line.has, line.sending = None, None

    def reported(self, learner_id: LearnerId, report: Report) -> None:
        """A report tells what the learner holds."""
        for item in report.fragments:
            if item.fragment_id < self.num_fragments:
                line = self._lines[learner_id][item.fragment_id]
                version = item.version if item.pending is None else max(item.version, item.pending)
                line.holds(version, item.resync)
                if line.sending is not None and version >= line.sending[0] and item.resync >= line.sending[1]:
                    line.sending = None  # it is there, and its acknowledgement was lost

    def received(self, learner_id: LearnerId, message: UpdateReceived) -> None:
        """A transfer reached the learner whole; the message tells what it holds now."""
        line = self._lines[learner_id][message.fragment_id]
        line.holds(message.version, message.resync)
        line.sending = None

    def broken(self, learner_id: LearnerId, fragment_id: FragmentId) -> None:
        """A transfer did not reach the learner."""
        if learner_id in self._lines:
            self._lines[learner_id][fragment_id].sending = None

    def chain_lost(self, fragment_id: FragmentId, current: Version) -> None:
        """A stored publication can't be read any more: who lacks one up to now gets the value instead."""
        self._chains_from[fragment_id] = current

    def want_resync(self, learner_id: LearnerId, fragment_id: FragmentId) -> None:
        """The learner must take the published value whatever it has."""
        line = self._lines[learner_id][fragment_id]
        line.needs_resync, line.sending = True, None

    def is_up_to_date(self, learner_id: LearnerId, state: SyncerState) -> bool:
        """Whether a learner holds, of every fragment, the current version or the one before."""
        lines = self._lines.get(learner_id, [])
        return bool(lines) and all(
            line.has is not None
            and not line.needs_resync
            and line.has.epoch == current.epoch
            and line.has.count >= current.count - 1
            for line, current in zip(lines, state.versions, strict=True)
        )

    def lacking(self, learner_id: LearnerId, state: SyncerState) -> list[FragmentId]:
        """What a learner lacks and isn't being sent, the most urgent first."""
        # All work on what must be replaced is refused; after that the oldest, so that a slow one gets each in its turn.
        lines = self._lines[learner_id]
        lacks = [
            (not line.needs_resync, line.has, FragmentId(index))
            for index, (line, current) in enumerate(zip(lines, state.versions, strict=True))
            if line.has is not None and line.sending is None and (line.needs_resync or line.has != current)
        ]
        return [fragment_id for _, _, fragment_id in sorted(lacks)]

    def num_sending(self, learner_id: LearnerId) -> int:
        """How many transfers to a learner are under way."""
        return sum(line.sending is not None for line in self._lines[learner_id])

    def next_update(
        self, learner_id: LearnerId, session: SessionId, fragment_id: FragmentId, state: SyncerState, spread_s: float
    ) -> SendUpdate | None:
        """What to send now, if anything; it counts as under way from here on.

        Args:
            learner_id: To whom.
            session: Over which of its connections.
            fragment_id: Of what.
            state: What there is.
            spread_s: Over how long one publication may be spread. Whoever lags by more, or needs the value, needs it at
                once.
        """
        line = self._lines[learner_id][fragment_id]
        current = state.versions[fragment_id]
        if line.has is None or line.sending is not None:
            return None
        if line.has.epoch != current.epoch or line.has > current:
            line.needs_resync = True
        if line.needs_resync:
            # The number is chosen only now, above what the learner said it has: an earlier process may have
            # sent it some. One that was offered and hasn't arrived yet serves for a later need as well.
            line.offered = max(line.offered, line.resync + 1)
            line.sending = (current, line.offered)
            return self._value(session, fragment_id, state, line.offered, ())
        if line.has == current:
            return None
        line.sending = (current, 0)
        chain = self._chain(line.has, fragment_id, state)
        if chain:
            return self._difference(session, fragment_id, chain, spread_s if len(chain) == 1 else 0.0)
        notes = tuple(note for update in state.updates[fragment_id] for note in update.merged)
        return self._value(session, fragment_id, state, 0, notes)

    def _chain(self, has: Version, fragment_id: FragmentId, state: SyncerState) -> Sequence[StoredUpdate]:
        """The stored publications from `has` to now; empty when the value is cheaper, or some can't be had."""
        updates = state.updates[fragment_id]
        if has < self._chains_from.get(fragment_id, has):
            return []
        if self.lossless:
            return updates[-1:]
        chain = [update for update in updates if update.from_version >= has]
        if not chain or chain[0].from_version != has:
            return []
        size_bytes = sum(update.codes_bytes + update.scales_bytes for update in chain)
        return chain if size_bytes < _F32_BYTES * state.parameters[fragment_id] else []

    def _difference(
        self, session: SessionId, fragment_id: FragmentId, chain: Sequence[StoredUpdate], spread_s: float
    ) -> SendUpdate:
        kind = SegmentKind.VALUE if self.lossless else SegmentKind.DIFFERENCE
        segments = tuple(
            UpdateSegment(
                kind=kind,
                from_version=update.from_version,
                to_version=update.to_version,
                digest=update.digest,
                codec=self.codec,
                codes_bytes=update.codes_bytes,
                scales_bytes=update.scales_bytes,
                merged=update.merged,
            )
            for update in chain
        )
        sources = tuple(
            UpdateSource(
                from_version=update.from_version,
                to_version=update.to_version,
                digest=update.digest,
                ref=update.ref,
                codes_bytes=update.codes_bytes,
                scales_bytes=update.scales_bytes,
            )
            for update in chain
        )
        header = UpdateHeader(fragment_id=fragment_id, resync=0, segments=segments)
        return SendUpdate(session=session, header=header, chain=sources, spread_s=spread_s)

    def _value(
        self,
        session: SessionId,
        fragment_id: FragmentId,
        state: SyncerState,
        resync: int,
        merged: tuple[MergedNote, ...],
    ) -> SendUpdate:
        segment = UpdateSegment(
            kind=SegmentKind.VALUE,
            from_version=state.versions[fragment_id],
            to_version=state.versions[fragment_id],
            digest=state.digests[fragment_id],
            codec="f32",
            codes_bytes=_F32_BYTES * state.parameters[fragment_id],
            scales_bytes=0,
            merged=merged,
        )
        header = UpdateHeader(fragment_id=fragment_id, resync=resync, segments=(segment,))
        return SendUpdate(session=session, header=header, chain=(), spread_s=0.0)
