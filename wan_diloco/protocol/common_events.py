"""Events and effects that both machines know."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShowReason", "TimerFired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time that `deadline_s()` named has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowReason:
    """Why something does not happen, for the operator; given once per change.

    Attributes:
        topic: What it is about ("round", "start"); a newer reason of a topic replaces the older.
        text: One sentence; empty when there is nothing to wait for any more.
    """

    topic: str
    text: str
