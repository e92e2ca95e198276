"""Single fields, checked on their way in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from wan_diloco.errors import DecodeError
from wan_diloco.units import Epoch, Version
from wan_diloco.wire.generated import control_pb2
from wan_diloco.wire.limits import COUNT_MAX, NAME_CHARS_MAX, TEXT_CHARS_MAX

__all__ = ["EnumTable", "bounded", "count", "name", "real", "text", "version_from", "version_to"]

_Element = TypeVar("_Element")
_Enum = TypeVar("_Enum", bound=StrEnum)


class EnumTable(Generic[_Enum]):
    """Ours and protobuf's members of one enum; complete, or it can't be built.

    Args:
        ours: The enum of the protocol.
        prefix: What protobuf puts before each name.
        numbers: Protobuf's members by name.
    """

    def __init__(self, ours: type[_Enum], prefix: str, numbers: dict[str, int]) -> None:
        """Match members by name."""
        self._number_of = {member: numbers[f"{prefix}_{member.name}"] for member in ours}
        self._member_of = {number: member for member, number in self._number_of.items()}
        if len(self._member_of) != len(numbers) - 1:
            raise AssertionError(f"{ours.__name__} and its protobuf twin have different members")

    def number(self, member: _Enum) -> int:
        """Protobuf's number."""
        return self._number_of[member]

    def member(self, number: int) -> _Enum:
        """Our member.

        Raises:
            DecodeError: There is none of that number, or it is left unspecified.
        """
        try:
            return self._member_of[number]
        except KeyError:
            raise DecodeError("unknown_enum", f"no member has the number {number}") from None


def count(value: int) -> int:
    """A number that fits a signed counter of 64 bit.

    Raises:
        DecodeError: It doesn't.
    """
    if value > COUNT_MAX:
        raise DecodeError("out_of_range", f"{value} doesn't fit a counter")
    return value


def real(value: float) -> float:
    """A finite number.

    Raises:
        DecodeError: It isn't.
    """
    if not math.isfinite(value):
        raise DecodeError("non_finite", f"{value} where a number was meant")
    return value


def name(value: str) -> str:
    """An identifier of bounded length.

    Raises:
        DecodeError: It is longer.
    """
    return _short(value, NAME_CHARS_MAX)


def text(value: str) -> str:
    """A sentence or line of bounded length.

    Raises:
        DecodeError: It is longer.
    """
    return _short(value, TEXT_CHARS_MAX)


def _short(value: str, chars_max: int) -> str:
    if len(value) > chars_max:
        raise DecodeError("too_long", f"a text of {len(value)} characters")
    return value


def bounded(values: Sequence[_Element], length_max: int) -> Sequence[_Element]:
    """The same sequence, of bounded length.

    Raises:
        DecodeError: It is longer.
    """
    if len(values) > length_max:
        raise DecodeError("too_many", f"{len(values)} entries where {length_max} are the most")
    return values


def version_to(version: Version) -> control_pb2.Version:
    """Protobuf's form."""
    return control_pb2.Version(epoch=version.epoch, count=version.count)


def version_from(found: control_pb2.Version) -> Version:
    """Our form.

    Raises:
        DecodeError: A number is out of range.
    """
    return Version(Epoch(count(found.epoch)), count(found.count))
