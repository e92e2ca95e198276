"""The syncer's machine, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, answer, messages, only, pulled, records
from tests.support.protocol import EAST, WEST, fresh_state, report, syncer_settings, version
from wan_diloco.errors import LocalProtocolError
from wan_diloco.protocol.events import (
    AcceptUpload,
    CloseSession,
    MergeFailed,
    Record,
    RefuseUpload,
    SendToLearner,
    SendUpdate,
    SessionId,
    ShowReason,
    StartMerge,
    TimerFired,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    ContributionRefused,
    Declined,
    DeclineReason,
    Goodbye,
    Pull,
    RefusalReason,
    Start,
    Welcome,
)
from wan_diloco.protocol.status import participation, status_of
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.tape import ContributionDiscarded, RoundClosed, RunStarted
from wan_diloco.units import LocalStep, ShardId

# ---- the start -----------------------------------------------------------------------------------


def test_an_event_before_the_start_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="not started"):
        SyncerMachine(syncer_settings(), fresh_state()).handle(TimerFired(), 0.0)


def test_the_first_step_waits_for_everybody() -> None:
    desk = Desk()
    effects = desk.joins(E, EAST)
    assert ShowReason(topic="start", text="waiting for west before the first step") in effects
    assert not [message for message in messages(effects) if isinstance(message, Start)]
    effects = desk.joins(W, WEST)
    assert only(RunStarted, records(effects)) == RunStarted(present=(EAST, WEST), absent=(), total_steps=100)
    assert len([message for message in messages(effects) if isinstance(message, Start)]) == 2


def test_the_first_step_waits_no_longer_than_the_timeout() -> None:
    desk = Desk()
    assert desk.machine.deadline_s() is None, "without anybody there is nothing to start"
    desk.joins(E, EAST)
    for _ in range(7):
        desk.says(E, report(0), after_s=8.0)
    assert desk.machine.deadline_s() == 60.0
    effects = desk.tell(TimerFired(), after_s=4.0)
    assert only(RunStarted, records(effects)) == RunStarted(present=(EAST,), absent=(WEST,), total_steps=100)


def test_who_slept_through_the_start_hears_of_it() -> None:
    desk = Desk()
    desk.joins(E, EAST)
    desk.now_s = 20.0  # its lease is over, its session stands
    effects = desk.joins(W, WEST)
    assert not [member for member in desk.machine.context.membership.live() if member.learner_id == EAST]
    effects += desk.says(E, report(0), after_s=1.0)
    assert [message for message in messages(effects, E) if isinstance(message, Start)]


def test_a_restart_does_not_wait_again(desk: Desk) -> None:
    later = Desk(state=desk.machine.state)
    welcome = only(Welcome, messages(later.joins(E, EAST, incarnation=1)))
    assert isinstance(welcome, Welcome)
    assert (welcome.started, welcome.term, welcome.incarnation) == (True, 2, 1)


# ---- contributions and rounds --------------------------------------------------------------------


def test_a_round_is_asked_for_journalled_acknowledged_closed_merged_and_sent(desk: Desk) -> None:
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    effects = desk.stores(W, answer(pull, WEST))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Record) < kinds.index(SendToLearner), "durable before it is acknowledged"
    assert only(Acknowledged, messages(effects)) == Acknowledged(
        fragment_id=pull.fragment_id, step_lo=LocalStep(0), step_hi=LocalStep(2)
    )
    closed = only(RoundClosed, records(effects))
    assert isinstance(closed, RoundClosed)
    assert [entry.header.key.learner_id for entry in closed.entries] == [EAST, WEST]
    assert isinstance(effects[-1], StartMerge)
    sent = [effect for effect in desk.merges(pull.round_id) if isinstance(effect, SendUpdate)]
    assert {effect.session for effect in sent} == {E, W}


def test_a_merge_that_nobody_began_is_our_mistake(desk: Desk) -> None:
    with pytest.raises(LocalProtocolError, match="not being merged"):
        desk.merges(77)


def test_a_failed_merge_is_tried_again_with_the_same_entries(desk: Desk) -> None:
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    first = only(StartMerge, desk.stores(W, answer(pull, WEST)))
    effects = desk.tell(MergeFailed(round_id=pull.round_id, reason="the disk is full"))
    assert [effect.text for effect in effects if isinstance(effect, ShowReason)][-1].endswith("the disk is full")
    deadline_s = desk.machine.deadline_s()
    assert deadline_s == desk.now_s + 1.0
    assert only(StartMerge, desk.tell(TimerFired(), after_s=1.0)) == first
    assert ShowReason(topic="storage", text="") in desk.merges(pull.round_id)


def test_a_contribution_in_anothers_name_closes_the_session(desk: Desk) -> None:
    header = answer(pulled(desk), WEST)
    effects = desk.tell(UploadOffered(session=E, header=header))
    assert RefuseUpload(session=E, header=header) in effects
    assert CloseSession(session=E, reason="a contribution in another's name") in effects


def test_a_contribution_from_nobody_is_refused(desk: Desk) -> None:
    header = answer(pulled(desk))
    assert RefuseUpload(session=SessionId(9), header=header) in desk.tell(
        UploadOffered(session=SessionId(9), header=header)
    )


def test_a_refused_contribution_is_told_why_and_its_work_is_lost(desk: Desk) -> None:
    header = replace(answer(pulled(desk)), codes_bytes=1)
    effects = desk.stores(E, header)
    assert RefuseUpload(session=E, header=header) in effects
    refused = only(ContributionRefused, messages(effects, E))
    assert isinstance(refused, ContributionRefused)
    assert refused.reason is RefusalReason.WRONG_LENGTH
    # Its base is right, so nothing is sent.
    assert not [effect for effect in effects if isinstance(effect, SendUpdate)]


def test_a_foreign_epoch_is_refused_and_resynced(desk: Desk) -> None:
    header = replace(answer(pulled(desk)), base=version(0, epoch=1))
    effects = desk.stores(E, header)
    refused = only(ContributionRefused, messages(effects, E))
    assert isinstance(refused, ContributionRefused)
    assert refused.reason is RefusalReason.FOREIGN_EPOCH
    update = only(SendUpdate, effects)
    assert isinstance(update, SendUpdate)
    assert update.header.resync == 1


def test_bytes_that_are_not_finite_are_refused_and_resynced(desk: Desk) -> None:
    header = answer(pulled(desk))
    desk.tell(UploadOffered(session=E, header=header))
    failed = UploadFailed(session=E, header=header, reason=RefusalReason.NON_FINITE, detail="NaN at 7")
    update = only(SendUpdate, desk.tell(failed))
    assert isinstance(update, SendUpdate)
    assert (update.header.resync, update.header.to_version) == (1, version(0))


def test_a_bad_checksum_is_refused_and_not_resynced(desk: Desk) -> None:
    header = answer(pulled(desk))
    failed = UploadFailed(session=E, header=header, reason=RefusalReason.BAD_CHECKSUM, detail="chunk 3")
    assert not [effect for effect in desk.tell(failed) if isinstance(effect, SendUpdate)]


def test_a_contribution_that_became_late_under_way_is_refused_when_it_is_there(desk: Desk) -> None:
    pull = pulled(desk)
    small, large = answer(pull), answer(pull, step_hi=3)
    desk.tell(UploadOffered(session=E, header=large))
    desk.stores(E, small)
    desk.stores(W, answer(pull, WEST))
    effects = desk.tell(UploadStored(session=E, header=large, ref="r2", payload_bytes=1))
    refused = only(ContributionRefused, messages(effects, E))
    assert isinstance(refused, ContributionRefused)
    assert refused.reason is RefusalReason.LATE


def test_a_repeated_contribution_is_acknowledged_and_counted_once(desk: Desk) -> None:
    pull = pulled(desk)
    header = answer(pull)
    desk.stores(E, header)
    before = desk.machine.state.units.copy()
    effects = desk.stores(E, header)
    assert RefuseUpload(session=E, header=header) in effects
    assert only(Acknowledged, messages(effects, E))
    assert not records(effects)
    late = desk.tell(UploadStored(session=E, header=header, ref="other", payload_bytes=9))
    assert only(Acknowledged, messages(late, E))
    desk.stores(W, answer(pull, WEST))
    assert only(Acknowledged, messages(desk.stores(E, header), E)), "also when it is merged"
    desk.merges(pull.round_id)
    assert desk.machine.state.units == {**before, ShardId(1): 2}
    assert desk.machine.state.totals.merged_parameters == 2000


def test_a_repeated_contribution_answers_a_newer_attempt() -> None:
    desk = Desk(syncer_settings(quorum=2))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    assert desk.machine.deadline_s() == 4.0
    effects = desk.tell(TimerFired(), after_s=4.0)
    again = next(message for message in messages(effects, E) if isinstance(message, Pull))
    assert (again.round_id, again.attempt) == (pull.round_id, 2)
    shown = ShowReason(topic="fragment:1", text=f"round {pull.round_id}: 1 of 2 learners, lacking west")
    assert shown in effects
    desk.stores(W, answer(again, WEST))
    effects = desk.stores(E, answer(again))
    assert only(RoundClosed, records(effects)), "its bytes are there already, and are not sent again"


def test_a_base_too_old_is_discarded_when_a_round_closes(desk: Desk) -> None:
    pull = pulled(desk)
    header = answer(pull)
    desk.stores(E, header)
    desk.machine.state.versions[pull.fragment_id] = version(2)
    west = replace(answer(pull, WEST), base=version(2))
    effects = desk.stores(W, west)
    for _ in range(3):
        effects += desk.says(W, report(2), after_s=4.0)
    discarded = only(ContributionDiscarded, records(effects))
    assert discarded == ContributionDiscarded(header=header, reason=RefusalReason.STALE_BASE)
    assert status_of(desk.machine, desk.now_s).discarded_tokens["stale_base"] > 0


def test_everybody_declining_leaves_a_round_open_until_it_is_asked_again(desk: Desk) -> None:
    pull = pulled(desk)
    for session in (E, W):
        desk.says(
            session,
            Declined(
                round_id=pull.round_id,
                attempt=1,
                fragment_id=pull.fragment_id,
                reason=DeclineReason.ZERO_STEPS,
            ),
        )
    status = status_of(desk.machine, desk.now_s)
    assert status.rounds_open[0].reason == "0 of 1 learners, waiting for nobody"
    assert desk.machine.deadline_s() == 4.0, "who lacks only work is asked again after one window"
    effects = desk.tell(TimerFired(), after_s=4.0)
    assert [message.attempt for message in messages(effects, E) if isinstance(message, Pull)] == [2]


def asked_twice() -> tuple[Desk, Pull]:
    """A round in its second attempt, whose window is longer than patience with who lacks work."""
    desk = Desk(syncer_settings(quorum=2))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pulled(desk)
    again = only(Pull, messages(desk.tell(TimerFired(), after_s=4.0), E))
    assert isinstance(again, Pull)
    assert (again.attempt, gives_up_s(desk, again)) == (2, 12.0)
    return desk, again


def gives_up_s(desk: Desk, pull: Pull) -> float:
    return desk.machine.conductor.open[pull.fragment_id].gives_up_s


def refused(desk: Desk, header: ContributionHeader) -> None:
    assert AcceptUpload(session=E, header=header) in desk.tell(UploadOffered(session=E, header=header))
    desk.tell(UploadFailed(session=E, header=header, reason=RefusalReason.NON_FINITE, detail="nan"))


def test_whose_answer_was_refused_is_asked_again_as_soon_as_who_lacks_work() -> None:
    desk, pull = asked_twice()
    desk.stores(W, answer(pull, WEST))
    assert gives_up_s(desk, pull) == 12.0, "east is awaited"
    refused(desk, answer(pull))
    assert gives_up_s(desk, pull) == 8.0
    assert only(Pull, messages(desk.tell(TimerFired(), after_s=4.0), E)).attempt == 3  # type: ignore[attr-defined]


def test_a_refused_answer_to_an_earlier_question_says_nothing_of_the_next() -> None:
    desk, pull = asked_twice()
    refused(desk, replace(answer(pull), attempt=1))
    assert gives_up_s(desk, pull) == 12.0
    desk.stores(W, answer(pull, WEST))
    assert only(RoundClosed, records(desk.stores(E, answer(pull))))


@pytest.mark.parametrize("has_answered", [False, True])
def test_who_was_busy_holds_a_question_up_until_it_has_answered(*, has_answered: bool) -> None:
    desk, pull = asked_twice()
    for session in (E, W):
        reason = DeclineReason.BUSY if session == W else DeclineReason.ZERO_STEPS
        desk.says(
            session,
            Declined(round_id=pull.round_id, attempt=pull.attempt, fragment_id=pull.fragment_id, reason=reason),
        )
    if has_answered:
        desk.stores(W, answer(pull, WEST))
    effects = [effect for session in (E, W) for effect in desk.says(session, report(6))]
    asked = [message for message in messages(effects, E) if isinstance(message, Pull)]
    again = [message.attempt for message in asked if message.fragment_id == pull.fragment_id]
    assert again == [3] * has_answered, "the fragment is due again at step 6"


def test_a_decline_of_an_older_attempt_is_ignored(desk: Desk) -> None:
    pull = pulled(desk)
    stale = Declined(round_id=pull.round_id, attempt=0, fragment_id=pull.fragment_id, reason=DeclineReason.BUSY)
    desk.says(E, stale)
    assert not desk.machine.conductor.open[pull.fragment_id].declined


# ---- status and totals ---------------------------------------------------------------------------


def test_totals_are_exact_beyond_32_bits_and_do_not_fall_across_a_restart() -> None:
    each = 10_251_184_259 // 3
    settings = syncer_settings()
    settings = replace(settings, intake=replace(settings.intake, batch_tokens=2 * each))
    desk = Desk(settings)
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk, tokens={E: 2 * each, W: 10_251_184_259 - 2 * each})
    rejected = replace(answer(pull), tokens_hi=10**12)
    header = replace(answer(pull), tokens_hi=2 * each)
    west = replace(answer(pull, WEST), tokens_hi=10_251_184_259 - 2 * each)
    desk.stores(E, rejected)
    desk.stores(E, header)
    desk.stores(E, header)
    desk.stores(W, west)
    desk.merges(pull.round_id)
    before = status_of(desk.machine, desk.now_s)
    merged = desk.machine.state.ledger.merged[pull.fragment_id]
    assert merged.tokens == 10_251_184_259, "neither what was rejected nor what came twice is in it"
    after = status_of(Desk(settings, desk.machine.state).machine, 0.0)
    for name in ("rounds", "merged_tokens", "trained_tokens", "upload_bytes", "update_bytes", "merged_parameters"):
        assert getattr(after, name) >= getattr(before, name) > 0, name
    assert before.balance == after.balance == 0
    assert before.rejected == after.rejected == {"too_many_tokens": 1}


def test_a_loss_is_each_learners_own_whoever_else_is_there(desk: Desk) -> None:
    desk.says(E, report(1, loss=2.0))
    desk.says(W, report(1, loss=2.0))
    assert [learner.loss for learner in status_of(desk.machine, 0.0).learners] == [2.0, 2.0]
    desk.says(W, Goodbye(reason="enough"))
    losses = [learner.loss for learner in status_of(desk.machine, 0.0).learners if learner.live]
    assert losses == [2.0]


def test_participation_is_a_ratio_and_nothing_before_the_first_round() -> None:
    assert participation(0, 0) == 0
    assert participation(3, 4) == 0.75
