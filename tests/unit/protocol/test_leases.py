"""Which shard a new life reads, and who loses it for that."""

from __future__ import annotations

import pytest

from tests.support.protocol import EAST, WEST
from wan_diloco.protocol.leases import Lease, Loan, choose_shard
from wan_diloco.units import LearnerId, ShardId

A, B, C = LearnerId("a"), LearnerId("b"), LearnerId("c")


def chosen(
    learner_id: LearnerId,
    held: dict[LearnerId, int],
    *,
    num_spare: int = 2,
    units: dict[int, int] | None = None,
    silent_s: dict[LearnerId, float] | None = None,
) -> Loan | None:
    return choose_shard(
        learner_id,
        owned={EAST: ShardId(0), WEST: ShardId(1)},
        spare=[ShardId(2 + number) for number in range(num_spare)],
        leases={name: Lease(shard=ShardId(shard), first_unit=0) for name, shard in held.items()},
        units={ShardId(shard): unit for shard, unit in (units or {}).items()},
        silent_s=silent_s or {},
    )


@pytest.mark.parametrize("held", [{}, {WEST: 1}, {WEST: 1, A: 2, B: 3}])
def test_a_listed_region_has_its_own_shard_whatever_others_read(held: dict[LearnerId, int]) -> None:
    assert chosen(WEST, held) == Loan(shard=ShardId(1))


def test_nobody_else_is_given_a_listed_regions_shard_also_while_it_is_away() -> None:
    assert chosen(A, {}, num_spare=0) is None
    assert chosen(A, {EAST: 0, WEST: 1}, num_spare=0, silent_s={EAST: 1e9, WEST: 1e9}) is None


def test_who_has_a_shard_keeps_it() -> None:
    assert chosen(B, {A: 2, B: 3}, silent_s={A: 100.0, B: 50.0}) == Loan(shard=ShardId(3))


def test_of_the_free_shards_the_one_that_was_read_least_is_given_first() -> None:
    assert chosen(A, {}) == Loan(shard=ShardId(2))
    assert chosen(A, {}, units={2: 7}) == Loan(shard=ShardId(3))
    assert chosen(A, {}, units={2: 7, 3: 9}) == Loan(shard=ShardId(2))
    assert chosen(A, {B: 3}, units={2: 7}) == Loan(shard=ShardId(2))


def test_a_free_shard_spares_whoever_is_away() -> None:
    assert chosen(A, {B: 2}, silent_s={B: 1e9}) == Loan(shard=ShardId(3))


def test_without_a_free_shard_the_longest_silent_holder_loses_its_own() -> None:
    away = {B: 20.0, C: 30.0}
    assert chosen(A, {B: 2, C: 3}, silent_s=away) == Loan(shard=ShardId(3), fences=C)
    assert chosen(A, {B: 2, C: 3}, silent_s={B: 20.0}) == Loan(shard=ShardId(2), fences=B)
    assert chosen(A, {B: 2, C: 3}, silent_s={B: 20.0, C: 20.0}) == Loan(shard=ShardId(2), fences=B)


def test_no_live_holder_loses_its_shard() -> None:
    assert chosen(A, {B: 2, C: 3}) is None
    assert chosen(A, {B: 2, C: 3}, silent_s={EAST: 1e9}) is None
