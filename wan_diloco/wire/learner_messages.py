"""What learners say, to protobuf and back."""

from __future__ import annotations

import math
from typing import assert_never

from wan_diloco.protocol.messages import (
    Declined,
    DeclineReason,
    FragmentReport,
    Goodbye,
    Hello,
    LearnerMessage,
    RefusalReason,
    Report,
    ResyncRequest,
    UpdateReceived,
)
from wan_diloco.protocol.rejoin_messages import StateDeclined, StateReady, StateSettled, StateWanted
from wan_diloco.units import FragmentId, Incarnation, LearnerId, LocalStep, RoundId, Term
from wan_diloco.wire.generated import control_pb2 as pb
from wan_diloco.wire.limits import FRAGMENTS_MAX, LAYOUT_LINES_MAX, SETTINGS_MAX
from wan_diloco.wire.rejoin_messages import learner_state_from, learner_state_to
from wan_diloco.wire.scalars import EnumTable, bounded, count, name, real, text, version_from, version_to

__all__ = ["REFUSALS", "learner_message_from", "learner_message_to"]

REFUSALS = EnumTable(RefusalReason, "REFUSAL_REASON", dict(pb.RefusalReason.items()))
_DECLINES = EnumTable(DeclineReason, "DECLINE_REASON", dict(pb.DeclineReason.items()))


def learner_message_to(message: LearnerMessage) -> pb.ControlRequest:
    """Protobuf's form.

    Raises:
        ValueError, TypeError: A field doesn't fit its type on the wire.
    """
    match message:
        case Hello():
            return pb.ControlRequest(hello=_hello_to(message))
        case Report():
            return pb.ControlRequest(report=_report_to(message))
        case Declined():
            return pb.ControlRequest(
                declined=pb.Declined(
                    round_id=message.round_id,
                    attempt=message.attempt,
                    fragment_id=message.fragment_id,
                    reason=_DECLINES.number(message.reason),  # type: ignore[arg-type]
                )
            )
        case UpdateReceived():
            return pb.ControlRequest(
                update_received=pb.UpdateReceived(
                    fragment_id=message.fragment_id,
                    version=version_to(message.version),
                    resync=message.resync,
                )
            )
        case ResyncRequest():
            return pb.ControlRequest(
                resync_request=pb.ResyncRequest(
                    fragment_id=message.fragment_id,
                    reason=REFUSALS.number(message.reason),  # type: ignore[arg-type]
                )
            )
        case Goodbye():
            return pb.ControlRequest(goodbye=pb.Goodbye(reason=message.reason))
        case StateWanted() | StateReady() | StateDeclined() | StateSettled():
            return learner_state_to(message)
        case _:
            assert_never(message)


def learner_message_from(envelope: pb.ControlRequest) -> LearnerMessage:
    """Our form.

    Raises:
        DecodeError: A field is missing or out of bounds.
        ValueError: The message makes no sense by itself.
    """
    match envelope.WhichOneof("message"):
        case "hello":
            return _hello_from(envelope.hello)
        case "report":
            return _report_from(envelope.report)
        case "declined":
            declined = envelope.declined
            return Declined(
                round_id=RoundId(count(declined.round_id)),
                attempt=count(declined.attempt),
                fragment_id=FragmentId(count(declined.fragment_id)),
                reason=_DECLINES.member(declined.reason),
            )
        case "update_received":
            received = envelope.update_received
            return UpdateReceived(
                fragment_id=FragmentId(count(received.fragment_id)),
                version=version_from(received.version),
                resync=count(received.resync),
            )
        case "resync_request":
            request = envelope.resync_request
            return ResyncRequest(
                fragment_id=FragmentId(count(request.fragment_id)), reason=REFUSALS.member(request.reason)
            )
        case "goodbye":
            return Goodbye(reason=text(envelope.goodbye.reason))
        case _:
            return learner_state_from(envelope)


def _hello_to(hello: Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=hello.protocol_version,
        run=hello.run,
        learner_id=hello.learner_id,
        incarnation=hello.incarnation,
        layout=hello.layout,
        settings=[pb.Setting(key=key, value=value) for key, value in hello.settings],
        initial_digests=hello.initial_digests,
        local_step=hello.local_step,
        tokens=hello.tokens,
        life_id=hello.life_id,
        term=hello.term,
        term_id=hello.term_id,
    )


def _hello_from(hello: pb.Hello) -> Hello:
    return Hello(
        protocol_version=count(hello.protocol_version),
        run=name(hello.run),
        learner_id=LearnerId(name(hello.learner_id)),
        incarnation=Incarnation(count(hello.incarnation)),
        layout=tuple(text(line) for line in bounded(hello.layout, LAYOUT_LINES_MAX)),
        settings=tuple((name(each.key), text(each.value)) for each in bounded(hello.settings, SETTINGS_MAX)),
        initial_digests=tuple(name(digest) for digest in bounded(hello.initial_digests, FRAGMENTS_MAX)),
        local_step=LocalStep(count(hello.local_step)),
        tokens=count(hello.tokens),
        life_id=text(hello.life_id),
        term=Term(count(hello.term)),
        term_id=name(hello.term_id),
    )


def _report_to(report: Report) -> pb.Report:
    return pb.Report(
        local_step=report.local_step,
        tokens=report.tokens,
        step_time_s=report.step_time_s,
        loss=report.loss if report.loss is not None and math.isfinite(report.loss) else None,
        # Left out like a loss that is none: what isn't finite would end the session.
        learning_rate=report.learning_rate if math.isfinite(report.learning_rate) else 0.0,
        fragments=[
            pb.FragmentReport(
                fragment_id=fragment.fragment_id,
                version=version_to(fragment.version),
                pending=None if fragment.pending is None else version_to(fragment.pending),
                resync=fragment.resync,
                step_lo=fragment.step_lo,
                tokens_lo=fragment.tokens_lo,
            )
            for fragment in report.fragments
        ],
        echo=report.echo,
        rtt_s=report.rtt_s,
    )


def _report_from(report: pb.Report) -> Report:
    return Report(
        local_step=LocalStep(count(report.local_step)),
        tokens=count(report.tokens),
        step_time_s=real(report.step_time_s),
        loss=real(report.loss) if report.HasField("loss") else None,
        learning_rate=real(report.learning_rate),
        fragments=tuple(
            FragmentReport(
                fragment_id=FragmentId(count(fragment.fragment_id)),
                version=version_from(fragment.version),
                pending=version_from(fragment.pending) if fragment.HasField("pending") else None,
                resync=count(fragment.resync),
                step_lo=LocalStep(count(fragment.step_lo)),
                tokens_lo=count(fragment.tokens_lo),
            )
            for fragment in bounded(report.fragments, FRAGMENTS_MAX)
        ),
        echo=count(report.echo),
        rtt_s=real(report.rtt_s),
    )
