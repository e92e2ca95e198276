"""A world, told line by line for a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum

from wan_diloco.simulation.worlds import WorldResult, draw_world, play_world

__all__ = ["retell"]

_DETAIL_MAX = 160
# What says nothing that the rest of a line doesn't.
_DULL = frozenset(
    {"layout", "settings", "initial_digests", "codec", "codes_bytes", "scales_bytes", "shards", "fragments"}
)


def retell(seed: int, tell: Callable[[str], None]) -> WorldResult:
    """Play one world, and tell every event of every machine with what it led to.

    Args:
        seed: The world's number.
        tell: Takes the lines.
    """
    number = 0

    def note(who: str, event: object, effects: Sequence[object]) -> None:
        nonlocal number
        if who == "syncer" and event is None and number == 0:
            tell(f"settings {_short(draw_world(seed).settings)}")
        number += 1
        tell(f"{number:6} {who:<7} {'starts' if event is None else _short(event)}")
        for effect in effects:
            tell(f"{'':14} -> {_short(effect)}")

    return play_world(seed, note)


def _short(value: object) -> str:
    text = _named(value)
    return text if len(text) <= _DETAIL_MAX else f"{text[:_DETAIL_MAX]}..."


def _named(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = ((field.name, getattr(value, field.name)) for field in fields(value) if field.name not in _DULL)
        return f"{type(value).__name__}({', '.join(f'{name}={_named(each)}' for name, each in inside)})"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_named, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
