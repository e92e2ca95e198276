"""Who differs is refused, and told the first difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.protocol import TERMS, hello
from wan_diloco.protocol.admission import Standing, examine
from wan_diloco.protocol.messages import Hello, RefusalReason
from wan_diloco.units import Incarnation, LearnerId

STANDING = Standing(incarnation=Incarnation(3), life_id="the third")


@pytest.mark.parametrize("incarnation", [0, 3])
def test_who_agrees_is_taken_in(incarnation: int) -> None:
    assert examine(TERMS, hello(incarnation=incarnation), STANDING) is None


@pytest.mark.parametrize(
    ("said", "reason", "named"),
    [
        (hello(protocol_version=9), RefusalReason.PROTOCOL_VERSION, "protocol 3, the learner 9"),
        (hello(run="other"), RefusalReason.OTHER_RUN, "'a run', the learner 'other'"),
        (hello(LearnerId("south")), RefusalReason.UNKNOWN_LEARNER, "'south' is configured, only east, west"),
        (hello(incarnation=2), RefusalReason.FENCED, "incarnation 2 of east is over, 3 stands"),
        (hello(incarnation=4), RefusalReason.FENCED, "incarnation 4"),
        (hello(settings=(("codec", "int8"), ("period", "9"))), RefusalReason.OTHER_SETTINGS, "codec is int4 at the"),
        (hello(settings=(("codec", "int4"),)), RefusalReason.OTHER_SETTINGS, "not set at the learner"),
        (hello(settings=(*TERMS.settings, ("zzz", "1"))), RefusalReason.OTHER_SETTINGS, "zzz is 1 at the learner"),
        (hello(layout=("layer.0 4x4", "layer.1 4x5")), RefusalReason.OTHER_LAYOUT, "line 1: layer.1 4x4 at the"),
        (hello(layout=("layer.0 4x4",)), RefusalReason.OTHER_LAYOUT, "line 1: layer.1 4x4 at the syncer, nothing"),
        (hello(initial_digests=("initial-0", "x")), RefusalReason.OTHER_WEIGHTS, "fragment 1: initial-1 at the"),
    ],
)
def test_the_first_difference_is_named(said: Hello, reason: RefusalReason, named: str) -> None:
    refused = examine(TERMS, said, STANDING)
    assert refused is not None
    assert refused.reason is reason
    assert named in refused.detail


def test_a_difference_as_long_as_a_book_is_told_in_a_line() -> None:
    refused = examine(TERMS, hello(layout=("x" * 100_000,)), STANDING)
    assert refused is not None
    assert len(refused.detail) <= 500


@pytest.mark.parametrize(
    ("said", "is_taken_in"),
    [
        (hello(incarnation=2, life_id="the third"), True),
        (hello(incarnation=4, life_id="the third"), False),
        (hello(incarnation=2, life_id="the second"), False),
    ],
)
def test_who_lives_the_life_that_stands_may_not_have_heard_of_it(said: Hello, *, is_taken_in: bool) -> None:
    refused = examine(TERMS, said, STANDING)
    assert (refused is None) is is_taken_in
    assert refused is None or refused.reason is RefusalReason.FENCED


SOUTH = hello(LearnerId("south"))


@pytest.mark.parametrize(
    ("unlisted_max", "known", "incarnation", "reason"),
    [
        (0, 0, 0, RefusalReason.UNKNOWN_LEARNER),
        (1, 0, 0, None),
        (1, 1, 0, RefusalReason.TOO_MANY_LEARNERS),
        (1, 1, 1, None),
        (2, 1, 0, None),
    ],
)
def test_so_many_names_that_nobody_listed_may_take_part(
    unlisted_max: int, known: int, incarnation: int, reason: RefusalReason | None
) -> None:
    standing = Standing(incarnation=Incarnation(incarnation), unlisted=known)
    refused = examine(replace(TERMS, unlisted_max=unlisted_max), SOUTH, standing)
    assert (None if refused is None else refused.reason) is reason


def test_a_life_that_was_given_and_forgotten_is_taken_in_once_the_state_went_back() -> None:
    standing = replace(STANDING, went_back=True)
    assert examine(TERMS, hello(incarnation=4, life_id="a process"), standing) is None
    for said in (hello(incarnation=2, life_id="a process"), hello(incarnation=4)):
        refused = examine(TERMS, said, standing)
        assert refused is not None
        assert refused.reason is RefusalReason.FENCED


@pytest.mark.parametrize(
    ("life_id", "said", "is_same"), [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True)]
)
@pytest.mark.parametrize("went_back", [False, True])
def test_a_number_that_was_given_twice_is_the_life_of_one_process(
    life_id: str, said: str, *, is_same: bool, went_back: bool
) -> None:
    standing = replace(STANDING, life_id=life_id, went_back=went_back)
    refused = examine(TERMS, hello(incarnation=3, life_id=said), standing)
    assert (refused is None) == is_same
    assert refused is None or (refused.reason, refused.detail) == (
        RefusalReason.FENCED,
        "incarnation 3 of east is another process",
    )
