"""Whatever is written is read again; whatever else comes is refused, and nothing but refused."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from itertools import pairwise
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.protocol import fresh_state
from wan_diloco.errors import DecodeError
from wan_diloco.protocol.events import LearnerEffect, LearnerEvent, SyncerEffect, SyncerEvent
from wan_diloco.protocol.messages import (
    ContributionHeader,
    LearnerMessage,
    SegmentKind,
    SyncerMessage,
    UpdateHeader,
    UpdateSegment,
)
from wan_diloco.protocol.serial import dumps, from_json, loads, to_json
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.tape import TapeRecord
from wan_diloco.units import Version

UNIONS = (LearnerMessage, SyncerMessage, SyncerEvent, SyncerEffect, LearnerEvent, LearnerEffect, TapeRecord)
CLASSES = sorted({option for union in UNIONS for option in get_args(union)}, key=lambda option: option.__name__)
NUMBERS = st.integers(1, 9) | st.integers(1, 2**63)


def values_of(expected: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, args = get_origin(expected), get_args(expected)
    if isinstance(expected, typing.NewType):
        return values_of(expected.__supertype__)
    if origin in (Union, types.UnionType):
        return st.one_of(*[values_of(option) for option in args])
    if origin is tuple:
        if args[1:] == (Ellipsis,):
            return st.lists(values_of(args[0]), max_size=2).map(tuple)
        return st.tuples(*map(values_of, args))
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return dataclasses_of(expected)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return st.sampled_from(list(expected))
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        type(None): st.none(),
        bool: st.booleans(),
        int: NUMBERS,
        float: st.floats(0, 1e300),
        str: st.text(min_size=1, max_size=5),
    }
    if get_origin(expected) is dict:
        key, value = get_args(expected)
        return st.dictionaries(values_of(key), values_of(value), max_size=3)
    return scalars[expected]


def dataclasses_of(expected: type) -> st.SearchStrategy[Any]:
    if expected is UpdateHeader:
        return updates()
    hints = get_type_hints(expected)
    fields = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(expected)}
    if expected is ContributionHeader:
        fields["step_hi"] = st.integers(2**63, 2**64)
        fields["tokens_hi"] = st.integers(2**63, 2**64)
    if expected is UpdateSegment:
        fields["kind"] = st.just(SegmentKind.VALUE)
    return st.builds(expected, **fields)


@st.composite
def updates(draw: st.DrawFn) -> UpdateHeader:
    counts = sorted(draw(st.sets(st.integers(0, 99), min_size=2, max_size=4)))
    first = draw(st.sampled_from(SegmentKind))
    segments = []
    for index, (lo, hi) in enumerate(pairwise(counts)):
        segment = draw(dataclasses_of(UpdateSegment))
        kind = first if index == 0 else SegmentKind.DIFFERENCE
        segments.append(
            dataclasses.replace(segment, kind=kind, from_version=Version(0, lo), to_version=Version(0, hi))  # type: ignore[arg-type]
        )
    return UpdateHeader(fragment_id=draw(NUMBERS), resync=draw(NUMBERS), segments=tuple(segments))  # type: ignore[arg-type]


ANY = st.one_of([dataclasses_of(option) for option in CLASSES])
ODD = st.sampled_from([10**400, "\u00b2", "--5"])
JSON = st.recursive(
    ODD | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_kind_of_value_comes_back_the_same(cls: type) -> None:
    @settings(max_examples=15)
    @given(dataclasses_of(cls))
    def check(value: Any) -> None:
        line = dumps(value)
        assert b"\n" not in line
        for union in UNIONS:
            if cls in get_args(union):
                assert loads(union, line) == value

    check()


def spoil(data: Any, path: list[int], garbage: Any) -> Any:
    """The same JSON with something else, or nothing, where a path leads."""
    if not path or not isinstance(data, dict | list) or not data:
        return garbage
    here, rest = path[0] % len(data), path[1:]
    if isinstance(data, list):
        return [spoil(item, rest, garbage) if index == here else item for index, item in enumerate(data)]
    chosen = sorted(data)[here]
    if not rest and garbage is None:
        return {name: item for name, item in data.items() if name != chosen}
    return {name: spoil(item, rest, garbage) if name == chosen else item for name, item in data.items()}


@given(ANY, st.lists(st.integers(0, 20), min_size=1, max_size=6), JSON)
def test_a_spoiled_value_is_a_value_or_refused(value: Any, path: list[int], garbage: Any) -> None:
    spoiled = spoil(to_json(value), path, garbage)
    for union in UNIONS:
        try:
            read = from_json(union, spoiled)
        except DecodeError:
            continue
        assert isinstance(read, get_args(union))


@pytest.mark.parametrize(
    ("expected", "data"),
    [
        (int, "5x"),
        (int, "\u00b2"),
        (int, "--5"),
        (int, True),
        (int, 1.0),
        (float, 10**400),
        (float, True),
        (str, 5),
        (bool, 1),
        (SegmentKind, "neither"),
        (SegmentKind, []),
        (tuple[int, ...], {}),
        (tuple[int, int], [1]),
        (tuple[int, int], [1, "x"]),
        (dict[str, int], []),
        (dict[int, int], {"x": 1}),
        (int | None, {}),
        (Version | None, 5),
        (Version | None, {"type": "Hello"}),
        (Version, None),
        (Version, {"type": "Version", "epoch": 0}),
        (Version, {"type": "Version", "epoch": 0, "count": 0, "more": 0}),
        (Version, {"type": "Version", "epoch": 0, "count": -1}),
    ],
)
def test_what_a_field_can_not_hold_is_refused(expected: Any, data: Any) -> None:
    with pytest.raises(DecodeError, match="garbage"):
        from_json(expected, data)


def test_numbers_as_keys_and_whole_numbers_as_fractions_are_read() -> None:
    assert from_json(dict[int, float], {"-5": 2}) == {-5: 2.0}
    assert from_json(list[int], [1, 2]) == [1, 2]
    assert from_json(int | None, None) is None


@given(
    st.binary() | JSON.map(lambda data: json.dumps(data).encode()) | st.just(b"[" * 100_000), st.sampled_from(UNIONS)
)
def test_bytes_that_are_no_value_are_refused(line: bytes, union: Any) -> None:
    with pytest.raises(DecodeError):
        loads(union, line)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), JSON)
def test_a_spoiled_state_is_a_state_or_refused(path: list[int], garbage: Any) -> None:
    spoiled = spoil(json.loads(json.dumps(state_to_json(fresh_state()))), path, garbage)
    if not isinstance(spoiled, dict):
        return
    try:
        state = state_from_json(spoiled)
    except DecodeError:
        return
    assert state_to_json(state)["format"] == spoiled["format"]


def test_a_state_of_another_form_is_refused() -> None:
    with pytest.raises(DecodeError, match="99"):
        state_from_json({**state_to_json(fresh_state()), "format": 99})


@pytest.mark.parametrize("name", ["digests", "updates", "pool", "merges", "due_steps"])
def test_a_state_whose_parts_are_of_two_sizes_is_refused(name: str) -> None:
    data = state_to_json(fresh_state())
    with pytest.raises(DecodeError, match="2 fragments"):
        state_from_json({**data, name: data[name][:1]})


def test_our_own_mistakes_are_not_written() -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        to_json({"a": b"bytes"})
