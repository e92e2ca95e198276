"""How the syncer's machine ends a run: its last rounds, and who has nothing to give to them."""

from __future__ import annotations

import pytest

from tests.support.desk import Desk, E, W, answer, messages, only, pulled, records
from tests.support.protocol import EAST, WEST, fresh_state, hello, report, syncer_settings
from wan_diloco.protocol.events import (
    EndRun,
    SessionId,
    ShowReason,
    StartMerge,
    TimerFired,
    UploadFailed,
    UploadOffered,
    UploadStored,
)
from wan_diloco.protocol.messages import (
    Declined,
    DeclineReason,
    Goodbye,
    Pace,
    Pull,
    RefusalReason,
    ResyncRequest,
    Stop,
)
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import RunEnded
from wan_diloco.units import Epoch


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


def _spoiled(desk: Desk, times: int, *, told: bool) -> list[object]:
    """Both learners, asked again and again, have nothing finite; the effects of the last word of it.

    They find it by themselves where it is `told`, and else the syncer does.
    """
    effects: list[object] = []
    for attempt in range(times):
        if attempt:
            desk.tell(TimerFired(), after_s=9.0)
        pull = next(message for message in reversed(messages(desk.effects, E)) if isinstance(message, Pull))
        assert pull.attempt == attempt + 1
        for session, learner in ((E, EAST), (W, WEST)):
            bad = answer(pull, learner, step_hi=2 + attempt)
            if told:
                words = ResyncRequest(fragment_id=pull.fragment_id, reason=RefusalReason.NON_FINITE)
                effects = desk.says(session, words)
                continue
            desk.tell(UploadOffered(session=session, header=bad))
            effects = desk.tell(
                UploadFailed(session=session, header=bad, reason=RefusalReason.NON_FINITE, detail="nan")
            )
            desk.says(session, report(3 + attempt))
    return effects


@pytest.mark.parametrize("told", [True, False])
def test_a_run_ends_although_nobody_ever_gives_what_is_finite(*, told: bool) -> None:
    desk = Desk(syncer_settings(total_steps=2, quorum=1))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    desk.says(W, report(2))
    desk.says(E, report(2))
    _spoiled(desk, 2, told=told)
    assert not [effect for effect in desk.effects if isinstance(effect, EndRun)], "the published values may help"
    desk = Desk(syncer_settings(total_steps=2, quorum=1))
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    desk.says(W, report(2))
    desk.says(E, report(2))
    effects = _spoiled(desk, 3, told=told)
    reason = "the last step is reached; its last rounds lack learners whose loss is finite"
    assert only(EndRun, effects) == EndRun(reason=reason)
