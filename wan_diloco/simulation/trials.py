"""Random runs with random faults: what the machines must survive, from one source of chance.

A trial's faults end at `calm_s`. Invariants hold throughout; after that the run must also come to its end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from wan_diloco.errors import EXIT_AUTH, EXIT_OK
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.simulation.checkers import Violation
from wan_diloco.simulation.learner_node import LearnerNode
from wan_diloco.simulation.machines import MachineWorld
from wan_diloco.simulation.world_settings import LinkProfile, WorldSettings
from wan_diloco.units import LearnerId

__all__ = ["Fault", "FaultKind", "Trial", "play", "random_trial"]

# The slowest trial drawn below needs about 40 steps of 2 s, and now and then an attempt's longest window.
_PATIENCE_S = 3000.0
# Refusals that only a wrong number earns.
_DOUBTS = (RefusalReason.IMPLAUSIBLE, RefusalReason.TOO_MANY_TOKENS)


class FaultKind(StrEnum):
    """What goes wrong."""

    CUT = "cut"
    KILL = "kill"
    HANG = "hang"
    TWIN = "twin"
    RESTART = "restart"
    CRASH = "crash"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_s: When.
        learner_id: Whom it befalls; of no meaning for the syncer's.
        lasts_s: How long: until a killed one is back, a hanging one wakes, the syncer starts again, or one
            end notices the cut.
        amount: At a cut, whether the syncer (0) or the learner (1) notices it late; at a crash, in the
            middle of how many effects from then.
    """

    at_s: float
    kind: FaultKind
    learner_id: LearnerId
    lasts_s: float
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run and what befalls it."""

    settings: WorldSettings
    faults: tuple[Fault, ...]
    seed: int


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


def play(trial: Trial) -> MachineWorld:
    """Play a trial to its end.

    Returns:
        The world as it was left, for those who want to know more.

    Raises:
        Violation: An invariant did not hold, or the run did not come to its end.
    """
    world = MachineWorld(trial.settings, trial.seed)
    for fault in trial.faults:
        world.agenda.at(fault.at_s, partial(_befall, world, fault))
    world.run(until_s=trial.settings.calm_s + _PATIENCE_S)
    if not world.ended:
        raise Violation(f"the run did not end: {dict(world.syncer.context.waiting)}")
    doubted = {reason.value: count for reason, count in world.syncer.state.rejected.items() if reason in _DOUBTS}
    if doubted:
        raise Violation(f"an honest learner was not believed: {doubted}")
    for node in world.everybody:
        if node.alive and node.exit_code not in _expected_codes(world, node):
            raise Violation(f"{node.learner_id} ended with {node.exit_code}")
    return world


def _expected_codes(world: MachineWorld, node: LearnerNode) -> tuple[int, ...]:
    """Who stands exits in peace; a fenced twin is refused, unless it hears of the run's end before."""
    stands = node.machine.incarnation == world.syncer.state.incarnations.get(node.learner_id)
    return (EXIT_OK,) if stands else (EXIT_OK, EXIT_AUTH)


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
        kind=rng.choice(list(FaultKind)),
        learner_id=rng.choice(settings.learners),
        lasts_s=rng.choice([0.0, 0.5, 3.0, 15.0]),
        amount=rng.randint(0, 20),
    )
    # A syncer that is back at once is a syncer that never left.
    return replace(fault, lasts_s=max(fault.lasts_s, 0.1))


def _befall(world: MachineWorld, fault: Fault) -> None:
    node = world.nodes[fault.learner_id]
    match fault.kind:
        case FaultKind.CUT if fault.amount % 2:
            world.cut(node, learner_notices_s=fault.lasts_s)
        case FaultKind.CUT:
            world.cut(node, syncer_notices_s=fault.lasts_s)
        case FaultKind.KILL if node.runs:
            world.kill(node)
            world.agenda.after(fault.lasts_s, lambda: _revive(world, node))
        case FaultKind.HANG:
            node.freeze(fault.lasts_s)
        case FaultKind.TWIN if node.runs:
            world.join(node.learner_id, node.link)
        case FaultKind.RESTART:
            world.restart_syncer(fault.lasts_s)
        case FaultKind.CRASH:
            world.doom_syncer(fault.amount, fault.lasts_s)
        case FaultKind.SNAPSHOT if world.syncer_up:
            world.disk.snapshot(world.syncer.state)
        case _:
            pass


def _revive(world: MachineWorld, node: LearnerNode) -> None:
    # Somebody may have started another process of it meanwhile.
    if world.nodes[node.learner_id] is node:
        world.revive(node)
