"""A learner whose data were given to another while it was away: it goes on as another life of the same process."""

from __future__ import annotations

import pytest

from tests.support.protocol import version
from tests.support.uplink import F0, F1, Uplink, of, pull, said
from wan_diloco.errors import EXIT_AUTH, EXIT_TEMPORARY
from wan_diloco.protocol.events import (
    Connected,
    ConnectionLost,
    DropUpload,
    ExitLearner,
    Installed,
    LearnerEffect,
    RequestSnapshot,
    SetPace,
    StartUpload,
)
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.messages import Hello, RefusalReason, Refused, Welcome
from wan_diloco.units import Epoch, GlobalStep, Incarnation, LocalStep, ShardId, Term


def welcome(incarnation: int, *, shard: int = 0, next_unit: int = 0) -> Welcome:
    return Welcome(
        incarnation=Incarnation(incarnation),
        term=Term(1),
        epoch=Epoch(0),
        global_step=GlobalStep(4),
        anchor=0,
        total_steps=GlobalStep(100),
        versions=(version(0), version(0)),
        data_shard=ShardId(shard),
        next_unit=next_unit,
        shards=("", ""),
        started=True,
    )


def comes_back(uplink: Uplink, message: Welcome) -> list[LearnerEffect]:
    uplink.tell(ConnectionLost(reason="cut", refused=False))
    uplink.tell(Connected(), after_s=2.0)
    return uplink.hears(message)


def test_what_was_under_way_for_the_life_that_is_over_is_dropped_and_data_go_on_elsewhere(uplink: Uplink) -> None:
    header = uplink.uploads(F0)
    uplink.hears(pull(F1))
    effects = comes_back(uplink, welcome(2, shard=3, next_unit=70))
    assert DropUpload(header=header) in effects
    assert not of(StartUpload, effects), "nothing is sent in the name of a life that is over"
    paces = of(SetPace, effects)
    assert [pace.lease for pace in paces if isinstance(pace, SetPace)] == [Lease(shard=ShardId(3), first_unit=70)]
    assert uplink.machine.incarnation == 2
    assert not of(StartUpload, uplink.boundary(F1)), "a snapshot that was asked for before says nothing now"


def test_a_fragment_is_given_only_after_it_has_come_anew(uplink: Uplink) -> None:
    uplink.boundary()
    comes_back(uplink, welcome(2))
    assert not of(RequestSnapshot, uplink.hears(pull(F0)))
    assert not of(RequestSnapshot, uplink.boundary()), "its training goes on meanwhile"
    installed = Installed(
        fragment_id=F0,
        version=version(0),
        resync=1,
        step_lo=LocalStep(uplink.step + 1),
        tokens_lo=100 * (uplink.step + 1),
    )
    effects = uplink.boundary(installed=(installed,))
    assert of(RequestSnapshot, effects) == [RequestSnapshot(fragment_id=F0)]
    started = of(StartUpload, uplink.boundary(F0))
    keys = [one.header.key for one in started if isinstance(one, StartUpload)]
    assert [(key.incarnation, key.step_lo) for key in keys] == [(2, uplink.step - 1)]


def test_a_reconnect_of_the_same_life_keeps_what_was_under_way(uplink: Uplink) -> None:
    header = uplink.uploads(F0)
    effects = comes_back(uplink, welcome(1))
    assert not of(DropUpload, effects)
    assert [one.header for one in of(StartUpload, effects) if isinstance(one, StartUpload)] == [header]
    assert all(pace.lease is None for pace in of(SetPace, effects) if isinstance(pace, SetPace))


def test_a_training_loop_that_was_never_told_its_data_is_told_by_the_next_uplink() -> None:
    """The one before died between giving the life and giving the data."""
    uplink = Uplink(incarnation=1, told=False)
    uplink.machine.start()
    effects = uplink.joins()
    assert [pace.lease for pace in of(SetPace, effects) if isinstance(pace, SetPace)] == [
        Lease(shard=ShardId(0), first_unit=5)
    ]
    assert of(Hello, said(effects)) == []


@pytest.mark.parametrize(
    ("reason", "code"), [(RefusalReason.NO_SHARD, EXIT_TEMPORARY), (RefusalReason.TOO_MANY_LEARNERS, EXIT_AUTH)]
)
def test_who_finds_no_data_may_be_started_again_and_who_is_one_too_many_not(reason: RefusalReason, code: int) -> None:
    effects = Uplink().hears(Refused(reason=reason, detail="no"))
    assert effects == [ExitLearner(reason=f"refused ({reason}): no", exit_code=code)]
