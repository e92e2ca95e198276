"""Frozen dataclasses to JSON and back, for the tape, the input log, snapshots and local pipes.

One line of JSON a value. A dataclass carries its class's name under "type", so that a union is decoded by
looking the name up; nothing is ever executed or imported because of what a line says. Decoding is total:
whatever the input, the result is a value of the asked type or a `DecodeError`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from wan_diloco.errors import DecodeError

__all__ = ["dumps", "from_json", "loads", "to_json"]

T = TypeVar("T")

_INTEGER = re.compile("-?[0-9]{1,30}")


def to_json(value: object) -> Any:
    """The JSON-able form of a dataclass, enum, tuple, list, string-keyed dict or scalar.

    Raises:
        TypeError: The value holds something else; a bug of ours.
    """
    if value is None or isinstance(value, bool | int | float) or type(value) is str:
        return value
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def dumps(value: object) -> bytes:
    """One line of compact JSON, without the line's end."""
    return json.dumps(to_json(value), separators=(",", ":"), ensure_ascii=False).encode()


def from_json(expected: Any, data: object) -> Any:
    """The value of type `expected` that `to_json` made `data` from.

    Args:
        expected: A dataclass, a union of them, or any type that their fields use.
        data: What `json.loads` returns.

    Raises:
        DecodeError: The data doesn't describe such a value.
    """
    origin = get_origin(expected)
    if isinstance(expected, typing.NewType):
        return from_json(expected.__supertype__, data)
    if origin in (Union, types.UnionType):
        return _union(get_args(expected), data)
    if origin is tuple:
        return _tuple(get_args(expected), data)
    if origin is list:
        return list(_tuple((*get_args(expected), Ellipsis), data))
    if origin is dict:
        return _dict(get_args(expected), data)
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _dataclass(expected, data)
    if isinstance(expected, type) and issubclass(expected, Enum):
        try:
            return expected(data)
        except ValueError as exc:
            raise _bad(f"{data!r} isn't a {expected.__name__}") from exc
    return _scalar(expected, data)


def loads(expected: type[T], line: bytes | str) -> T:
    """Decode one line; see `from_json`. `expected` may be a union.

    Raises:
        DecodeError: The line isn't JSON, or not of that type.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise _bad("not a line of JSON") from exc
    return cast("T", from_json(expected, data))


def _bad(detail: str) -> DecodeError:
    return DecodeError("garbage", detail[:200])


def _union(options: tuple[Any, ...], data: object) -> Any:
    if data is None:
        if type(None) in options:
            return None
        raise _bad("null where a value is needed")
    if isinstance(data, dict):
        name = data.get("type")
        for option in options:
            if getattr(option, "__name__", None) == name and dataclasses.is_dataclass(option):
                return _dataclass(cast("type", option), data)
        raise _bad(f"{name!r} is none of the types that may stand here")
    for option in options:
        if option is not type(None) and not dataclasses.is_dataclass(option):
            return from_json(option, data)
    raise _bad(f"{type(data).__name__} where an object is needed")


def _tuple(args: tuple[Any, ...], data: object) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _bad("a list is needed")
    if args[1:] == (Ellipsis,):
        return tuple(from_json(args[0], item) for item in data)
    if len(args) != len(data):
        raise _bad(f"{len(args)} items are needed, {len(data)} are there")
    return tuple(from_json(arg, item) for arg, item in zip(args, data, strict=True))


def _dict(args: tuple[Any, ...], data: object) -> dict[Any, Any]:
    if not isinstance(data, dict):
        raise _bad("an object is needed")
    return {from_json(args[0], key): from_json(args[1], item) for key, item in data.items()}


def _dataclass(expected: type, data: object) -> Any:
    if not isinstance(data, dict) or data.get("type") != expected.__name__:
        raise _bad(f"a {expected.__name__} is needed")
    hints = _hints(expected)
    if set(data) - {"type"} != set(hints):
        raise _bad(f"a {expected.__name__} has the fields {sorted(hints)}")
    values = {name: from_json(hint, data[name]) for name, hint in hints.items()}
    try:
        return expected(**values)
    except (TypeError, ValueError) as exc:
        raise _bad(str(exc)) from exc


def _scalar(expected: Any, data: object) -> Any:
    if expected is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError as exc:
            raise _bad("a number beyond all floats") from exc
    if expected is int and isinstance(data, str) and _INTEGER.fullmatch(data):
        return int(data)  # keys of objects are strings in JSON
    if expected in (bool, int, float, str) and type(data) is expected:
        return data
    raise _bad(f"{type(data).__name__} where {getattr(expected, '__name__', expected)} is needed")


@cache
def _hints(expected: type) -> dict[str, Any]:
    hints = get_type_hints(expected)
    return {field.name: hints[field.name] for field in dataclasses.fields(expected)}
