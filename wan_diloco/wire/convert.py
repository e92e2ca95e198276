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
from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    ContributionHeader,
    LearnerMessage,
    SyncerMessage,
    UpdateHeader,
)
from wan_diloco.wire.generated import admin_pb2, bulk_pb2, control_pb2
from wan_diloco.wire.headers import contribution_from, contribution_to, update_from, update_to
from wan_diloco.wire.learner_messages import learner_message_from, learner_message_to
from wan_diloco.wire.limits import MESSAGE_BYTES_MAX
from wan_diloco.wire.rejoin_messages import StateCall, state_call_from, state_call_to
from wan_diloco.wire.scalars import EnumTable, count
from wan_diloco.wire.sealing import is_sealed, seal
from wan_diloco.wire.syncer_messages import syncer_message_from, syncer_message_to

__all__ = [
    "AnswerKind",
    "DownloadItem",
    "StateCall",
    "UpdatePart",
    "UploadAnswer",
    "decode_answer",
    "decode_contribution",
    "decode_download",
    "decode_learner",
    "decode_progress",
    "decode_state_call",
    "decode_status",
    "decode_syncer",
    "encode_answer",
    "encode_contribution",
    "encode_download",
    "encode_learner",
    "encode_progress",
    "encode_state_call",
    "encode_status",
    "encode_syncer",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePart:
    """What the next messages of a download call are.

    Attributes:
        update: Of those that were announced in this session, counted from 1.
        segment: Of that update, counted from 0.
        messages: How many.
        window_bytes: How many the sender may have unacknowledged on this call.
    """

    update: int
    segment: int
    messages: int
    window_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadItem:
    """What a syncer says on a download call.

    Attributes:
        update: An update is announced.
        part: Messages follow.
    """

    update: UpdateHeader | None = None
    part: UpdatePart | None = None


_ANSWERS = EnumTable(AnswerKind, "KIND", dict(bulk_pb2.UploadAnswer.Kind.items()))


def encode_learner(message: LearnerMessage) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(learner_message_to, message)


def decode_learner(data: bytes) -> LearnerMessage:
    """Raises: DecodeError: It isn't one."""
    return _decode(control_pb2.ControlRequest, learner_message_from, data, _is_of_another_version)


def encode_syncer(message: SyncerMessage) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(syncer_message_to, message)


def decode_syncer(data: bytes) -> SyncerMessage:
    """Raises: DecodeError: It isn't one."""
    return _decode(control_pb2.ControlResponse, syncer_message_from, data, _refuses_our_version)


def encode_contribution(header: ContributionHeader) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(contribution_to, header)


def decode_contribution(data: bytes) -> ContributionHeader:
    """Raises: DecodeError: It isn't one."""
    return _decode(bulk_pb2.ContributionHeader, contribution_from, data)


def encode_download(item: DownloadItem) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(_download_to, item)


def decode_download(data: bytes) -> DownloadItem:
    """Raises: DecodeError: It isn't one."""
    return _decode(bulk_pb2.DownloadItem, _download_from, data)


def encode_progress(received_bytes: int) -> bytes:
    """How far a learner has come with a download call. Raises: LocalProtocolError: It can't be said."""
    return _encode(lambda found: bulk_pb2.DownloadProgress(received_bytes=found), received_bytes)


def decode_progress(data: bytes) -> int:
    """Raises: DecodeError: It isn't one."""
    return _decode(bulk_pb2.DownloadProgress, lambda found: count(found.received_bytes), data)


def encode_state_call(call: StateCall) -> bytes:
    """Raises: LocalProtocolError: It can't be said."""
    return _encode(state_call_to, call)


def decode_state_call(data: bytes) -> StateCall:
    """Raises: DecodeError: It isn't one."""
    return _decode(bulk_pb2.StateCall, state_call_from, data)


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
        data = seal(convert(value).SerializeToString())
    except (ValueError, TypeError) as problem:
        raise LocalProtocolError(f"a {type(value).__name__} that can't be said: {problem}") from problem
    if len(data) > MESSAGE_BYTES_MAX:
        raise LocalProtocolError(f"a {type(value).__name__} of {len(data)} bytes; {MESSAGE_BYTES_MAX} are the most")
    return data


def _decode(
    protobuf: type[_Protobuf],
    convert: Callable[[_Protobuf], _Value],
    data: bytes,
    unsealed: Callable[[_Protobuf], bool] = lambda _: False,
) -> _Value:
    """A message's value.

    Args:
        protobuf: What it is.
        convert: Makes the value.
        data: Its bytes.
        unsealed: Whether it may lack its checksum, as those of peers do that are older than checksums.

    Raises:
        DecodeError: `bad_checksum` when it isn't what was sent; any other reason when nobody should have sent it.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise DecodeError("too_long", f"a message of {len(data)} bytes")
    sealed = is_sealed(data)
    message = protobuf()
    try:
        message.ParseFromString(data)
        if not sealed and not unsealed(message):
            raise DecodeError("bad_checksum", f"a {protobuf.DESCRIPTOR.name} without a checksum")
        return convert(message)
    except ProtobufDecodeError as problem:
        raise DecodeError("garbage", f"no {protobuf.DESCRIPTOR.name}: {problem}") from problem
    except ValueError as problem:
        raise DecodeError("makes_no_sense", str(problem)) from problem


def _is_of_another_version(request: control_pb2.ControlRequest) -> bool:
    # Its sender hears so, and ends.
    return request.HasField("hello") and request.hello.protocol_version != PROTOCOL_VERSION


def _refuses_our_version(response: control_pb2.ControlResponse) -> bool:
    return response.HasField("refused") and response.refused.reason == control_pb2.REFUSAL_REASON_PROTOCOL_VERSION


def _download_to(item: DownloadItem) -> bulk_pb2.DownloadItem:
    part = item.part
    return bulk_pb2.DownloadItem(
        update=None if item.update is None else update_to(item.update),
        part=None
        if part is None
        else bulk_pb2.UpdatePart(
            update=part.update, segment=part.segment, messages=part.messages, window_bytes=part.window_bytes
        ),
    )


def _download_from(item: bulk_pb2.DownloadItem) -> DownloadItem:
    part = item.part
    return DownloadItem(
        update=update_from(item.update) if item.HasField("update") else None,
        part=UpdatePart(
            update=count(part.update),
            segment=count(part.segment),
            messages=count(part.messages),
            window_bytes=count(part.window_bytes),
        )
        if item.HasField("part")
        else None,
    )


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
