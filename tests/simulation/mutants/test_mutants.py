"""Every planted fault is found out, by the checker that is there for it."""

from __future__ import annotations

import pytest

from tests.simulation.mutants.planted import MUTANTS, Mutant, planted
from wan_diloco.simulation.worlds import play_world

SEEDS = 2000


def test_there_are_enough_of_them() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 12


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_found_out(mutant: Mutant, record_property: pytest.RecordProperty) -> None:
    """At the seed that is noted with it; when the worlds have changed since, at another of the first 2,000."""
    with planted(mutant):
        for seed in (mutant.seed, *range(SEEDS)):
            result = play_world(seed)
            if mutant.says in result.violation and result.violation:
                record_property("found_at_seed", seed)
                record_property("found_by", result.violation)
                return
    pytest.fail(f"{SEEDS} worlds didn't show it")


def test_the_machines_are_themselves_again_afterwards() -> None:
    for mutant in MUTANTS:
        rights = [owner.__dict__[name] for owner, name, _ in mutant.patches]
        with planted(mutant):
            wrongs = [owner.__dict__[name] for owner, name, _ in mutant.patches]
        assert all(wrong is not right for wrong, right in zip(wrongs, rights, strict=True))
        assert rights == [owner.__dict__[name] for owner, name, _ in mutant.patches]
