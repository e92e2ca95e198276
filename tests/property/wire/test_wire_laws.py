"""Laws of the wire: what is said is heard, and no bytes at all do harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport import same
from wan_diloco.errors import DecodeError
from wan_diloco.protocol.messages import ContributionHeader, LearnerMessage, SyncerMessage, UpdateHeader
from wan_diloco.wire.convert import (
    DownloadItem,
    decode_answer,
    decode_contribution,
    decode_download,
    decode_learner,
    decode_status,
    decode_syncer,
    encode_contribution,
    encode_download,
    encode_learner,
    encode_syncer,
)
from wan_diloco.wire.frames import Assembler, Buffers, pack
from wan_diloco.wire.sealing import SEAL_BYTES, seal

COUNTS = st.integers(0, 2**62)
DECODERS: list[Callable[[bytes], object]] = [
    decode_learner,
    decode_syncer,
    decode_contribution,
    decode_download,
    decode_answer,
    decode_status,
]


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as peers may send them."""
    if isinstance(kind, NewType):
        return values(kind.__supertype__)
    if kind is int:
        return COUNTS
    if kind is str:
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
    if kind is float:
        return st.floats(0, 1e12)
    if kind is bool:
        return st.booleans()
    if get_origin(kind) is tuple:
        inside = get_args(kind)
        if inside[1:] == (...,):
            return st.lists(values(inside[0]), max_size=4).map(tuple)
        return st.tuples(*map(values, inside))
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        return st.one_of([st.none() if inside is type(None) else values(inside) for inside in get_args(kind)])
    if hasattr(kind, "__members__"):
        return st.sampled_from(list(kind))
    return instances(kind)


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Instances of a dataclass; those that it refuses at birth are left out."""

    def build(fields: dict[str, Any]) -> Any:
        try:
            return kind(**fields)
        except ValueError:
            return None

    hints = {name: values(hint) for name, hint in get_type_hints(kind).items()}
    if kind is UpdateHeader:
        # Chains that hang together are too rare to be found by chance.
        hints["segments"] = hints["segments"].map(lambda segments: segments[:1])
    return st.fixed_dictionaries(hints).map(build).filter(lambda value: value is not None)


LEARNER = st.one_of([instances(kind) for kind in get_args(LearnerMessage)])
SYNCER = st.one_of([instances(kind) for kind in get_args(SyncerMessage)])
SAID: list[tuple[st.SearchStrategy[Any], Callable[[Any], bytes], Callable[[bytes], object]]] = [
    (LEARNER, encode_learner, decode_learner),
    (SYNCER, encode_syncer, decode_syncer),
    (instances(ContributionHeader), encode_contribution, decode_contribution),
    (instances(DownloadItem), encode_download, decode_download),
]


@pytest.mark.parametrize("which", range(len(SAID)))
@given(data=st.data())
def test_what_is_said_is_heard(which: int, data: st.DataObject) -> None:
    strategy, encode, decode = SAID[which]
    message = data.draw(strategy)
    try:
        encoded = encode(message)
        heard = decode(encoded)
    except DecodeError as problem:
        # Sums of two counters may pass what a counter holds.
        check(problem, "out_of_range")
    else:
        assert heard == message


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=300))
def test_decoders_give_a_value_or_a_typed_refusal_for_any_bytes(decode: Callable[[bytes], object], data: bytes) -> None:
    total(decode, data)
    total(decode, seal(data))


@pytest.mark.parametrize("which", range(len(SAID)))
@given(data=st.data())
def test_decoders_give_a_value_or_a_typed_refusal_for_damaged_messages(which: int, data: st.DataObject) -> None:
    strategy, encode, decode = SAID[which]
    message = encode(data.draw(strategy))
    total(decode, damaged(message, data))
    # A peer that says so on purpose.
    total(decode, seal(damaged(message[:-SEAL_BYTES], data)))


@pytest.mark.parametrize("which", range(len(SAID)))
@given(data=st.data())
def test_a_message_of_which_any_bits_were_flipped_is_not_believed(which: int, data: st.DataObject) -> None:
    strategy, encode, decode = SAID[which]
    message = encode(data.draw(strategy))
    # Not its mark: without that it is read to see who may have sent it.
    mark = len(message) - SEAL_BYTES
    places = st.integers(0, 8 * (len(message) - 1) - 1).map(lambda bit: bit if bit < 8 * mark else bit + 8)
    spoilt = bytearray(message)
    for bit in data.draw(st.sets(places, min_size=1, max_size=4)):
        spoilt[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DecodeError, match="bad_checksum"):
        decode(bytes(spoilt))


def damaged(message: bytes, data: st.DataObject) -> bytes:
    """Some bytes of a message overwritten, its end cut off or grown."""
    found = bytearray(message[: data.draw(st.integers(0, len(message)))] if data.draw(st.booleans()) else message)
    for _ in range(data.draw(st.integers(0, 4))):
        if found:
            found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
    return bytes(found) + data.draw(st.binary(max_size=8))


def check(problem: DecodeError, reason: str = "") -> None:
    assert problem.reason
    assert not reason or problem.reason == reason


def total(decode: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(data)
    except DecodeError as problem:
        check(problem)


BYTES = st.binary(max_size=2000).map(lambda data: np.frombuffer(data, dtype=np.uint8))


@given(codes=BYTES, scales=BYTES, chunk_bytes=st.integers(1, 3000), zstd=st.booleans(), data=st.data())
def test_payloads_come_back_in_any_order(
    codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], chunk_bytes: int, *, zstd: bool, data: st.DataObject
) -> None:
    messages = pack(codes, scales, chunk_bytes=max(chunk_bytes, (codes.size + scales.size) // 50 + 1), zstd=zstd)
    assembler = Assembler(codes.size, scales.size)
    for message in data.draw(st.permutations(messages)):
        assembler.add(message)
    assert assembler.complete
    assert same(assembler.result(), Buffers(codes=codes, scales=scales))


@settings(max_examples=300)
@given(codes=BYTES, scales=BYTES, zstd=st.booleans(), data=st.data())
def test_damaged_messages_are_refused_or_change_nothing(
    codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], *, zstd: bool, data: st.DataObject
) -> None:
    messages = pack(codes, scales, chunk_bytes=500, zstd=zstd)
    assembler = Assembler(codes.size, scales.size)
    for message in messages:
        try:
            assembler.add(damaged(message, data))
        except DecodeError as problem:
            check(problem)
        assembler.add(message)
    assert same(assembler.result(), Buffers(codes=codes, scales=scales))


@given(data=st.binary(max_size=200))
def test_an_assembler_survives_any_bytes(data: bytes) -> None:
    total(Assembler(100, 10).add, data)
    total(Assembler(100, 10).add, b"W2" + data)
