"""What the product promises to learners that are slow, or far away, or on a narrow link."""

from __future__ import annotations

from itertools import pairwise

import pytest

from wan_diloco.simulation.machines import LinkProfile, MachineWorld, WorldSettings
from wan_diloco.units import LearnerId

FAST = LinkProfile()
# A step takes 1 s: this one's messages take a step longer than everybody's.
FAR = LinkProfile(delay_s=1.02)
SLOW = LinkProfile(step_s=2.0)
NARROW = LinkProfile(upload_s=4.0)
ODD = LearnerId("m3")


def played(
    odd: LinkProfile, *, period_steps: int, num_fragments: int, periods: int, safety: float = 0.9
) -> MachineWorld:
    """Three usual learners and an odd one, K = 1."""
    world = MachineWorld(
        WorldSettings(
            links=(FAST, FAST, FAST, odd),
            num_fragments=num_fragments,
            period_steps=period_steps,
            quorum=1,
            safety=safety,
            total_steps=periods * period_steps,
        ),
        seed=1,
    )
    world.run()
    assert world.ended
    return world


def freshness(world: MachineWorld) -> float:
    """Share of all rounds that the odd learner was merged in with staleness 0."""
    return len(world.invariants.fresh_in.get(ODD, [])) / world.syncer.state.totals.rounds


def longest_without_a_merge(world: MachineWorld) -> int:
    """The most steps that any learner trained without any fresh merge of a fragment, over all fragments."""
    longest = 0
    for name, merges in world.invariants.fresh_at.items():
        for fragment in range(world.settings.num_fragments):
            steps = [0, *[step for index, step in merges if index == fragment], world.nodes[name].local_step]
            longest = max(longest, *[later - earlier for earlier, later in pairwise(steps)])
    return longest


RHYTHMS = pytest.mark.parametrize(
    ("period_steps", "num_fragments", "periods"), [(4, 4, 20), (24, 24, 6)], ids=["H=4", "H=24"]
)
ODDITIES = pytest.mark.parametrize("odd", [FAR, SLOW], ids=["far", "slow"])


@RHYTHMS
@ODDITIES
def test_the_odd_one_is_merged_fresh_and_nobody_is_left_out(
    odd: LinkProfile, period_steps: int, num_fragments: int, periods: int
) -> None:
    world = played(odd, period_steps=period_steps, num_fragments=num_fragments, periods=periods)
    assert freshness(world) >= 0.8
    assert longest_without_a_merge(world) <= 3 * period_steps


@RHYTHMS
@ODDITIES
def test_without_grace_the_odd_one_would_be_left_behind(
    odd: LinkProfile, period_steps: int, num_fragments: int, periods: int
) -> None:
    world = played(odd, period_steps=period_steps, num_fragments=num_fragments, periods=periods, safety=0.0)
    assert freshness(world) < 0.8


@pytest.mark.parametrize("odd", [FAST, FAR], ids=["near", "far"])
def test_many_more_fragments_than_steps_in_a_period_are_all_merged_in_every_period(odd: LinkProfile) -> None:
    """As many uploads are under way as fall due within the overlap, and the world checks that both ends agree."""
    quick = LinkProfile(upload_s=0.001)
    far = LinkProfile(delay_s=odd.delay_s, upload_s=0.001)
    world = MachineWorld(
        WorldSettings(links=(quick, far), num_fragments=60, period_steps=4, quorum=1, total_steps=12), seed=1
    )
    world.run()
    assert world.ended
    assert set(world.syncer.state.merges) == {3}
    assert all(node.local_step <= 13 for node in world.nodes.values())
    assert len(world.invariants.fresh_in[LearnerId("m1")]) >= 0.8 * world.syncer.state.totals.rounds


def test_a_link_of_a_quarter_of_what_is_needed_takes_part_in_every_nth_round_of_every_fragment() -> None:
    periods = 14
    world = played(NARROW, period_steps=24, num_fragments=24, periods=periods)
    rounds: dict[int, list[int]] = {fragment: [0] for fragment in range(24)}
    for fragment, count in world.invariants.fresh_in[ODD]:
        rounds[fragment].append(count)
    for fragment, counts in rounds.items():
        assert len(counts) > 1, f"fragment {fragment} is left out"
        first, *gaps = [later - earlier for earlier, later in pairwise(counts)]
        # At first nobody knows how narrow the link is.
        assert first <= 8, f"fragment {fragment} is merged in rounds {counts}"
        assert max(gaps) <= 6, f"fragment {fragment} is merged in rounds {counts}"
    # It is one quarter, not more: the link is used well, and not beyond what it carries.
    assert 0.15 <= freshness(world) <= 0.27
