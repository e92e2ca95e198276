"""Laws of retries, of the upload queue and of membership."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.protocol.events import SessionId
from wan_diloco.protocol.membership import Membership
from wan_diloco.protocol.retry import RetryPolicy
from wan_diloco.protocol.upload_queue import UploadChoice, choose_upload
from wan_diloco.units import FragmentId, Incarnation, LearnerId, LocalStep

# ---- retries -------------------------------------------------------------------------------------


@given(
    st.floats(0.01, 10),
    st.floats(0, 100),
    st.floats(1, 10),
    st.floats(0, 1),
    st.integers(-5, 10_000),
    st.integers(0, 2**32),
)
def test_no_delay_leaves_its_bounds(
    initial_s: float, more_s: float, factor: float, jitter: float, failures: int, seed: int
) -> None:
    policy = RetryPolicy(initial_s=initial_s, max_s=initial_s + more_s, factor=factor, jitter=jitter)
    delay_s = policy.delay_s(failures, random.Random(seed))
    if failures <= 0:
        assert delay_s == 0
        return
    assert policy.initial_s * (1 - jitter) <= delay_s <= policy.max_s


def test_delays_double_up_to_the_largest() -> None:
    policy = RetryPolicy(initial_s=1, max_s=5, factor=2, jitter=0)
    assert [policy.delay_s(failures, random.Random(0)) for failures in range(5)] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    "wrong", [{"initial_s": 0.0}, {"initial_s": 6.0}, {"factor": 0.5}, {"jitter": -0.1}, {"jitter": 1.1}]
)
def test_backoff_that_does_not_back_off_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="backoff"):
        RetryPolicy(**wrong)


# ---- the upload queue ----------------------------------------------------------------------------

CHOICES = st.lists(
    st.builds(
        UploadChoice,
        fragment_id=st.integers(0, 9).map(FragmentId),
        remaining_s=st.none() | st.floats(0, 10),
        due_s=st.floats(0, 10),
        periods=st.integers(0, 3),
        steps=st.integers(0, 9),
    ),
    max_size=8,
    unique_by=lambda choice: choice.fragment_id,
)


@given(CHOICES, st.floats(0, 10))
def test_the_next_upload_is_in_time_then_rare_then_old(waiting: list[UploadChoice], upload_s: float) -> None:
    chosen = choose_upload(waiting, upload_s)
    if not waiting:
        assert chosen is None
        return
    best = next(choice for choice in waiting if choice.fragment_id == chosen)
    for other in waiting:
        assert best.is_in_time(upload_s) >= other.is_in_time(upload_s)
        if other.is_in_time(upload_s) == best.is_in_time(upload_s):
            assert (best.periods, best.steps) >= (other.periods, other.steps)


@given(CHOICES, st.floats(0, 10), st.randoms(use_true_random=False))
def test_the_order_of_asking_changes_nothing(waiting: list[UploadChoice], upload_s: float, rng: random.Random) -> None:
    shuffled = list(waiting)
    rng.shuffle(shuffled)
    assert choose_upload(shuffled, upload_s) == choose_upload(waiting, upload_s)


def test_who_would_be_barely_in_time_gives_way_to_who_has_room() -> None:
    barely = UploadChoice(fragment_id=FragmentId(0), remaining_s=None, due_s=1.1, periods=3, steps=9)
    roomy = UploadChoice(fragment_id=FragmentId(1), remaining_s=None, due_s=2.0, periods=0, steps=1)
    assert choose_upload([barely, roomy], 1.0) == roomy.fragment_id
    assert choose_upload([barely, roomy], 0.5) == barely.fragment_id


# ---- membership ----------------------------------------------------------------------------------

NAMES = [LearnerId(name) for name in "abc"]
DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["welcome", "new life", "step", "leave", "silence", "cut"]),
        st.integers(0, 2),
        st.integers(0, 7),
    ),
    max_size=40,
)


@given(DEEDS, st.integers(1, 3))
def test_the_global_step_never_goes_back_and_no_change_of_members_moves_it(
    deeds: list[tuple[str, int, int]], quorum: int
) -> None:
    members = Membership(quorum, lease_s=10.0, global_step=0, leap_steps=4)
    now_s, session = 0.0, 0
    for deed, index, amount in deeds:
        name, before = NAMES[index], members.global_step
        changes, now_s = members.changes, now_s + 1.0
        member = members.members.get(name)
        if deed in {"welcome", "new life"} or member is None:
            session += 1
            life = 1 if member is None else member.incarnation + (deed == "new life")
            members.welcome(name, Incarnation(life), SessionId(session), LocalStep(amount), 0, now_s)
            assert members.of(SessionId(session)) is members.members[name]
        elif deed == "step":
            members.heard(member, now_s)
            if members.progressed(member, LocalStep(member.local_step + amount), 0):
                assert amount > 4
                assert not members.advance(), "a leap moves nothing"
        elif deed == "leave":
            members.leave(member)
        elif deed == "cut" and member.session is not None:
            members.disconnected(member.session)
            assert not members.reachable(name, member.incarnation)
        elif deed == "silence":
            now_s += 8.0
            members.expire(now_s)
        if members.changes != changes and deed != "step":
            # Everybody counts from here, so the change by itself moves nothing.
            assert not members.advance()
        moved = members.advance()
        assert members.global_step > before if moved else members.global_step == before
        assert sum(member.session is not None for member in members.members.values()) == len(members.sessions)


def test_a_limit_holds_the_step() -> None:
    members = Membership(1, lease_s=10.0, global_step=0, leap_steps=100)
    members.welcome(NAMES[0], Incarnation(1), SessionId(1), LocalStep(0), 0, 0.0)
    members.members[NAMES[0]].local_step = LocalStep(9)
    assert members.advance(4)
    assert members.global_step == 4
    assert not members.advance(4)
    assert members.advance()
    assert members.global_step == 9


def test_a_lease_is_never_shorter_than_a_few_steps() -> None:
    members = Membership(1, lease_s=10.0, global_step=0, leap_steps=100)
    members.welcome(NAMES[0], Incarnation(1), SessionId(1), LocalStep(0), 0, 100.0)
    member = members.members[NAMES[0]]
    assert members.expires_s(member) == 110.0
    member.step_time_s = 8.0
    assert members.expires_s(member) == 140.0
    assert members.expire(139.0) == []
    assert members.expire(140.0) == [member]
    assert members.heard(member, 141.0), "who wakes after its lease is live again"
    assert members.live() == [member]


def test_the_step_time_is_that_of_the_slowest_of_the_quorum() -> None:
    members = Membership(2, lease_s=10.0, global_step=0, leap_steps=100)
    assert members.step_s() is None
    for index, step_time_s in enumerate([4.0, 1.0, 2.0]):
        members.welcome(NAMES[index], Incarnation(1), SessionId(index), LocalStep(0), 0, 0.0)
        members.members[NAMES[index]].step_time_s = step_time_s
    assert members.step_s() == 2.0


def test_a_new_session_replaces_the_old_one() -> None:
    members = Membership(1, lease_s=10.0, global_step=0, leap_steps=100)
    assert members.welcome(NAMES[0], Incarnation(1), SessionId(1), LocalStep(0), 0, 0.0) is None
    assert members.welcome(NAMES[0], Incarnation(1), SessionId(2), LocalStep(0), 0, 0.0) == SessionId(1)
    assert members.of(SessionId(1)) is None
    assert members.disconnected(SessionId(1)) is None, "the old one's end is no end of the learner"
    assert members.reachable(NAMES[0], Incarnation(1))
