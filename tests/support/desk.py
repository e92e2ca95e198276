"""A syncer's machine with two learners, and short words for what happens to it."""

from __future__ import annotations

from tests.support.protocol import EAST, contribution, fresh_state, hello, report, syncer_settings
from wan_diloco.protocol.events import (
    AcceptUpload,
    LearnerConnected,
    LearnerSaid,
    MergeFinished,
    Record,
    SendToLearner,
    SessionId,
    SyncerEffect,
    SyncerEvent,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import ContributionHeader, LearnerMessage, Pull
from wan_diloco.protocol.syncer_machine import SyncerMachine, SyncerSettings
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.units import LearnerId, RoundId

__all__ = ["Desk", "E", "W", "answer", "messages", "only", "pulled", "records"]

E, W = SessionId(1), SessionId(2)


class Desk:
    """A machine, its time, and short words for what happens to it."""

    def __init__(self, settings: SyncerSettings | None = None, state: SyncerState | None = None) -> None:
        self.machine = SyncerMachine(settings or syncer_settings(), state or fresh_state())
        self.now_s = 0.0
        self.effects: list[SyncerEffect] = self.machine.start(0.0)

    def tell(self, event: SyncerEvent, after_s: float = 0.0) -> list[SyncerEffect]:
        self.now_s += after_s
        effects = self.machine.handle(event, self.now_s)
        self.effects += effects
        return effects

    def says(self, session: SessionId, message: LearnerMessage, after_s: float = 0.0) -> list[SyncerEffect]:
        return self.tell(LearnerSaid(session=session, message=message), after_s)

    def joins(self, session: SessionId, learner_id: LearnerId, incarnation: int = 0) -> list[SyncerEffect]:
        self.tell(LearnerConnected(session=session))
        effects = self.says(session, hello(learner_id, incarnation=incarnation))
        return effects + self.says(session, report(0))

    def stores(self, session: SessionId, header: ContributionHeader, after_s: float = 0.0) -> list[SyncerEffect]:
        offered = self.tell(UploadOffered(session=session, header=header), after_s)
        if AcceptUpload(session=session, header=header) not in offered:
            return offered
        return self.tell(UploadStored(session=session, header=header, ref="r", payload_bytes=516))

    def merges(self, round_id: int) -> list[SyncerEffect]:
        return self.tell(
            MergeFinished(
                round_id=RoundId(round_id), digest="d", ref="r", codes_bytes=500, scales_bytes=16, update_bytes=530
            )
        )


def messages(effects: list[SyncerEffect], session: SessionId | None = None) -> list[object]:
    return [
        effect.message for effect in effects if isinstance(effect, SendToLearner) and session in (None, effect.session)
    ]


def records(effects: list[SyncerEffect]) -> list[object]:
    return [effect.record for effect in effects if isinstance(effect, Record)]


def only(kind: type, things: list[object] | list[SyncerEffect]) -> object:
    found = [thing for thing in things if isinstance(thing, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__}"
    return found[0]


def pulled(desk: Desk, step: int = 2, tokens: dict[SessionId, int] | None = None) -> Pull:
    """Let both come so far that fragment 1 is due (at 2, 6, ...)."""
    pull: object = None
    for session in (E, W):
        effects = desk.says(session, report(step, tokens=(tokens or {}).get(session)))
        pull = next((message for message in messages(effects, E) if isinstance(message, Pull)), pull)
    assert isinstance(pull, Pull)
    return pull


def answer(pull: Pull, learner_id: LearnerId = EAST, step_hi: int = 2) -> ContributionHeader:
    return contribution(
        learner_id,
        0,
        step_hi,
        fragment_id=pull.fragment_id,
        base=pull.version,
        round_id=pull.round_id,
        attempt=pull.attempt,
    )
