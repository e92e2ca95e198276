"""Field types for numbers that people write with units; base units inside, the shortest exact text outside.

Nothing here knows which section a field belongs to. `units` does the parsing; this module only makes
pydantic report a bad text together with the key that holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from wan_diloco.errors import UnitError
from wan_diloco.units import parse_count, parse_duration, parse_rate, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Count", "Duration", "Rate", "Size", "duration_text", "rate_text", "size_text"]

_RATE_UNITS: Final = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "kbit": 1e3 / 8, "B/s": 1.0}
_DURATION_UNITS: Final = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZE_UNITS: Final = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}


def _reader(parse: Callable[[str], float], *, bare: bool) -> BeforeValidator:
    """A validator that parses text; other types go on to pydantic only where a bare number has a meaning."""

    def read(value: object) -> object:
        if isinstance(value, str):
            try:
                return parse(value)
            except UnitError as error:
                raise PydanticCustomError(
                    "quantity", "{problem}", {"problem": error.problem, "hint": error.hint}
                ) from error
        if bare and type(value) is int:
            return value
        problem = f"{value!r} isn't a whole number" if bare else f"{value!r} has no unit"
        hint = 'write it like 2048 or "10M"' if bare else 'write it as text with a unit, like "80ms" or "400mbit"'
        raise PydanticCustomError("quantity", "{problem}", {"problem": problem, "hint": hint})

    return BeforeValidator(read)


def _shortest(value: float, table: dict[str, float], parse: Callable[[str], float]) -> str:
    """The first unit, largest first, in which six digits say the value exactly and at least one whole unit fits."""
    for unit, factor in table.items():
        text = f"{value / factor:.6g}{unit}"
        if value >= factor and "e" not in text and parse(text) == value:
            return text
    unit = next(unit for unit, factor in table.items() if factor == 1.0)
    return f"{value:.17g}{unit}"


def rate_text(rate_bytes_per_s: float) -> str:
    """Text that `parse_rate` reads back to the very same value."""
    return _shortest(rate_bytes_per_s, _RATE_UNITS, parse_rate)


def duration_text(duration_s: float) -> str:
    """Text that `parse_duration` reads back to the very same value."""
    return _shortest(duration_s, _DURATION_UNITS, parse_duration)


def size_text(size_bytes: float) -> str:
    """Text that `parse_size` reads back to the very same value."""
    return _shortest(size_bytes, _SIZE_UNITS, parse_size)


def _text_schema(example: str) -> WithJsonSchema:
    schema: dict[str, Any] = {"type": "string", "examples": [example]}
    return WithJsonSchema(schema)


Rate = Annotated[float, _reader(parse_rate, bare=False), PlainSerializer(rate_text), _text_schema("400mbit")]
"""Bytes per second, written like "400mbit"."""

Duration = Annotated[float, _reader(parse_duration, bare=False), PlainSerializer(duration_text), _text_schema("80ms")]
"""Seconds, written like "80ms"."""

Size = Annotated[int, _reader(parse_size, bare=False), PlainSerializer(size_text), _text_schema("512KiB")]
"""Bytes, written like "512KiB"."""

Count = Annotated[
    int,
    _reader(parse_count, bare=True),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}], "examples": ["10M", 2048]}),
]
"""A whole number, written bare or like "10M"."""
