"""Which transitions of the machines a run has shown, of those that there are.

A transition is an event of a machine together with an effect that it led to; and each typed reason is one too: of a
refusal, a decline, a discard, a session's end, a member's absence, a restart. The table is written down by what the
code of the machines can do, not by what runs have shown. Its rows and reasons are held to the protocol's own unions
and enums (`missing_from_table`), so that a new event, effect or reason must be entered; and a run that shows a
transition which isn't in it says so (`undeclared`).

After each event a machine settles: it makes every decision that has become possible, also by time alone. So at the
very instant of a timer any event may show what the timer would have; such pairs are neither counted nor undeclared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, get_args

from wan_diloco.protocol.events import (
    CloseSession,
    LearnerEffect,
    LearnerEvent,
    LearnerSaid,
    Record,
    SendToLearner,
    SendToSyncer,
    SendUpdate,
    ShowReason,
    SyncerEffect,
    SyncerEvent,
    SyncerSaid,
)
from wan_diloco.protocol.ledger import DiscardReason
from wan_diloco.protocol.messages import (
    Declined,
    DeclineReason,
    LearnerMessage,
    RefusalReason,
    SegmentKind,
    SyncerMessage,
)
from wan_diloco.protocol.tape import ContributionDiscarded, ProgressNoted, RoundClosed, TapeRecord
from wan_diloco.simulation.machines import MachineWorld
from wan_diloco.simulation.transition_table import (
    BY_SETTLING,
    CLOSES,
    LEARNER,
    MISSING,
    RESTARTS,
    SHOWN,
    SYNCER,
    UNREACHABLE,
    UPDATES,
)

__all__ = ["Transitions", "missing_from_table", "table"]


@cache
def table() -> frozenset[str]:
    """All transitions that there are."""
    rows = [f"{who}: {event} -> {effect}" for who, part in _parts() for event in part for effect in part[event]]
    rows += [f"{kind}: {reason}" for kind, reason in _reasons() if f"{kind}: {reason}" not in UNREACHABLE]
    return frozenset(rows)


def missing_from_table() -> set[str]:
    """Events, effects and reasons of the protocol that the table knows nothing of; a bug of the table."""
    lacking: set[str] = set()
    for who, part in _parts():
        events = SyncerEvent if who == "syncer" else LearnerEvent
        heard = LearnerMessage if who == "syncer" else SyncerMessage
        names = _names(events, heard, (LearnerSaid, SyncerSaid)) | ({"start"} if who == "syncer" else set())
        lacking |= {f"{who}: {name}" for name in names - set(part)}
        effects = SyncerEffect if who == "syncer" else LearnerEffect
        said = SyncerMessage if who == "syncer" else LearnerMessage
        made = {f"say {message.__name__}" for message in get_args(said)}
        made |= {effect.__name__ for effect in get_args(effects)} - {
            "SendToLearner",
            "SendToSyncer",
            "Record",
            "SendUpdate",
            "ShowReason",
        }
        if who == "syncer":
            made |= {f"record {record.__name__}" for record in get_args(TapeRecord)} - {"record ProgressNoted"}
            made |= set(UPDATES)
        known = {effect for row in part.values() for effect in row}
        lacking |= {f"{who}: -> {name}" for name in made - known}
    return {name for name in lacking if name not in UNREACHABLE}


class Transitions:
    """What one run, or several tries of it, has shown."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._pairs: dict[tuple[str, str, str], None] = {}
        self._reasons: set[str] = set()

    def note(self, who: str, event: object, effects: Sequence[object]) -> None:
        """A machine was given an event, and answered."""
        machine = "syncer" if who == "syncer" else "learner"
        name, shown = _event_name(event), False
        for effect in effects:
            self._reason(effect)
            outcome = _effect_name(effect)
            if outcome:
                shown = True
                self._pairs[machine, name, outcome] = None
        if not shown:
            self._pairs[machine, name, "nothing"] = None

    def ended(self, world: MachineWorld) -> None:
        """What is only known at the end of a run."""
        state = world.syncer.state
        self._reasons |= {f"refused: {reason}" for reason, number in state.rejected.items() if number}
        self._reasons |= {f"discarded: {reason}" for account in state.ledger.discarded for reason in account}
        self._reasons |= {f"restart: {what}" for what in world.node.resumed}

    def result(self) -> tuple[frozenset[str], frozenset[str]]:
        """Transitions of the table that were seen, and those that it lacks."""
        known = table()
        seen = {f"{who}: {event} -> {effect}" for who, event, effect in self._pairs} | self._reasons
        settled = {f"{who}: {event} -> {effect}" for who, event, effect in self._pairs if effect in BY_SETTLING[who]}
        return frozenset(seen & known), frozenset(seen - known - settled)

    def _reason(self, effect: object) -> None:
        match effect:
            case SendToSyncer(message=Declined() as declined):
                self._reasons.add(f"declined: {declined.reason}")
            case Record(record=ContributionDiscarded() as discarded):
                self._reasons.add(f"discarded: {discarded.reason}")
            case Record(record=RoundClosed() as closed):
                self._reasons |= {f"missing: {missing.reason}" for missing in closed.missing}
            case CloseSession():
                self._reasons.add(f"closed: {_close_name(effect.reason)}")
            case ShowReason():
                self._reasons.add(f"shown: {effect.topic.split(':')[0]}")
            case _:
                pass


def _parts() -> tuple[tuple[str, dict[str, tuple[str, ...]]], ...]:
    return (("syncer", SYNCER), ("learner", LEARNER))


def _reasons() -> Iterable[tuple[str, str]]:
    kinds: tuple[tuple[str, type[StrEnum]], ...] = (
        ("refused", RefusalReason),
        ("declined", DeclineReason),
        ("discarded", DiscardReason),
    )
    for kind, reasons in kinds:
        yield from ((kind, str(reason)) for reason in reasons)
    yield from (("closed", reason) for reason in CLOSES)
    yield from (("missing", reason) for reason in (*MISSING, *DeclineReason))
    yield from (("restart", what) for what in RESTARTS)
    yield from (("shown", topic) for topic in SHOWN)


def _names(union: Any, messages: Any, wrappers: tuple[type, ...]) -> set[str]:
    names = {member.__name__ for member in get_args(union) if member not in wrappers}
    return names | {message.__name__ for message in get_args(messages)}


def _event_name(event: object) -> str:
    if event is None:
        return "start"
    if isinstance(event, LearnerSaid | SyncerSaid):
        return type(event.message).__name__
    return type(event).__name__


def _effect_name(effect: object) -> str:
    """Empty for what isn't a transition of its own: figures noted, reasons shown."""
    maker: Callable[[Any], str] | None = _MAKERS.get(type(effect))
    return maker(effect) if maker is not None else type(effect).__name__


def _record_name(effect: Record) -> str:
    return "" if isinstance(effect.record, ProgressNoted) else f"record {type(effect.record).__name__}"


def _update_name(effect: SendUpdate) -> str:
    header = effect.header
    if header.resync:
        return "update resync"
    if header.segments[0].kind is SegmentKind.VALUE:
        return "update value"
    return "update difference" if len(header.segments) == 1 else "update chain"


def _said_name(effect: SendToLearner | SendToSyncer) -> str:
    return f"say {type(effect.message).__name__}"


_MAKERS: dict[type, Callable[[Any], str]] = {
    Record: _record_name,
    SendUpdate: _update_name,
    SendToLearner: _said_name,
    SendToSyncer: _said_name,
    ShowReason: lambda _: "",
}


def _close_name(reason: str) -> str:
    return next((name for name in CLOSES if reason.startswith(name)), reason)
