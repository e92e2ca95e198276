"""Random runs with random faults: invariants throughout, and an end.

A failing trial names its seed. Write it into seeds.txt with what it found.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_diloco.simulation.trials import play, random_trial

SEEDS = [
    int(line.split()[0])
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def survives(seed: int) -> None:
    play(random_trial(random.Random(seed)))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_once_failed_is_survived(seed: int) -> None:
    survives(seed)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_any_trial_is_survived(seed: int) -> None:
    survives(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_a_great_many_trials_are_survived(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            survives(seed)
        except Exception as problem:
            problem.add_note(f"the seed is {seed}")
            raise
