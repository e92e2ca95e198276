"""Headers of bulk transfers, to protobuf and back."""

from __future__ import annotations

from wan_diloco.errors import DecodeError
from wan_diloco.protocol.messages import (
    ContributionHeader,
    ContributionKey,
    MergedNote,
    SegmentKind,
    UpdateHeader,
    UpdateSegment,
)
from wan_diloco.units import FragmentId, Incarnation, LearnerId, LocalStep, RoundId
from wan_diloco.wire.generated import bulk_pb2 as pb
from wan_diloco.wire.limits import MERGED_MAX, SEGMENTS_MAX
from wan_diloco.wire.scalars import EnumTable, bounded, count, name, version_from, version_to

__all__ = ["contribution_from", "contribution_to", "update_from", "update_to"]

_KINDS = EnumTable(SegmentKind, "SEGMENT_KIND", dict(pb.SegmentKind.items()))


def contribution_to(header: ContributionHeader) -> pb.ContributionHeader:
    """Protobuf's form.

    Raises:
        ValueError, TypeError: A field doesn't fit its type on the wire.
    """
    return pb.ContributionHeader(
        key=pb.ContributionKey(
            learner_id=header.key.learner_id,
            incarnation=header.key.incarnation,
            fragment_id=header.key.fragment_id,
            step_lo=header.key.step_lo,
        ),
        round_id=header.round_id,
        attempt=header.attempt,
        base=version_to(header.base),
        steps=header.steps,
        tokens_lo=header.tokens_lo,
        tokens=header.tokens,
        unit_hi=header.unit_hi,
        codec=header.codec,
        codes_bytes=header.codes_bytes,
        scales_bytes=header.scales_bytes,
    )


def contribution_from(header: pb.ContributionHeader) -> ContributionHeader:
    """Our form.

    Raises:
        DecodeError: A field is out of bounds.
        ValueError: The header makes no sense by itself.
    """
    key = header.key
    return ContributionHeader(
        key=ContributionKey(
            learner_id=LearnerId(name(key.learner_id)),
            incarnation=Incarnation(count(key.incarnation)),
            fragment_id=FragmentId(count(key.fragment_id)),
            step_lo=LocalStep(count(key.step_lo)),
        ),
        round_id=RoundId(count(header.round_id)),
        attempt=count(header.attempt),
        base=version_from(header.base),
        step_hi=LocalStep(count(key.step_lo + header.steps)),
        tokens_lo=count(header.tokens_lo),
        tokens_hi=count(header.tokens_lo + header.tokens),
        unit_hi=count(header.unit_hi),
        codec=name(header.codec),
        codes_bytes=count(header.codes_bytes),
        scales_bytes=count(header.scales_bytes),
    )


def update_to(header: UpdateHeader) -> pb.UpdateHeader:
    """Protobuf's form.

    Raises:
        ValueError, TypeError: A field doesn't fit its type on the wire.
    """
    return pb.UpdateHeader(
        fragment_id=header.fragment_id,
        resync=header.resync,
        segments=[_segment_to(segment) for segment in header.segments],
    )


def update_from(header: pb.UpdateHeader) -> UpdateHeader:
    """Our form.

    Raises:
        DecodeError: A field is out of bounds.
        ValueError: The header makes no sense by itself.
    """
    return UpdateHeader(
        fragment_id=FragmentId(count(header.fragment_id)),
        resync=count(header.resync),
        segments=tuple(_segment_from(segment) for segment in bounded(header.segments, SEGMENTS_MAX)),
    )


def _segment_to(segment: UpdateSegment) -> pb.UpdateSegment:
    return pb.UpdateSegment(
        kind=_KINDS.number(segment.kind),  # type: ignore[arg-type]
        from_version=version_to(segment.from_version),
        to_version=version_to(segment.to_version),
        digest=segment.digest,
        codec=segment.codec,
        codes_bytes=segment.codes_bytes,
        scales_bytes=segment.scales_bytes,
        merged=[
            pb.MergedNote(
                learner_id=note.learner_id,
                incarnation=note.incarnation,
                step_lo=note.step_lo,
                step_hi=note.step_hi,
            )
            for note in segment.merged
        ],
    )


def _segment_from(segment: pb.UpdateSegment) -> UpdateSegment:
    if not segment.HasField("to_version"):
        raise DecodeError("missing", "a segment that leads nowhere")
    return UpdateSegment(
        kind=_KINDS.member(segment.kind),
        from_version=version_from(segment.from_version),
        to_version=version_from(segment.to_version),
        digest=name(segment.digest),
        codec=name(segment.codec),
        codes_bytes=count(segment.codes_bytes),
        scales_bytes=count(segment.scales_bytes),
        merged=tuple(
            MergedNote(
                learner_id=LearnerId(name(note.learner_id)),
                incarnation=Incarnation(count(note.incarnation)),
                step_lo=LocalStep(count(note.step_lo)),
                step_hi=LocalStep(count(note.step_hi)),
            )
            for note in bounded(segment.merged, MERGED_MAX)
        ),
    )
