"""How long a round waits for a member that has died: from a kill, or from its last word, to the close."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from wan_diloco.protocol.events import Record
from wan_diloco.protocol.tape import RoundClosed
from wan_diloco.simulation.machines import LinkProfile, MachineWorld, Said, WorldSettings
from wan_diloco.units import LearnerId

LINK = LinkProfile()
VICTIM = LearnerId("m2")
# Long enough that everybody is measured, and past the lease of whoever is silent.
DEATH_S, AFTER_S = 10.0, 22.0
OFFSETS = 10


@dataclass(frozen=True, slots=True)
class Closed:
    """A round, on the world's clock."""

    opened_s: float
    quorate_s: float
    closed_s: float
    members: tuple[LearnerId, ...]
    merged: frozenset[LearnerId]


def play(settings: WorldSettings, death_s: float, *, silent: bool) -> list[Closed]:
    """Until all is as it was without the victim, which dies in the middle; all rounds that closed."""
    world = MachineWorld(settings, seed=1)
    found: list[Closed] = []

    def saw(said: Said) -> None:
        if isinstance(said, Record) and isinstance(record := said.record, RoundClosed):
            quorate_s = world.now_s - record.grace_s
            merged = frozenset(entry.header.key.learner_id for entry in record.entries)
            found.append(Closed(quorate_s - record.quorum_s, quorate_s, world.now_s, record.members, merged))

    world.watch = saw
    world.run(until_s=death_s)
    if VICTIM in world.nodes:
        node = world.nodes[VICTIM]
        assert node.freeze(float("inf")) if silent else world.kill(node) is None
    world.run(until_s=death_s + AFTER_S)
    return found


def settings(learners: int, quorum: int) -> WorldSettings:
    return WorldSettings(links=(LINK,) * learners, quorum=quorum, total_steps=100)


@pytest.mark.parametrize("quorum", [1, 2])
@pytest.mark.parametrize("silent", [False, True])
def test_who_died_holds_no_round_up(quorum: int, *, silent: bool) -> None:
    three = settings(3, quorum)
    usual_s = max(closed.closed_s - closed.opened_s for closed in play(settings(2, quorum), DEATH_S, silent=silent))
    # Whose connection broke is waited for no more, only the others are, which answer at their next boundary.
    at_most_s = three.bound_steps * LINK.step_s if silent else LINK.step_s + LINK.upload_s + 4 * LINK.delay_s
    waited_for_it = 0
    for number in range(OFFSETS):
        death_s = DEATH_S + number * three.period_steps * LINK.step_s / OFFSETS
        rounds = play(three, death_s, silent=silent)
        for closed in rounds:
            if closed.closed_s >= death_s and VICTIM in closed.members:
                waited_for_it += closed.opened_s <= death_s
                waited_s = closed.closed_s - max(death_s, closed.quorate_s)
                assert waited_s <= at_most_s
                if not silent and quorum == 2 and VICTIM not in closed.merged:
                    assert waited_s == pytest.approx(0.0, abs=1e-6), "the others are in"
        after = [closed for closed in rounds if closed.opened_s > death_s + three.lease_s + LINK.step_s]
        assert len(after) > three.num_fragments
        assert not any(VICTIM in closed.members for closed in after)
        assert max(closed.closed_s - closed.opened_s for closed in after) <= usual_s + 1e-6
    assert waited_for_it >= OFFSETS / 2, "rounds were open, and it was asked"
