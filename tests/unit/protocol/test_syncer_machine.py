"""The syncer's machine, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, answer, messages, only, pulled, records
from tests.support.protocol import EAST, WEST, contribution, fresh_state, hello, report, syncer_settings, version
from wan_diloco.errors import LocalProtocolError
from wan_diloco.protocol.events import (
    CloseSession,
    EndRun,
    LearnerDisconnected,
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
    ContributionRefused,
    Declined,
    DeclineReason,
    Goodbye,
    Pace,
    Pull,
    RefusalReason,
    Refused,
    ResyncRequest,
    Start,
    Stop,
    UpdateReceived,
    Welcome,
)
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.status import participation, status_of
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.tape import ContributionDiscarded, RoundClosed, RunEnded, RunStarted
from wan_diloco.units import Epoch, FragmentId, LearnerId, LocalStep, RoundId, ShardId


@pytest.fixture
def desk() -> Desk:
    """Two learners, started, no step taken yet."""
    desk = Desk()
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    return desk


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


# ---- sessions ------------------------------------------------------------------------------------


def test_a_refused_learner_is_told_why_and_counted(desk: Desk) -> None:
    effects = desk.says(SessionId(9), hello(LearnerId("south")))
    refused = only(Refused, messages(effects))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.UNKNOWN_LEARNER
    assert only(CloseSession, effects) == CloseSession(session=SessionId(9), reason=f"refused: {refused.detail}")
    assert status_of(desk.machine, 0.0).rejected == {"unknown_learner": 1}


def test_the_higher_incarnation_stands_and_the_lower_is_refused(desk: Desk) -> None:
    twin = SessionId(3)
    effects = desk.joins(twin, EAST)
    assert CloseSession(session=E, reason="a newer session of the same learner") in effects
    desk.tell(LearnerDisconnected(session=E, reason="closed"))
    refused = only(Refused, messages(desk.says(SessionId(4), hello(EAST, incarnation=1))))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.FENCED
    assert desk.machine.context.membership.reachable(EAST, desk.machine.state.incarnations[EAST])


def test_words_without_a_standing_session_close_it(desk: Desk) -> None:
    assert desk.says(SessionId(9), report(1)) == [CloseSession(session=SessionId(9), reason="no standing session")]


def test_a_second_hello_closes_the_session(desk: Desk) -> None:
    assert CloseSession(session=E, reason="a second Hello") in desk.says(E, hello(EAST))


def test_a_hello_that_comes_again_after_its_session_was_ended_begins_no_life(desk: Desk) -> None:
    desk.joins(SessionId(3), EAST)
    lives = dict(desk.machine.state.incarnations)
    assert desk.says(E, hello(EAST)) == []
    assert desk.machine.state.incarnations == lives
    desk.tell(LearnerDisconnected(session=E, reason="closed"))
    assert not desk.machine.context.closing
    assert desk.machine.context.membership.reachable(EAST, lives[EAST])


def test_who_asks_for_a_life_again_gets_the_one_it_was_given(desk: Desk) -> None:
    """The Hello of a connection that was given up may come after that of the next, when both were held up."""
    first = only(Welcome, messages(desk.says(SessionId(3), hello(EAST, life_id="a process"))))
    again = only(Welcome, messages(desk.says(SessionId(4), hello(EAST, life_id="a process"))))
    assert isinstance(first, Welcome)
    assert isinstance(again, Welcome)
    assert first.incarnation == again.incarnation
    known = only(Welcome, messages(desk.says(SessionId(5), hello(EAST, incarnation=first.incarnation))))
    assert isinstance(known, Welcome), "the life that somebody lives isn't fenced out"


@pytest.mark.parametrize("life_id", ["", "another process"])
def test_another_process_gets_another_life(desk: Desk, life_id: str) -> None:
    desk.says(SessionId(3), hello(EAST, life_id="a process"))
    before = desk.machine.state.incarnations[EAST]
    desk.says(SessionId(4), hello(EAST, life_id=life_id))
    desk.says(SessionId(5), hello(EAST, life_id="a process"))
    assert desk.machine.state.incarnations[EAST] == before + 2


def test_a_syncer_that_was_restarted_knows_who_lives_which_life(desk: Desk) -> None:
    desk.says(SessionId(3), hello(EAST, life_id="a process"))
    state = state_from_json(state_to_json(desk.machine.state))
    assert state.life_ids[EAST] == "a process"


def test_goodbye_ends_membership_at_once(desk: Desk) -> None:
    assert CloseSession(session=E, reason="goodbye") in desk.says(E, Goodbye(reason="enough"))
    assert [member.learner_id for member in desk.machine.context.membership.live()] == [WEST]


def test_what_is_offered_after_goodbye_does_not_bring_a_learner_back(desk: Desk) -> None:
    desk.says(E, Goodbye(reason="enough"))
    header = contribution(EAST)
    assert desk.tell(UploadOffered(session=E, header=header)) == [RefuseUpload(session=E, header=header)]
    assert [member.learner_id for member in desk.machine.context.membership.live()] == [WEST]
    desk.tell(LearnerDisconnected(session=E, reason="closed"))
    assert not desk.machine.context.closing


def test_silence_is_shown_and_forgiven(desk: Desk) -> None:
    desk.says(W, report(0), after_s=9.0)
    gone = ShowReason(topic="member:east", text="nothing was heard of east for a whole lease: rounds go on without it")
    assert gone in desk.tell(TimerFired(), after_s=1.0)
    assert ShowReason(topic="member:east", text="") in desk.says(E, report(0), after_s=1.0)


def test_news_from_before_a_reconnect_is_no_news(desk: Desk) -> None:
    desk.says(E, report(3))
    desk.says(E, report(1))
    assert desk.machine.context.membership.members[EAST].local_step == 3


def test_the_pace_is_told_when_it_changes(desk: Desk) -> None:
    assert [message for message in messages(desk.says(E, report(1))) if isinstance(message, Pace)]
    assert not [message for message in messages(desk.says(W, report(1))) if isinstance(message, Pace)]


def test_fragments_that_do_not_exist_are_ignored(desk: Desk) -> None:
    nowhere = FragmentId(7)
    desk.says(E, UpdateReceived(fragment_id=nowhere, version=version(0), resync=0))
    desk.says(E, ResyncRequest(fragment_id=nowhere, reason=RefusalReason.DIGEST))
    desk.says(E, Declined(round_id=RoundId(0), attempt=1, fragment_id=nowhere, reason=DeclineReason.BUSY))
    strange = report(1, version(0), version(0), version(0))
    desk.says(E, strange)
    assert desk.machine.state.ledger.balance(FragmentId(0)).steps == 0
    assert status_of(desk.machine, 0.0).rejected == {}


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


# ---- the end -------------------------------------------------------------------------------------


def test_the_run_ends_when_the_last_round_is_done_and_everybody_hears_of_it() -> None:
    desk = Desk(syncer_settings(total_steps=2))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    desk.stores(E, answer(pull))
    desk.stores(W, answer(pull, WEST))
    desk.now_s += 11.0
    desk.says(E, report(3))  # west's lease is over now, its session isn't
    effects = desk.merges(pull.round_id)
    assert only(RunEnded, records(effects))
    assert only(EndRun, effects)
    assert [message for message in messages(effects, E) if isinstance(message, Stop)]
    assert [message for message in messages(effects, W) if isinstance(message, Stop)]
    assert desk.machine.deadline_s() is None
    late = messages(desk.says(SessionId(8), hello(WEST, incarnation=1)))
    assert isinstance(only(Stop, late), Stop)
    again = Desk(syncer_settings(total_steps=2), desk.machine.state)
    assert only(EndRun, again.effects), "a restart of an ended run ends at once"
    assert not [record for record in records(again.effects) if isinstance(record, RunEnded)]


def test_the_step_ends_at_the_last_and_what_the_last_rounds_wait_for_is_shown() -> None:
    desk = Desk(syncer_settings(total_steps=2))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    effects = desk.says(E, report(5))
    shown = ShowReason(topic="end", text="all 2 steps are done: learners hold while the last rounds finish")
    assert shown in effects
    assert status_of(desk.machine, desk.now_s).global_step == 2
    assert only(Pace, messages(effects, E)).global_step == 2
    pull = only(Pull, messages(effects, E))
    desk.stores(E, answer(pull, step_hi=5))
    desk.says(
        W, Declined(round_id=pull.round_id, attempt=1, fragment_id=pull.fragment_id, reason=DeclineReason.ZERO_STEPS)
    )
    assert ShowReason(topic="end", text="") in desk.merges(pull.round_id)


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_run_ends_although_nobodys_loss_is_finite(quorum: int) -> None:
    desk = Desk(syncer_settings(total_steps=2, quorum=quorum))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    desk.says(W, report(2))
    desk.says(E, report(2))
    pull = only(Pull, messages(desk.effects, E))

    def declined(reason: DeclineReason) -> Declined:
        return Declined(round_id=pull.round_id, attempt=pull.attempt, fragment_id=pull.fragment_id, reason=reason)

    effects = desk.says(E, declined(DeclineReason.NO_TOKENS))
    assert desk.machine.context.waiting["finite:east"].startswith("east: its loss or gradients are not finite")
    if quorum == 1:
        assert not [effect for effect in effects if isinstance(effect, EndRun)], "west may still have something"
        desk.says(W, declined(DeclineReason.BUSY))
        effects = desk.says(W, declined(DeclineReason.NO_TOKENS))
    reason = "the last step is reached; its last rounds lack learners whose loss is finite"
    assert only(EndRun, effects) == EndRun(reason=reason)
    assert isinstance(only(RunEnded, records(effects)), RunEnded)
    assert status_of(desk.machine, desk.now_s).balance == 0


def asked_again_after_nobody_had_tokens(quorum: int) -> tuple[Desk, Pull]:
    """Both had losses that weren't finite when they were asked first; the last step isn't reached yet."""
    desk = Desk(syncer_settings(total_steps=3, quorum=quorum))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pull = pulled(desk)
    for session in (E, W):
        words = {"round_id": pull.round_id, "attempt": 1, "fragment_id": pull.fragment_id}
        desk.says(session, Declined(reason=DeclineReason.NO_TOKENS, **words))
    desk.tell(TimerFired(), after_s=9.0)
    again = next(message for message in reversed(messages(desk.effects, E)) if isinstance(message, Pull))
    assert again.attempt == 2
    return desk, again


def test_a_round_with_its_quorum_lacks_nobody_whose_loss_is_not_finite() -> None:
    desk, again = asked_again_after_nobody_had_tokens(quorum=1)
    desk.stores(E, answer(again))
    assert not any(isinstance(effect, StartMerge) for effect in desk.effects), "it is in grace"
    effects = desk.says(E, report(3))
    assert not [effect for effect in effects if isinstance(effect, EndRun)]
    desk.stores(W, answer(again, WEST))
    merge = only(StartMerge, desk.effects)
    assert isinstance(merge, StartMerge)
    assert only(EndRun, desk.merges(merge.round_id)) == EndRun(reason="the last step is reached")


def test_whose_contribution_is_on_its_way_has_something_to_give() -> None:
    desk, again = asked_again_after_nobody_had_tokens(quorum=2)
    desk.stores(E, answer(again))
    late = answer(again, WEST)
    desk.tell(UploadOffered(session=W, header=late))
    for session in (E, W):
        desk.says(session, report(3))
    assert not [effect for effect in desk.effects if isinstance(effect, EndRun)]
    desk.tell(UploadStored(session=W, header=late, ref="r", payload_bytes=516))
    merge = only(StartMerge, desk.effects)
    assert isinstance(merge, StartMerge)
    assert only(EndRun, desk.merges(merge.round_id)) == EndRun(reason="the last step is reached")


def test_whose_loss_is_finite_again_is_no_longer_shown() -> None:
    desk = Desk(syncer_settings(total_steps=20))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    desk.says(E, report(2))
    pull = only(Pull, messages(desk.effects, E))
    desk.says(
        E, Declined(round_id=pull.round_id, attempt=1, fragment_id=pull.fragment_id, reason=DeclineReason.NO_TOKENS)
    )
    assert "finite:east" in desk.machine.context.waiting
    desk.stores(E, answer(pull, step_hi=3))
    assert "finite:east" not in desk.machine.context.waiting


def test_an_epoch_is_kept_across_a_start() -> None:
    state = fresh_state()
    state.epoch = Epoch(3)
    assert Desk(state=state).machine.state.epoch == 3


def test_who_wakes_after_its_lease_only_to_go_is_asked_for_nothing() -> None:
    desk = Desk()
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    pulled(desk)
    desk.tell(TimerFired(), after_s=60.0)
    said = messages(desk.says(W, Goodbye(reason="enough")))
    assert not any(isinstance(message, Pull) for message in said)
