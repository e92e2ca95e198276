"""Worlds with everything that goes wrong: nothing that must hold ever fails, in any of them."""

from __future__ import annotations

import pytest

from wan_diloco.simulation.campaign import Campaign, play_worlds
from wan_diloco.simulation.worlds import FAULTS_MIN, MERGES_MIN

_A_TEST = 25


def played(first: int, count: int, jobs: int = 1) -> Campaign:
    campaign = Campaign()
    for result in play_worlds(first, count, jobs):
        campaign.add(result)
    return campaign


@pytest.mark.parametrize("first", range(0, 300, _A_TEST))
def test_a_world_holds_whatever_befalls_it(first: int) -> None:
    campaign = played(first, _A_TEST)
    assert campaign.violations == {}
    assert campaign.undeclared == set(), "the table of transitions doesn't know what a machine does"
    assert campaign.merges_min is not None
    assert campaign.faults_min is not None
    assert campaign.merges_min >= MERGES_MIN
    assert campaign.faults_min >= FAULTS_MIN
    assert campaign.crashed >= _A_TEST // 2


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (1072, "a joiner that got its moments while it had no session took its steps in silence"),
        (2060, "a learner took an outage for the slowness of its link, and declined round after round"),
        (2427, "whose contribution was refused was awaited for the whole window"),
        (3108, "each time that the value was taken anew leaves an interval with work"),
    ],
)
def test_a_world_that_once_found_something_holds(seed: int, what: str) -> None:
    assert played(seed, 1).violations == {}, what


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_great_many_worlds_show_nearly_all_that_the_machines_can_do() -> None:
    campaign = played(300, 3000, jobs=2)
    assert campaign.violations == {}
    assert campaign.undeclared == set()
    assert campaign.transition_coverage >= 0.95, campaign.unseen


def test_a_seed_is_the_same_world_each_time_and_in_any_process() -> None:
    here, there = list(play_worlds(3, 2, 1)), list(play_worlds(3, 2, 2))
    assert here == there
