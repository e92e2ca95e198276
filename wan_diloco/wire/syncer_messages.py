"""What syncers say, to protobuf and back."""

from __future__ import annotations

from typing import assert_never

from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionRefused,
    Pace,
    Pull,
    Refused,
    Start,
    Stop,
    SyncerMessage,
    Welcome,
)
from wan_diloco.protocol.rejoin_messages import Donate, DonationOver, NoDonor, StateOffered
from wan_diloco.units import Epoch, FragmentId, GlobalStep, Incarnation, LocalStep, RoundId, ShardId, Term
from wan_diloco.wire.generated import control_pb2 as pb
from wan_diloco.wire.learner_messages import REFUSALS
from wan_diloco.wire.limits import FRAGMENTS_MAX
from wan_diloco.wire.rejoin_messages import syncer_state_from, syncer_state_to
from wan_diloco.wire.scalars import bounded, count, name, real, text, version_from, version_to

__all__ = ["syncer_message_from", "syncer_message_to"]


def syncer_message_to(message: SyncerMessage) -> pb.ControlResponse:
    """Protobuf's form.

    Raises:
        ValueError, TypeError: A field doesn't fit its type on the wire.
    """
    match message:
        case Welcome():
            return pb.ControlResponse(welcome=_welcome_to(message))
        case Refused():
            reason = REFUSALS.number(message.reason)
            return pb.ControlResponse(
                refused=pb.Refused(reason=reason, detail=message.detail)  # type: ignore[arg-type]
            )
        case Start():
            return pb.ControlResponse(start=pb.Start(global_step=message.global_step, anchor=message.anchor))
        case Pace():
            return pb.ControlResponse(
                pace=pb.Pace(
                    global_step=message.global_step,
                    anchor=message.anchor,
                    echo=message.echo,
                    rate_bytes_per_s=message.rate_bytes_per_s,
                )
            )
        case Pull():
            return pb.ControlResponse(
                pull=pb.Pull(
                    round_id=message.round_id,
                    attempt=message.attempt,
                    fragment_id=message.fragment_id,
                    version=version_to(message.version),
                    window_s=message.window_s,
                    upload_s=message.upload_s,
                )
            )
        case Acknowledged():
            return pb.ControlResponse(
                acknowledged=pb.Acknowledged(
                    fragment_id=message.fragment_id, step_lo=message.step_lo, step_hi=message.step_hi
                )
            )
        case ContributionRefused():
            return pb.ControlResponse(
                contribution_refused=pb.ContributionRefused(
                    fragment_id=message.fragment_id,
                    step_lo=message.step_lo,
                    step_hi=message.step_hi,
                    reason=REFUSALS.number(message.reason),  # type: ignore[arg-type]
                    detail=message.detail,
                )
            )
        case Stop():
            return pb.ControlResponse(stop=pb.Stop(reason=message.reason, global_step=message.global_step))
        case Donate() | StateOffered() | NoDonor() | DonationOver():
            return syncer_state_to(message)
        case _:
            assert_never(message)


def syncer_message_from(envelope: pb.ControlResponse) -> SyncerMessage:
    """Our form.

    Raises:
        DecodeError: A field is missing or out of bounds.
        ValueError: The message makes no sense by itself.
    """
    match envelope.WhichOneof("message"):
        case "welcome":
            return _welcome_from(envelope.welcome)
        case "refused":
            return Refused(reason=REFUSALS.member(envelope.refused.reason), detail=text(envelope.refused.detail))
        case "start":
            return Start(global_step=GlobalStep(count(envelope.start.global_step)), anchor=envelope.start.anchor)
        case "pace":
            pace = envelope.pace
            return Pace(
                global_step=GlobalStep(count(pace.global_step)),
                anchor=pace.anchor,
                echo=count(pace.echo),
                rate_bytes_per_s=real(pace.rate_bytes_per_s),
            )
        case "pull":
            pull = envelope.pull
            return Pull(
                round_id=RoundId(count(pull.round_id)),
                attempt=count(pull.attempt),
                fragment_id=FragmentId(count(pull.fragment_id)),
                version=version_from(pull.version),
                window_s=real(pull.window_s),
                upload_s=real(pull.upload_s),
            )
        case "acknowledged":
            acknowledged = envelope.acknowledged
            return Acknowledged(
                fragment_id=FragmentId(count(acknowledged.fragment_id)),
                step_lo=LocalStep(count(acknowledged.step_lo)),
                step_hi=LocalStep(count(acknowledged.step_hi)),
            )
        case "contribution_refused":
            refused = envelope.contribution_refused
            return ContributionRefused(
                fragment_id=FragmentId(count(refused.fragment_id)),
                step_lo=LocalStep(count(refused.step_lo)),
                step_hi=LocalStep(count(refused.step_hi)),
                reason=REFUSALS.member(refused.reason),
                detail=text(refused.detail),
            )
        case "stop":
            stop = envelope.stop
            return Stop(reason=text(stop.reason), global_step=GlobalStep(count(stop.global_step)))
        case _:
            return syncer_state_from(envelope)


def _welcome_to(welcome: Welcome) -> pb.Welcome:
    return pb.Welcome(
        incarnation=welcome.incarnation,
        term=welcome.term,
        epoch=welcome.epoch,
        global_step=welcome.global_step,
        anchor=welcome.anchor,
        total_steps=welcome.total_steps,
        versions=[version_to(version) for version in welcome.versions],
        next_unit=welcome.next_unit,
        shards=welcome.shards,
        started=welcome.started,
        data_shard=welcome.data_shard,
        term_id=welcome.term_id,
    )


def _welcome_from(welcome: pb.Welcome) -> Welcome:
    return Welcome(
        incarnation=Incarnation(count(welcome.incarnation)),
        term=Term(count(welcome.term)),
        epoch=Epoch(count(welcome.epoch)),
        global_step=GlobalStep(count(welcome.global_step)),
        anchor=welcome.anchor,
        total_steps=GlobalStep(count(welcome.total_steps)),
        versions=tuple(version_from(version) for version in bounded(welcome.versions, FRAGMENTS_MAX)),
        next_unit=count(welcome.next_unit),
        shards=tuple(name(shard) for shard in bounded(welcome.shards, FRAGMENTS_MAX)),
        started=welcome.started,
        data_shard=ShardId(count(welcome.data_shard)),
        term_id=name(welcome.term_id),
    )
