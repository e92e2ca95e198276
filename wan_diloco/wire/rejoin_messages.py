"""What is said about a joiner's state, to protobuf and back; part of `learner_messages` and `syncer_messages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from wan_diloco.errors import DecodeError
from wan_diloco.protocol.rejoin_messages import (
    Donate,
    DonationOver,
    LearnerStateMessage,
    MomentsSource,
    NoDonor,
    StateDeclined,
    StateManifest,
    StateOffered,
    StateReady,
    StateRefusal,
    StateSettled,
    StateWanted,
    SyncerClock,
    SyncerStateMessage,
)
from wan_diloco.units import Epoch, GlobalStep, LearnerId, Term, TransferId
from wan_diloco.wire.generated import bulk_pb2
from wan_diloco.wire.generated import control_pb2 as pb
from wan_diloco.wire.limits import FRAGMENTS_MAX
from wan_diloco.wire.scalars import EnumTable, bounded, count, name, real, text, version_from, version_to

__all__ = [
    "StateCall",
    "learner_state_from",
    "learner_state_to",
    "state_call_from",
    "state_call_to",
    "syncer_state_from",
    "syncer_state_to",
]

_SOURCES = EnumTable(MomentsSource, "MOMENTS_SOURCE", dict(pb.MomentsSource.items()))
_REFUSALS = EnumTable(StateRefusal, "STATE_REFUSAL", dict(pb.StateRefusal.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCall:
    """The first word on a bulk call that gives or takes a state.

    Attributes:
        start: Bytes of the row that the taker has.
        chunk_bytes: The longest piece that suits the taker's link; 0 for any.
        rtt_s: From the taker to the syncer and back; 0 if nobody knows.
    """

    transfer: TransferId
    start: int = 0
    chunk_bytes: int = 0
    rtt_s: float = 0.0


def state_call_to(call: StateCall) -> bulk_pb2.StateCall:
    """Protobuf's form.

    Raises:
        ValueError, TypeError: A field doesn't fit its type on the wire.
    """
    return bulk_pb2.StateCall(transfer=call.transfer, start=call.start, chunk_bytes=call.chunk_bytes, rtt_s=call.rtt_s)


def state_call_from(call: bulk_pb2.StateCall) -> StateCall:
    """Our form.

    Raises:
        DecodeError: A field is out of bounds.
    """
    return StateCall(
        transfer=TransferId(count(call.transfer)),
        start=count(call.start),
        chunk_bytes=count(call.chunk_bytes),
        rtt_s=max(0.0, real(call.rtt_s)),
    )


def learner_state_to(message: LearnerStateMessage) -> pb.ControlRequest:
    """Protobuf's form.

    Raises:
        ValueError, TypeError: A field doesn't fit its type on the wire.
    """
    match message:
        case StateWanted():
            return pb.ControlRequest(state_wanted=pb.StateWanted(failed=message.failed, digest=message.digest))
        case StateReady():
            ready = pb.StateReady(transfer=message.transfer, manifest=_manifest_to(message.manifest))
            return pb.ControlRequest(state_ready=ready)
        case StateDeclined():
            declined = pb.StateDeclined(
                transfer=message.transfer,
                reason=_REFUSALS.number(message.reason),  # type: ignore[arg-type]
            )
            return pb.ControlRequest(state_declined=declined)
        case StateSettled():
            settled = pb.StateSettled(
                source=_SOURCES.number(message.source),  # type: ignore[arg-type]
                donor=message.donor,
                global_step=message.global_step,
            )
            return pb.ControlRequest(state_settled=settled)
        case _:
            assert_never(message)


def learner_state_from(envelope: pb.ControlRequest) -> LearnerStateMessage:
    """Our form.

    Raises:
        DecodeError: There is none, or a field is missing or out of bounds.
        ValueError: The message makes no sense by itself.
    """
    match envelope.WhichOneof("message"):
        case "state_wanted":
            wanted = envelope.state_wanted
            return StateWanted(failed=TransferId(count(wanted.failed)), digest=name(wanted.digest))
        case "state_ready":
            ready = envelope.state_ready
            return StateReady(transfer=TransferId(count(ready.transfer)), manifest=_manifest_from(ready.manifest))
        case "state_declined":
            declined = envelope.state_declined
            return StateDeclined(
                transfer=TransferId(count(declined.transfer)), reason=_REFUSALS.member(declined.reason)
            )
        case "state_settled":
            settled = envelope.state_settled
            return StateSettled(
                source=_SOURCES.member(settled.source),
                donor=LearnerId(name(settled.donor)),
                global_step=GlobalStep(count(settled.global_step)),
            )
        case _:
            raise DecodeError("unknown_message", "an envelope without a message that is known here")


def syncer_state_to(message: SyncerStateMessage) -> pb.ControlResponse:
    """Protobuf's form.

    Raises:
        ValueError, TypeError: A field doesn't fit its type on the wire.
    """
    match message:
        case Donate():
            clock = pb.SyncerClock(
                term=message.clock.term, epoch=message.clock.epoch, global_step=message.clock.global_step
            )
            return pb.ControlResponse(donate=pb.Donate(transfer=message.transfer, joiner=message.joiner, clock=clock))
        case StateOffered():
            offered = pb.StateOffered(
                transfer=message.transfer, donor=message.donor, manifest=_manifest_to(message.manifest)
            )
            return pb.ControlResponse(state_offered=offered)
        case NoDonor():
            return pb.ControlResponse(no_donor=pb.NoDonor(reason=message.reason))
        case DonationOver():
            return pb.ControlResponse(donation_over=pb.DonationOver(transfer=message.transfer))
        case _:
            assert_never(message)


def syncer_state_from(envelope: pb.ControlResponse) -> SyncerStateMessage:
    """Our form.

    Raises:
        DecodeError: There is none, or a field is missing or out of bounds.
        ValueError: The message makes no sense by itself.
    """
    match envelope.WhichOneof("message"):
        case "donate":
            donate = envelope.donate
            return Donate(
                transfer=TransferId(count(donate.transfer)),
                joiner=LearnerId(name(donate.joiner)),
                clock=SyncerClock(
                    term=Term(count(donate.clock.term)),
                    epoch=Epoch(count(donate.clock.epoch)),
                    global_step=GlobalStep(count(donate.clock.global_step)),
                ),
            )
        case "state_offered":
            offered = envelope.state_offered
            return StateOffered(
                transfer=TransferId(count(offered.transfer)),
                donor=LearnerId(name(offered.donor)),
                manifest=_manifest_from(offered.manifest),
            )
        case "no_donor":
            return NoDonor(reason=text(envelope.no_donor.reason))
        case "donation_over":
            return DonationOver(transfer=TransferId(count(envelope.donation_over.transfer)))
        case _:
            raise DecodeError("unknown_message", "an envelope without a message that is known here")


def _manifest_to(manifest: StateManifest) -> pb.StateManifest:
    return pb.StateManifest(
        global_step=manifest.global_step,
        versions=[version_to(version) for version in manifest.versions],
        layout=manifest.layout,
        size_bytes=manifest.size_bytes,
        digest=manifest.digest,
    )


def _manifest_from(manifest: pb.StateManifest) -> StateManifest:
    return StateManifest(
        global_step=GlobalStep(count(manifest.global_step)),
        versions=tuple(version_from(version) for version in bounded(manifest.versions, FRAGMENTS_MAX)),
        layout=name(manifest.layout),
        size_bytes=count(manifest.size_bytes),
        digest=name(manifest.digest),
    )
