"""Messages of the protocol to bytes and back: the one door through which bytes become values.

`encode_*` refuses what we should never have said (`LocalProtocolError`); `decode_*` is total: a value, or
`DecodeError` with a stable reason, whatever the bytes are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message

from wan_diloco.errors import DecodeError, LocalProtocolError
from wan_diloco.protocol.messages import ContributionHeader, LearnerMessage, SyncerMessage, UpdateHeader
from wan_diloco.wire.generated import admin_pb2, bulk_pb2, control_pb2
from wan_diloco.wire.headers import contribution_from, contribution_to, update_from, update_to
from wan_diloco.wire.learner_messages import learner_message_from, learner_message_to
from wan_diloco.wire.limits import MESSAGE_BYTES_MAX
from wan_diloco.wire.scalars import EnumTable, count
from wan_diloco.wire.syncer_messages import syncer_message_from, syncer_message_to

__all__ = [
    "AnswerKind",
    "UploadAnswer",
    "decode_answer",
    "decode_contribution",
    "decode_learner",
    "decode_status",
    "decode_syncer",
    "decode_update",
    "encode_answer",
    "encode_contribution",
    "encode_learner",
    "encode_status",
    "encode_syncer",
    "encode_update",
]

_Value = TypeVar("_Value")
_Protobuf = TypeVar("_Protobuf", bound=Message)


class AnswerKind(StrEnum):
    """What a syncer says about an upload."""

    SEND = "send"
    DONE = "done"
    REFUSED = "refused"
    PROGRESS = "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadAnswer:
    """An answer within an upload's call.

    Attributes:
        start, end: With SEND: which part of the row of codes and scales is asked for.
        received_bytes: With PROGRESS: of messages of this call.
    """

    kind: AnswerKind
    start: int = 0
    end: int = 0
    received_bytes: int = 0


_ANSWERS = EnumTable(AnswerKind, "KIND", dict(bulk_pb2.UploadAnswer.Kind.items()))


def encode_learner(message: LearnerMessage) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(learner_message_to, message)


def decode_learner(data: bytes) -> LearnerMessage:
    """Raises: DecodeError: It isn't one."""
    return _decode(control_pb2.ControlRequest, learner_message_from, data)


def encode_syncer(message: SyncerMessage) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(syncer_message_to, message)


def decode_syncer(data: bytes) -> SyncerMessage:
    """Raises: DecodeError: It isn't one."""
    return _decode(control_pb2.ControlResponse, syncer_message_from, data)


def encode_contribution(header: ContributionHeader) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(contribution_to, header)


def decode_contribution(data: bytes) -> ContributionHeader:
    """Raises: DecodeError: It isn't one."""
    return _decode(bulk_pb2.ContributionHeader, contribution_from, data)


def encode_update(header: UpdateHeader) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(update_to, header)


def decode_update(data: bytes) -> UpdateHeader:
    """Raises: DecodeError: It isn't one."""
    return _decode(bulk_pb2.UpdateHeader, update_from, data)


def encode_answer(answer: UploadAnswer) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(_answer_to, answer)


def decode_answer(data: bytes) -> UploadAnswer:
    """Raises: DecodeError: It isn't one."""
    return _decode(bulk_pb2.UploadAnswer, _answer_from, data)


def encode_status(status: dict[str, object]) -> bytes:
    """Raises: LocalProtocolError: It isn't JSON, or too long."""
    return _encode(lambda found: admin_pb2.GetStatusResponse(status_json=json.dumps(found)), status)


def decode_status(data: bytes) -> dict[str, object]:
    """Raises: DecodeError: It isn't a JSON object."""
    return _decode(admin_pb2.GetStatusResponse, _status_from, data)


def _encode(convert: Callable[[_Value], Message], value: _Value) -> bytes:
    try:
        data = convert(value).SerializeToString()
    except (ValueError, TypeError) as problem:
        raise LocalProtocolError(f"a {type(value).__name__} that can't be said: {problem}") from problem
    if len(data) > MESSAGE_BYTES_MAX:
        raise LocalProtocolError(f"a {type(value).__name__} of {len(data)} bytes; {MESSAGE_BYTES_MAX} are the most")
    return data


def _decode(protobuf: type[_Protobuf], convert: Callable[[_Protobuf], _Value], data: bytes) -> _Value:
    if len(data) > MESSAGE_BYTES_MAX:
        raise DecodeError("too_long", f"a message of {len(data)} bytes")
    message = protobuf()
    try:
        message.ParseFromString(data)
        return convert(message)
    except ProtobufDecodeError as problem:
        raise DecodeError("garbage", f"no {protobuf.DESCRIPTOR.name}: {problem}") from problem
    except ValueError as problem:
        raise DecodeError("makes_no_sense", str(problem)) from problem


def _answer_to(answer: UploadAnswer) -> bulk_pb2.UploadAnswer:
    kind = _ANSWERS.number(answer.kind)
    return bulk_pb2.UploadAnswer(
        kind=kind,  # type: ignore[arg-type]
        start=answer.start,
        end=answer.end,
        received_bytes=answer.received_bytes,
    )


def _answer_from(answer: bulk_pb2.UploadAnswer) -> UploadAnswer:
    return UploadAnswer(
        kind=_ANSWERS.member(answer.kind),
        start=count(answer.start),
        end=count(answer.end),
        received_bytes=count(answer.received_bytes),
    )


def _status_from(response: admin_pb2.GetStatusResponse) -> dict[str, object]:
    try:
        status = json.loads(response.status_json)
    except RecursionError as problem:
        raise DecodeError("garbage", "a status nested too deeply") from problem
    if not isinstance(status, dict):
        raise DecodeError("garbage", "a status that is no object")
    return status
