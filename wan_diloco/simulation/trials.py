"""Random runs with random faults: what the machines must survive, from one source of chance.

A trial's faults end at `calm_s`. Invariants hold throughout; after that the run must also come to its end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from wan_diloco.errors import EXIT_AUTH, EXIT_OK, EXIT_TEMPORARY
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.simulation.checkers import Violation
from wan_diloco.simulation.faults import Fault, FaultKind, befall
from wan_diloco.simulation.learner_node import LearnerNode, Note
from wan_diloco.simulation.machines import MachineWorld
from wan_diloco.simulation.world_settings import LinkProfile, WorldSettings

__all__ = ["Fault", "FaultKind", "Trial", "play", "random_trial"]

# The slowest trial drawn below needs about 40 steps of 2 s, and now and then an attempt's longest window.
_PATIENCE_S = 3000.0
# Refusals that only a wrong number earns.
_DOUBTS = (RefusalReason.IMPLAUSIBLE, RefusalReason.TOO_MANY_TOKENS)
_AGAIN_S = 0.5
# What `random_trial` draws from; kept seeds hang on it.
_KINDS = (
    FaultKind.CUT,
    FaultKind.KILL,
    FaultKind.HANG,
    FaultKind.TWIN,
    FaultKind.RESTART,
    FaultKind.CRASH,
    FaultKind.SNAPSHOT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run and what befalls it.

    Attributes:
        insists: What can't befall at its time, since nobody is there, is tried again until it does.
    """

    settings: WorldSettings
    faults: tuple[Fault, ...]
    seed: int
    insists: bool = False


def random_trial(rng: random.Random) -> Trial:
    """Any trial that should come to its end."""
    num_learners = rng.randint(1, 4)
    lockstep = rng.random() < 0.2
    quorum = num_learners if lockstep else rng.randint(1, num_learners)
    period = rng.randint(1, 6)
    calm_s = rng.choice([5.0, 20.0, 60.0])
    settings = WorldSettings(
        links=tuple(_random_link(rng) for _ in range(num_learners)),
        num_fragments=rng.randint(1, 8),
        period_steps=period,
        overlap_steps=0 if lockstep else rng.randint(1, 3),
        quorum=quorum,
        safety=rng.choice([0.0, 0.5, 0.9]),
        bound_steps=2.0 if lockstep else rng.choice([2.0, 4.0]),
        total_steps=rng.choice([4, 10, 20]),
        lease_s=rng.choice([2.0, 10.0]),
        merge_s=rng.choice([0.0, 0.02, 1.5]),
        drop=rng.choice([0.0, 0.1, 0.4]),
        repeat=rng.choice([0.0, 0.2]),
        poison=rng.choice([0.0, 0.0, 0.1]),
        merge_fails=rng.choice([0.0, 0.0, 0.3]),
        calm_s=calm_s,
    )
    faults = tuple(_random_fault(rng, settings) for _ in range(rng.randint(0, 8)))
    return Trial(settings=settings, faults=faults, seed=rng.getrandbits(32))


def play(trial: Trial, note: Note | None = None) -> MachineWorld:
    """Play a trial to its end.

    Args:
        trial: It.
        note: Is told each input of any machine with what came out: who, the event, the effects.

    Returns:
        The world as it was left, for those who want to know more.

    Raises:
        Violation: An invariant did not hold, or the run did not come to its end.
    """
    world = MachineWorld(trial.settings, trial.seed, note or _silent)
    for fault in trial.faults:
        world.agenda.at(fault.at_s, partial(_befall, world, trial, fault))
    world.run(until_s=trial.settings.calm_s + _PATIENCE_S)
    if not world.ended:
        raise Violation(f"the run did not end: {dict(world.syncer.context.waiting)}")
    doubted = {reason.value: count for reason, count in world.syncer.state.rejected.items() if reason in _DOUBTS}
    if doubted and FaultKind.LIE not in world.befell:
        raise Violation(f"an honest learner was not believed: {doubted}")
    for node in world.everybody:
        if node.alive and node.exit_code not in _expected_codes(world, node):
            raise Violation(f"{node.learner_id} ended with {node.exit_code}")
    return world


def _befall(world: MachineWorld, trial: Trial, fault: Fault) -> None:
    if befall(world, fault):
        world.befell[fault.kind] += 1
    elif trial.insists and not world.ended:
        world.agenda.after(_AGAIN_S, lambda: _befall(world, trial, fault))


def _silent(who: str, event: object, effects: Sequence[object]) -> None:
    """Nobody listens."""


def _expected_codes(world: MachineWorld, node: LearnerNode) -> tuple[int, ...]:
    """Who stands exits in peace; a fenced twin is refused, unless it hears of the run's end before.

    Who joins under a name that nobody listed may find all data lent, and is then started again.
    """
    state = world.syncer.state
    stands = node.machine.incarnation == state.incarnations.get(node.learner_id)
    # Of a life that was given on a disk that is lost the number may have been given again.
    stands = stands and state.life_ids.get(node.learner_id) == node.life_id
    codes = (EXIT_OK,) if stands else (EXIT_OK, EXIT_AUTH)
    return (*codes, EXIT_TEMPORARY) if node.learner_id in world.settings.joiners else codes


def _random_link(rng: random.Random) -> LinkProfile:
    return LinkProfile(
        step_s=rng.choice([0.5, 1.0, 1.0, 2.0]),
        delay_s=rng.choice([0.001, 0.05, 0.3, 1.5]),
        jitter_s=rng.choice([0.0, 0.1, 1.0]),
        upload_s=rng.choice([0.01, 0.5, 4.0, 12.0]),
    )


def _random_fault(rng: random.Random, settings: WorldSettings) -> Fault:
    fault = Fault(
        at_s=rng.uniform(0.0, settings.calm_s),
        kind=rng.choice(_KINDS),
        learner_id=rng.choice(settings.learners),
        lasts_s=rng.choice([0.0, 0.5, 3.0, 15.0]),
        amount=rng.randint(0, 20),
    )
    # A syncer that is back at once is a syncer that never left.
    return replace(fault, lasts_s=max(fault.lasts_s, 0.1))
