"""Identifiers as types, and the one border between human units and base units.

Inside the code there are only base units: seconds, bytes, bytes per second, tokens, steps. Human
forms ("400mbit", "80ms", "2GiB", "10M") exist in configuration and on the command line; `parse_*` is
called there and nowhere else. Bits exist at that border only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NewType

from wan_diloco.errors import UnitError

__all__ = [
    "Epoch",
    "FragmentId",
    "GlobalStep",
    "Incarnation",
    "LearnerId",
    "LocalStep",
    "RegionName",
    "RoundId",
    "ShardId",
    "Term",
    "TransferId",
    "Version",
    "format_count",
    "format_duration",
    "format_rate",
    "format_size",
    "is_region_name",
    "parse_count",
    "parse_duration",
    "parse_rate",
    "parse_size",
]

RegionName = NewType("RegionName", str)
LearnerId = NewType("LearnerId", str)
FragmentId = NewType("FragmentId", int)
RoundId = NewType("RoundId", int)
ShardId = NewType("ShardId", int)
TransferId = NewType("TransferId", int)
Incarnation = NewType("Incarnation", int)
Term = NewType("Term", int)
Epoch = NewType("Epoch", int)
GlobalStep = NewType("GlobalStep", int)
LocalStep = NewType("LocalStep", int)

_NAME_LENGTH_MAX: Final = 63
_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


def is_region_name(name: str) -> bool:
    """Whether a region, and so its learner, may be called that: 1 to 63 of a-z, 0-9 and -."""
    return 1 <= len(name) <= _NAME_LENGTH_MAX and _NAME_CHARACTERS.issuperset(name)


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """How often a fragment has been merged in an epoch; ordered by epoch, then count.

    Attributes:
        epoch: Rises only when the state went back.
        count: Merges since the initial weights, which are count 0.
    """

    epoch: Epoch
    count: int

    def __post_init__(self) -> None:
        """Refuse negative numbers, which no sender means."""
        if self.epoch < 0 or self.count < 0:
            raise ValueError(f"a version is never negative: {self.epoch}.{self.count}")

    def next(self) -> Version:
        """The version that the next merge in this epoch makes."""
        return Version(self.epoch, self.count + 1)

    def __str__(self) -> str:
        """Epoch and count, as in logs: `0.17`."""
        return f"{self.epoch}.{self.count}"


_NUMBER: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*(?:/s)?)\s*")

# Rates follow tc: "mbit" is 10^6 bits a second, "mbps" would be bytes and is refused as ambiguous.
_RATES: Final[dict[str, float]] = {
    "bit": 1 / 8,
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "B/s": 1.0,
    "kB/s": 1e3,
    "MB/s": 1e6,
    "GB/s": 1e9,
}
_SIZES: Final[dict[str, float]] = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DURATIONS: Final[dict[str, float]] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS: Final[dict[str, float]] = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
# Far beyond what anybody means, and far below what no float holds once the unit is in.
_NUMBER_MAX: Final = 1e18


def _parse(text: str, table: dict[str, float], what: str, example: str) -> Decimal:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in table:
        units = ", ".join(unit for unit in table if unit)
        raise UnitError(f"{text!r} isn't a {what}", hint=f'write it like "{example}"; units are {units}')
    if float(match[1]) > _NUMBER_MAX:
        raise UnitError(f"{text!r} is too large for a {what}")
    # decimal, because 2.01k is 2010, but 2.01 * 1000 isn't
    return Decimal(match[1]) * Decimal(str(table[match[2]]))


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as "400mbit" or "50MB/s".

    Raises:
        UnitError: The text has no unit that is known here.
    """
    return float(_parse(text, _RATES, "rate", "400mbit"))


def parse_size(text: str) -> int:
    """Bytes of a size such as "2GiB".

    Raises:
        UnitError: The text has no unit that is known here.
    """
    return round(_parse(text, _SIZES, "size", "2GiB"))


def parse_duration(text: str) -> float:
    """Seconds of a duration such as "80ms".

    Raises:
        UnitError: The text has no unit that is known here.
    """
    return float(_parse(text, _DURATIONS, "duration", "80ms"))


def parse_count(text: str) -> int:
    """A whole number such as "10M" or "2048".

    Raises:
        UnitError: The text isn't a number, or not a whole one.
    """
    value = _parse(text, _COUNTS, "count", "10M")
    if value != int(value):
        raise UnitError(f"{text!r} isn't a whole number", hint='write it like "10M"')
    return int(value)


def _format(value: float, scale: list[tuple[float, str]]) -> str:
    # what rounds up to a unit gets that unit: 999,600 is 1M, not 1e+03k
    rounded = float(f"{value:.3g}")
    factor, unit = next((entry for entry in scale if abs(rounded) >= entry[0]), scale[-1])
    number = value / factor
    return f"{number:.0f}{unit}" if abs(number) >= 999.5 else f"{number:.3g}{unit}"


def format_rate(rate_bytes_per_s: float) -> str:
    """A rate for a person: "400Mbit/s"."""
    return _format(rate_bytes_per_s * 8, [(1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")])


def format_size(size_bytes: float) -> str:
    """A size for a person: "1.5MiB"."""
    return _format(size_bytes, [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")])


def format_duration(duration_s: float) -> str:
    """A duration for a person: "80ms"."""
    return _format(duration_s, [(86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us")])


def format_count(count: float) -> str:
    """A count for a person: "9.83M"."""
    return _format(count, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")])
