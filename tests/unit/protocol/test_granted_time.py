"""What the syncer's own cap makes late is no slowness of a learner's, and no reason to close without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.desk import Desk, E, W, answer, messages, pulled
from tests.support.protocol import EAST, WEST, report, syncer_settings
from wan_diloco.protocol.events import IngressChanged, StartMerge, TimerFired
from wan_diloco.protocol.grants import Ingress
from wan_diloco.protocol.messages import Pace, Pull

# A contribution takes about 547 bytes on the line: with half of this each, 20 s, where a step takes one.
CAP = 54.7


def desk(cap: float) -> Desk:
    scene = Desk(replace(syncer_settings(), ingress=Ingress(cap_bytes_per_s=cap)))
    scene.joins(E, EAST)
    scene.joins(W, WEST)
    return scene


def test_the_round_is_held_for_what_the_rate_makes_of_an_upload_and_the_rate_is_told_apart() -> None:
    free, capped = pulled(desk(0.0)), pulled(desk(CAP))
    assert (free.upload_s, free.window_s) == (1.0, 4.0)
    # A time would stand when the cap changes; the rate follows it.
    assert capped.upload_s == 1.0
    assert capped.window_s == pytest.approx(4.0 + 19.0, rel=0.01)


@pytest.mark.parametrize("others_answered", [False, True])
def test_a_cap_that_was_far_too_small_for_a_while_holds_up_no_round_afterwards(*, others_answered: bool) -> None:
    scene = desk(0.001)
    pull = pulled(scene)
    (round_,) = scene.machine.conductor.open.values()
    assert round_.gives_up_s > scene.now_s + 1e5
    if others_answered:
        scene.stores(E, answer(pull), after_s=1.0)
    asked_s = round_.asked_s
    effects = scene.tell(IngressChanged(ingress=Ingress()), after_s=10.0)
    assert round_.gives_up_s < asked_s + 60
    while scene.now_s < asked_s + 60:
        effects += scene.says(E, report(2), after_s=3.0)
        effects += scene.says(W, report(2))
    if others_answered:
        assert [effect for effect in effects if isinstance(effect, StartMerge)], "the grace is as short as ever"
    else:
        assert [pull.attempt for pull in messages(effects, E) if isinstance(pull, Pull)], "they are asked again"


def test_an_answer_during_which_the_cap_changed_says_nothing_of_its_sender() -> None:
    scene = desk(CAP)
    pull = pulled(scene)
    scene.tell(IngressChanged(ingress=Ingress()), after_s=1.0)
    scene.stores(E, answer(pull), after_s=15.0)
    assert EAST not in scene.machine.context.responses.estimates()


def test_everybody_is_told_a_share_and_a_change_of_the_cap_at_once() -> None:
    scene = desk(CAP)
    told = [
        (session, message.rate_bytes_per_s)
        for session in (E, W)
        for message in messages(scene.effects, session)
        if isinstance(message, Pace)
    ]
    assert told[-1] == (W, CAP / 2)
    assert (E, CAP / 2) in told
    effects = scene.tell(IngressChanged(ingress=Ingress(cap_bytes_per_s=1000.0, uplinks={EAST: 300.0})))
    assert [message.rate_bytes_per_s for message in messages(effects) if isinstance(message, Pace)] == [300.0, 700.0]


def test_an_answer_that_comes_when_its_grant_lets_it_is_a_quick_one() -> None:
    scene = desk(CAP)
    pull = pulled(scene)
    scene.stores(E, answer(pull), after_s=20.5)
    mean_s = scene.machine.context.responses.estimates()[EAST].mean_s
    assert mean_s == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(
    ("cap", "late_s", "is_held"), [(0.0, 3.9, True), (0.0, 4.1, False), (CAP, 22.9, True), (CAP, 23.2, False)]
)
def test_a_round_is_held_to_its_bound_and_as_much_longer_as_the_cap_takes(
    cap: float, late_s: float, *, is_held: bool
) -> None:
    scene = desk(cap)
    pull = pulled(scene)
    effects = scene.stores(E, answer(pull), after_s=1.0)
    asked_s = scene.now_s - 1.0
    while scene.now_s < asked_s + late_s:
        # They say now and then that they are there.
        effects += scene.says(E, report(2), after_s=min(3.0, asked_s + late_s - scene.now_s))
        effects += scene.says(W, report(2))
    assert (not [effect for effect in effects if isinstance(effect, StartMerge)]) is is_held
    if is_held:
        # Who comes within that is fresh, and the last one ends the wait.
        effects = scene.stores(W, answer(pull, WEST))
        (merge,) = [effect for effect in effects if isinstance(effect, StartMerge)]
        assert [entry.header.key.learner_id for entry in merge.entries] == [EAST, WEST]


def test_who_comes_later_gets_a_share_of_its_own_and_takes_it_from_the_others() -> None:
    scene = Desk(replace(syncer_settings(), start_timeout_s=1.0, ingress=Ingress(cap_bytes_per_s=CAP)))
    scene.joins(E, EAST)
    scene.tell(TimerFired(), after_s=1.5)
    effects = scene.says(E, report(1))
    assert [message.rate_bytes_per_s for message in messages(effects, E) if isinstance(message, Pace)] == [CAP]
    effects = scene.joins(W, WEST)
    for session in (E, W):
        rates = [message.rate_bytes_per_s for message in messages(effects, session) if isinstance(message, Pace)]
        assert rates[-1] == CAP / 2
    assert not [message for message in messages(effects, E) if isinstance(message, Pull) and message.window_s < 19]
