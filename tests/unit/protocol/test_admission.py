"""Who differs is refused, and told the first difference."""

from __future__ import annotations

import pytest

from tests.support.protocol import TERMS, hello
from wan_diloco.protocol.admission import examine
from wan_diloco.protocol.messages import Hello, RefusalReason
from wan_diloco.units import Incarnation, LearnerId

STANDING = Incarnation(3)


@pytest.mark.parametrize("incarnation", [0, 3])
def test_who_agrees_is_taken_in(incarnation: int) -> None:
    assert examine(TERMS, hello(incarnation=incarnation), STANDING) is None


@pytest.mark.parametrize(
    ("said", "reason", "named"),
    [
        (hello(protocol_version=9), RefusalReason.PROTOCOL_VERSION, "protocol 2, the learner 9"),
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


def test_a_life_that_was_given_and_forgotten_goes_on_once_the_state_went_back() -> None:
    assert examine(TERMS, hello(incarnation=4, life_id="a process"), STANDING, went_back=True) is None
    for said in (hello(incarnation=2, life_id="a process"), hello(incarnation=4)):
        refused = examine(TERMS, said, STANDING, went_back=True)
        assert refused is not None
        assert refused.reason is RefusalReason.FENCED


@pytest.mark.parametrize(
    ("life_id", "said", "is_same"), [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True)]
)
def test_a_number_that_was_given_twice_is_the_life_of_one_process(life_id: str, said: str, is_same: bool) -> None:
    refused = examine(TERMS, hello(incarnation=3, life_id=said), STANDING, life_id=life_id, went_back=True)
    assert (refused is None) == is_same
    assert refused is None or (refused.reason, refused.detail) == (
        RefusalReason.FENCED,
        "incarnation 3 of east is another process",
    )
