"""Every message survives the wire; what must not be said is refused on either side."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tests.support.transport import contribution, hello, update
from wan_diloco.errors import DecodeError, LocalProtocolError
from wan_diloco.protocol.messages import Hello, RefusalReason, Refused, Report, Start, Stop, Welcome
from wan_diloco.units import Epoch, GlobalStep, Incarnation, LocalStep, ShardId, Term
from wan_diloco.wire.convert import (
    DownloadItem,
    UpdatePart,
    decode_contribution,
    decode_download,
    decode_learner,
    decode_progress,
    decode_status,
    decode_syncer,
    encode_contribution,
    encode_download,
    encode_learner,
    encode_progress,
    encode_status,
    encode_syncer,
)
from wan_diloco.wire.generated import admin_pb2, bulk_pb2, control_pb2
from wan_diloco.wire.limits import MESSAGE_BYTES_MAX
from wan_diloco.wire.sealing import SEAL_BYTES, seal

if TYPE_CHECKING:
    from google.protobuf.message import Message

BIG = 10_251_184_259


def report(loss: float | None, tokens: int = BIG) -> Report:
    return Report(local_step=LocalStep(1), tokens=tokens, step_time_s=0.5, loss=loss, learning_rate=1e-3, fragments=())


def test_counters_beyond_32_bits_survive() -> None:
    assert decode_learner(encode_learner(report(2.0))) == report(2.0)
    header = replace(contribution(2**40, 2**33), tokens_lo=BIG, tokens_hi=2 * BIG, unit_hi=2**62)
    assert decode_contribution(encode_contribution(header)) == header
    part = UpdatePart(update=2**40, segment=1, messages=2**40, window_bytes=2**50)
    item = DownloadItem(update=update((2**40, 2**33)), part=part)
    assert decode_download(encode_download(item)) == item
    assert decode_progress(encode_progress(2**50)) == 2**50


def test_no_counter_of_the_contract_has_less_than_64_bits() -> None:
    narrow = {
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_FLOAT,
    }
    found = [
        f"{message.name}.{field.name}"
        for file in (control_pb2, bulk_pb2, admin_pb2)
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.type in narrow
    ]
    assert found == []


def test_each_enum_has_an_unspecified_zero_named_after_it() -> None:
    enums = [
        *control_pb2.DESCRIPTOR.enum_types_by_name.values(),
        *bulk_pb2.DESCRIPTOR.enum_types_by_name.values(),
    ]
    assert {enum.values_by_number[0].name for enum in enums} == {
        "DECLINE_REASON_UNSPECIFIED",
        "MOMENTS_SOURCE_UNSPECIFIED",
        "REFUSAL_REASON_UNSPECIFIED",
        "SEGMENT_KIND_UNSPECIFIED",
        "STATE_REFUSAL_UNSPECIFIED",
    }


def test_a_negative_anchor_survives() -> None:
    message = Start(global_step=GlobalStep(900), anchor=-900)
    assert decode_syncer(encode_syncer(message)) == message


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_told_as_none(loss: float) -> None:
    assert decode_learner(encode_learner(report(loss))) == report(None)


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_learning_rate_that_is_no_number_is_left_out(rate: float) -> None:
    told = decode_learner(encode_learner(replace(report(2.0), learning_rate=rate)))
    assert told == replace(report(2.0), learning_rate=0.0)


def test_a_header_is_small() -> None:
    assert len(encode_contribution(contribution())) < 64


@pytest.mark.parametrize(
    "message", [Start(global_step=GlobalStep(-1), anchor=0), Stop(reason="\ud800", global_step=GlobalStep(1))]
)
def test_what_the_wire_cannot_say_is_our_fault(message: Start | Stop) -> None:
    with pytest.raises(LocalProtocolError):
        encode_syncer(message)


def test_a_message_beyond_the_limit_is_refused_by_both_ends() -> None:
    with pytest.raises(LocalProtocolError, match="4194304"):
        encode_learner(replace(hello(), layout=("x" * 10_000,) * 500))
    with pytest.raises(DecodeError, match="too_long"):
        decode_learner(bytes(MESSAGE_BYTES_MAX + 1))


def encoded(message: Message) -> bytes:
    return seal(message.SerializeToString())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (seal(b""), "unknown_message"),
        (seal(b"\xff\xff\xff"), "garbage"),
        (encoded(control_pb2.ControlRequest(report=control_pb2.Report(tokens=2**63))), "out_of_range"),
        (encoded(control_pb2.ControlRequest(report=control_pb2.Report(loss=math.nan))), "non_finite"),
        (encoded(control_pb2.ControlRequest(report=control_pb2.Report(step_time_s=-1))), "makes_no_sense"),
        (encoded(control_pb2.ControlRequest(hello=control_pb2.Hello())), "makes_no_sense"),
        (encoded(control_pb2.ControlRequest(declined=control_pb2.Declined())), "unknown_enum"),
        (encoded(control_pb2.ControlRequest(hello=control_pb2.Hello(run="x" * 300))), "too_long"),
        (
            encoded(control_pb2.ControlRequest(hello=control_pb2.Hello(settings=[control_pb2.Setting()] * 1025))),
            "too_many",
        ),
    ],
)
def test_what_a_learner_must_not_say_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_learner(data)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([], "makes_no_sense"),
        ([bulk_pb2.UpdateSegment()], "missing"),
        ([bulk_pb2.UpdateSegment(to_version=control_pb2.Version(count=1))], "unknown_enum"),
    ],
)
def test_what_an_update_must_not_be_is_refused_with_its_reason(
    segments: list[bulk_pb2.UpdateSegment], reason: str
) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_download(encoded(bulk_pb2.DownloadItem(update=bulk_pb2.UpdateHeader(segments=segments))))
    assert caught.value.reason == reason


def test_an_enum_member_of_a_later_protocol_is_refused() -> None:
    message = control_pb2.ControlResponse(refused=control_pb2.Refused(reason=99))  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match="unknown_enum"):
        decode_syncer(encoded(message))


def test_every_reason_survives() -> None:
    for reason in RefusalReason:
        assert decode_syncer(encode_syncer(Refused(reason=reason, detail="d"))) == Refused(reason=reason, detail="d")


def test_a_welcome_without_fragments_survives() -> None:
    welcome = Welcome(
        incarnation=Incarnation(1),
        term=Term(1),
        epoch=Epoch(0),
        global_step=GlobalStep(0),
        anchor=0,
        total_steps=GlobalStep(10),
        versions=(),
        data_shard=ShardId(0),
        next_unit=0,
        shards=(),
        started=False,
    )
    assert decode_syncer(encode_syncer(welcome)) == welcome


def test_a_peer_that_draws_no_term_id_says_an_empty_one() -> None:
    hello = control_pb2.ControlRequest(hello=control_pb2.Hello(run="r", learner_id="east", term=3))
    said = decode_learner(encoded(hello))
    assert isinstance(said, Hello)
    assert (said.term, said.term_id) == (3, "")
    welcome = decode_syncer(encoded(control_pb2.ControlResponse(welcome=control_pb2.Welcome(term=3))))
    assert isinstance(welcome, Welcome)
    assert (welcome.term, welcome.term_id) == (3, "")
    again = replace(said, term_id="0123456789abcdef")
    assert decode_learner(encode_learner(again)) == again
    back = replace(welcome, term_id="0123456789abcdef")
    assert decode_syncer(encode_syncer(back)) == back
    with pytest.raises(DecodeError, match="too_long"):
        decode_syncer(encoded(control_pb2.ControlResponse(welcome=control_pb2.Welcome(term_id="0" * 300))))


def test_a_status_is_an_object() -> None:
    assert decode_status(encode_status({"a": [1, None]})) == {"a": [1, None]}
    for text in ("[1]", "{", "[" * 100_000, "1" * 10_000):
        with pytest.raises(DecodeError):
            decode_status(encoded(admin_pb2.GetStatusResponse(status_json=text)))
    with pytest.raises(LocalProtocolError):
        encode_status({"a": object()})


def test_a_peer_older_than_checksums_hears_that_its_version_is_another() -> None:
    older = control_pb2.ControlRequest(hello=control_pb2.Hello(protocol_version=2, run="r", learner_id="east"))
    said = decode_learner(older.SerializeToString())
    assert isinstance(said, Hello)
    assert said.protocol_version == 2
    refusal = Refused(reason=RefusalReason.PROTOCOL_VERSION, detail="the syncer speaks protocol 2")
    assert decode_syncer(encode_syncer(refusal)[:-SEAL_BYTES]) == refusal


def test_nothing_else_is_believed_without_its_checksum() -> None:
    for data in (encode_learner(hello()), encode_learner(report(2.0))):
        with pytest.raises(DecodeError, match="bad_checksum"):
            decode_learner(data[:-SEAL_BYTES])
    other = Refused(reason=RefusalReason.OTHER_LAYOUT, detail="line 39")
    with pytest.raises(DecodeError, match="bad_checksum"):
        decode_syncer(encode_syncer(other)[:-SEAL_BYTES])


def test_every_message_that_is_sent_has_a_place_for_its_checksum() -> None:
    sent = [
        control_pb2.ControlRequest,
        control_pb2.ControlResponse,
        bulk_pb2.ContributionHeader,
        bulk_pb2.UploadAnswer,
        bulk_pb2.DownloadItem,
        bulk_pb2.DownloadProgress,
        bulk_pb2.StateCall,
        admin_pb2.GetStatusResponse,
    ]
    for kind in sent:
        message = kind.FromString(seal(b""))
        assert message.checksum == int.from_bytes(seal(b"")[1:], "little")
        assert message.SerializeToString() == seal(b""), "it is that field, and the contract knows it"
